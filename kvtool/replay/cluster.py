"""Cluster: units done by the workers of a Dask cluster that somebody else has started.

Parts go to the output folder, which all workers must see; only their names come back. What a worker has written is
not lost with it, and a unit that is done twice is the same part under the same key.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.files import writing
from kvtool.manifest import versions
from kvtool.replay.order import Order, Unit, do_unit
from kvtool.replay.parts import Store

TIMEOUT_S = 8  # to reach the scheduler
RETRIES = 3  # of a unit whose worker dies
SAME = ("python", "kvtool", "torch")  # versions that decide numbers


def expect_distributed() -> None:
    """Complain where `distributed` is not installed.

    Raises:
        KvtoolError: code `package-missing`.
    """
    if find_spec("distributed") is None:
        raise KvtoolError(
            "package-missing", "--cluster needs the package distributed", "pip install 'kvtool[cluster]', workers too"
        )


class Cluster:
    """The workers behind the scheduler at `address`.

    Args:
        store: the parts, opened by this process, in a folder that the workers see.
        note: told in a sentence how many workers there are.
    """

    def __init__(self, order: Order, address: str, store: Store, note: Callable[[str], None]) -> None:
        self._order, self._address, self._store, self._note = order, address, store, note

    def run(self, units: list[Unit], done: Callable[[Unit], None]) -> None:
        """Do all units.

        Raises:
            KvtoolError: what a unit raises, as it would here (of the first such one that comes back); `cluster`,
                `worker-differs`, `worker-lost`. Parts that are finished stay.
        """
        if not units:
            return
        with self._client() as client:
            self._check(client)
            self._run(client, units, done)

    def _run(self, client: Any, units: list[Unit], done: Callable[[Unit], None]) -> None:
        from distributed import KilledWorker, as_completed
        from distributed.client import FutureCancelledError

        asked = {}
        for unit in units:
            key = f"kvtool-{unit.name}-{unit.key[:24]}-{secrets.token_hex(4)}"
            asked[client.submit(do_unit, self._order, unit, key=key, retries=RETRIES, pure=False)] = unit
        try:
            for future in as_completed(asked, loop=client.loop):
                unit = asked[future]
                try:
                    kind, what = future.result()
                except KilledWorker:
                    raise KvtoolError(
                        "worker-lost",
                        f"{unit}: every worker that computed it died",
                        "clusters end processes whose memory runs out: give each more; what is finished stays in -o",
                    ) from None
                except (FutureCancelledError, OSError) as error:
                    raise KvtoolError(
                        "cluster", f"the scheduler at {self._address} went away", "the same command goes on from here"
                    ) from error
                if kind == "error":
                    raise KvtoolError(*what)
                done(unit)
        except BaseException:
            with contextlib.suppress(Exception):  # the scheduler may be what has failed
                client.cancel(list(asked), force=True)
            raise

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        """A connection to the scheduler.

        Raises:
            KvtoolError: code `cluster`.
        """
        from distributed import Client
        from distributed.comm.addressing import get_address_host

        # What it logs while it tries again and again would drown the one sentence.
        loggers = [logging.getLogger(name) for name in ("distributed", "distributed.client", "distributed.comm")]
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        client = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of versions: those that matter are compared below
                try:
                    get_address_host(self._address)  # a client of no known protocol would never close
                    client = Client(self._address, timeout=TIMEOUT_S, set_as_default=False)
                except (OSError, ValueError, TimeoutError) as error:
                    raise KvtoolError(
                        "cluster",
                        f"there is no Dask scheduler at {self._address}: {_brief(error)}",
                        "dask scheduler prints its address, such as tcp://10.0.0.1:8786",
                    ) from error
                yield client
        finally:
            if client is not None:
                with contextlib.suppress(Exception):
                    client.close(timeout=2)
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)

    def _check(self, client: Any) -> None:
        """Hold every worker against this process: versions, the trace, and the folder of the parts.

        Workers that join later find the same faults in their first unit.

        Raises:
            KvtoolError: code `worker-differs`, naming one worker.
        """
        word = secrets.token_hex(16)
        probe = self._store.folder.absolute() / f"probe-{secrets.token_hex(4)}"
        with writing(probe):
            probe.write_text(word)
        try:
            found = client.run(_looking(str(probe), self._order.trace, self._order.online), on_error="return")
        finally:
            probe.unlink(missing_ok=True)
        mine = versions("torch")
        for worker, seen in found.items():
            if isinstance(seen, BaseException):
                raise KvtoolError("worker-differs", f"worker {worker} cannot be asked: {_brief(seen)}")
            for package in SAME:
                if seen[package] != mine[package]:
                    raise KvtoolError(
                        "worker-differs",
                        f"worker {worker} has {package} {seen[package] or '(not installed)'}, this process "
                        f"{mine[package]}",
                        "install the same versions everywhere: numbers may depend on them",
                    )
            if seen["probe"] != word:
                raise KvtoolError(
                    "worker-differs",
                    f"worker {worker} does not see the folder {self._store.output}",
                    "-o must be one folder that this machine and all workers see under the same path",
                )
            if seen["trace"] != self._order.trace_digest:
                raise KvtoolError(
                    "worker-differs",
                    f"worker {worker} does not find this trace at {self._order.trace}: {seen['trace']}",
                    "the trace must lie where all workers see it under the same path",
                )
        said = (
            f"{len(found)} worker{'s' if len(found) > 1 else ''}"
            if found
            else "no workers yet: it waits for them (Ctrl-C stops)"
        )
        self._note(f"the cluster at {self._address} has {said}")


def _looking(probe: str, trace: str, online: bool) -> Callable[[], dict[str, str | None]]:
    """What a worker is to answer about itself. A function inside a function travels as code, so that it runs also
    where kvtool is not installed."""

    def look() -> dict[str, str | None]:
        import importlib.metadata
        import pathlib
        import platform

        seen: dict[str, str | None] = {"python": platform.python_version(), "probe": None, "trace": "not looked for"}
        for package in ("kvtool", "torch"):
            try:
                seen[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                seen[package] = None
        try:
            seen["probe"] = pathlib.Path(probe).read_text()
        except OSError as error:
            seen["probe"] = str(error)
        if seen["kvtool"] is not None:
            try:
                from kvtool.trace import open_trace

                seen["trace"] = open_trace(trace, online=online).digest
            except Exception as error:
                seen["trace"] = str(error)
        return seen

    return look


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
