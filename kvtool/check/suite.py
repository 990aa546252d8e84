"""Suite: what is checked, as a TOML file says it. Every key is known, or the file is refused."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.check.judge import Tolerance
from kvtool.check.suite_values import OPTIONS, OWN, flag, in_suite_words, text
from kvtool.check.undefined import counted_column
from kvtool.errors import KvtoolError
from kvtool.registry import did_you_mean

DEFAULT_METRICS = ("mean_layer_error", "mean_output_error", "predicted_kl")
TOP = ("baseline", "defaults", "jobs", "tolerances", "traces", "verify")


@dataclass(frozen=True)
class StoredTrace:
    """A trace that jobs name, and the digest that it must have."""

    name: str
    path: Path
    digest: str


@dataclass(frozen=True)
class Job:
    """One replay that is checked.

    Attributes:
        metrics: columns of cells, or of layers or query heads (then their mean over the cell), or metrics with all
            their columns.
        decisions: whether evict steps are compared too.
        options: keyword arguments of `kvtool.replay`, as far as they were given.
    """

    name: str
    trace: str
    policies: tuple[str, ...]
    metrics: tuple[str, ...]
    decisions: bool
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Suite:
    """A whole suite; `path` is the file as it was named, `folder` where its relative paths start, as an absolute path:
    that of the file itself, also where `path` is a link to it. `file_name` is that file's.
    `verify`: whether every byte of the traces is checked, not their lengths alone.
    """

    path: Path
    folder: Path
    file_name: str
    baseline: Path
    traces: Mapping[str, StoredTrace]
    jobs: tuple[Job, ...]
    tolerances: Mapping[str, Tolerance]
    verify: bool

    def tolerance(self, metric: str) -> Tolerance:
        """What a column is held against: its own tolerance, or the default; none at all for counts of undefined
        values that have no own."""
        fallback = self.tolerances["default"] if counted_column(metric) is None else Tolerance(0, 0)
        return self.tolerances.get(metric, fallback)

    def refuse_other_tolerances(self, columns: Iterable[str]) -> None:
        """A tolerance for what no job checks is a slip of the pen.

        Raises:
            KvtoolError: code `suite`.
        """
        known = sorted({"default", *columns})
        for name in self.tolerances:
            if name not in known:
                sentence = f"{self.path}: tolerances: no job has the column {name!r}"
                raise KvtoolError("suite", sentence, did_you_mean(name, known))

    def chosen(self, only: Iterable[str]) -> list[Job]:
        """The jobs of these names, all for none.

        Raises:
            KvtoolError: code `usage` for a name that no job has.
        """
        names = list(only)
        known = [job.name for job in self.jobs]
        for name in names:
            if name not in known:
                raise KvtoolError("usage", f"{self.path} has no job {name!r}", did_you_mean(name, known))
        return [job for job in self.jobs if not names or job.name in names]


def read_suite(path: str | Path) -> Suite:
    """Read and check a suite; nothing that it names is opened.

    Raises:
        KvtoolError: `file-missing`, or `suite` naming what is wrong.
    """
    file = Path(path)
    if not file.is_file():
        raise KvtoolError("file-missing", f"{file} is no suite file", "docs/ci.md shows one")
    try:
        document = tomllib.loads(file.read_bytes().decode("utf-8"))
    except (OSError, ValueError) as error:
        raise KvtoolError("suite", f"{file} is not TOML: {' '.join(str(error).split())}") from error
    return _Reader(file).suite(document)


class _Reader:
    """Reads one document, and says in which file something is wrong."""

    def __init__(self, file: Path) -> None:
        self._file = file
        real = file.resolve()
        self._folder, self._name = real.parent, real.name

    def _wrong(self, where: str, reason: str, hint: str | None = None) -> KvtoolError:
        return KvtoolError("suite", f"{self._file}: {where}{reason}", hint)

    def _table(self, value: Any, where: str, known: Iterable[str] | None = None) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._wrong(where, "is a table")
        for key in value if known is not None else ():
            if key not in list(known or ()):
                raise self._wrong(where, f"has no key {key!r}", did_you_mean(key, sorted(known or ())))
        return value

    def _value(self, read: Callable[[Any], Any], where: str, key: str, value: Any) -> Any:
        try:
            return read(value)
        except ValueError as error:
            raise self._wrong(where, f"{key} {error}") from None
        except KvtoolError as error:
            said = in_suite_words(error)
            raise self._wrong(where, f"{key}: {said.message}", said.hint) from None

    def _needed(self, table: Mapping[str, Any], where: str, key: str) -> Any:
        if key not in table:
            raise self._wrong(where, f"{key} is missing", "docs/ci.md shows a whole suite")
        return table[key]

    def suite(self, document: Mapping[str, Any]) -> Suite:
        top = self._table(document, "the suite ", TOP)
        linked = self._file.parent.resolve() != self._folder  # else the path as it was named reads better
        folder = self._folder if linked else self._file.parent
        baseline = folder / self._value(text, "", "baseline", self._needed(top, "", "baseline"))
        traces = {
            name: self._trace(name, value)
            for name, value in self._table(self._needed(top, "", "traces"), "traces ").items()
        }
        defaults = self._table(top.get("defaults", {}), "defaults ", [key for key in (*OWN, *OPTIONS) if key != "name"])
        entries = self._needed(top, "", "jobs")
        if not isinstance(entries, list) or not entries:
            raise self._wrong("", "jobs is a list of tables, [[jobs]], with something in it")
        jobs = tuple(self._job(n, defaults, self._table(entry, "a job ")) for n, entry in enumerate(entries, 1))
        for number, job in enumerate(jobs):
            if job.trace not in traces:
                raise self._wrong(
                    f"job {job.name!r}: ", f"there is no trace {job.trace!r}", did_you_mean(job.trace, sorted(traces))
                )
            if job.name in [other.name for other in jobs[:number]]:
                raise self._wrong("", f"two jobs are called {job.name!r}", "the baseline knows jobs by their names")
        tolerances = self._tolerances(self._table(top.get("tolerances", {}), "tolerances "))
        verify = self._value(flag, "", "verify", top.get("verify", False))
        return Suite(self._file, self._folder, self._name, baseline, traces, jobs, tolerances, verify)

    def _trace(self, name: str, value: Any) -> StoredTrace:
        where = f"trace {name!r}: "
        table = self._table(value, f"trace {name!r} ", ("digest", "path"))
        digest = self._value(text, where, "digest", self._needed(table, where, "digest"))
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise self._wrong(where, "digest is 64 hex digits", "kvtool inspect shows it")
        path = self._folder / self._value(text, where, "path", self._needed(table, where, "path"))
        return StoredTrace(name, path, digest)

    def _job(self, number: int, defaults: Mapping[str, Any], own: Mapping[str, Any]) -> Job:
        sizes = ("ratios", "budgets")
        sized = any(key in own for key in sizes)  # a job's own budgets stand instead of ratios for all, not beside them
        table = {**{key: value for key, value in defaults.items() if not (sized and key in sizes)}, **own}
        name = self._value(text, f"job {number}: ", "name", self._needed(table, f"job {number}: ", "name"))
        where = f"job {name!r}: "
        self._table(table, f"job {name!r} ", (*OWN, *OPTIONS))
        if "ratios" in table and "budgets" in table:
            raise self._wrong(where, "ratios and budgets were both given", "give one: shares evicted, or tokens kept")
        known = {**OWN, **OPTIONS}
        found = {key: self._value(known[key], where, key, value) for key, value in table.items()}
        for key in ("trace", "policies"):
            self._needed(found, where, key)
        return Job(
            name=name,
            trace=found["trace"],
            policies=found["policies"],
            metrics=tuple(dict.fromkeys(found.get("metrics", DEFAULT_METRICS))),
            decisions=found.get("decisions", True),
            options={key: found[key] for key in OPTIONS if key in found},
        )

    def _tolerances(self, table: Mapping[str, Any]) -> dict[str, Tolerance]:
        found = {"default": Tolerance()}
        for name in sorted(table, key=lambda name: name != "default"):
            where = f"tolerances: {name}: "
            parts = self._table(table[name], f"tolerances: {name} ", ("absolute", "relative"))
            for key, value in parts.items():
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if not number or not 0 <= value < math.inf:
                    raise self._wrong(where, f"{key} is a number from 0 on")
            base = found["default"]
            found[name] = Tolerance(
                float(parts.get("relative", base.relative)), float(parts.get("absolute", base.absolute))
            )
        return found
