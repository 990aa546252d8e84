"""Plug-ins: policies and metrics of other installed packages, found by their entry points.

    [project.entry-points."kvtool.policies"]
    my-policy = "my_package.my_policy:MyPolicy"

Finding reads the metadata of installed packages only. Nothing of a package is imported until one of its names is used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool.errors import KvtoolError

if TYPE_CHECKING:
    from importlib.metadata import Distribution

GROUPS = {"policy": "kvtool.policies", "metric": "kvtool.metrics"}
ENVIRONMENT = "KVTOOL_NO_PLUGINS"
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

_switched_off = False


@dataclass(frozen=True)
class Plugin:
    """One entry point.

    Attributes:
        name: the word to type.
        value: `module:Class`.
        package, version: of the distribution that declares it.
    """

    name: str
    value: str
    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


def switch_off(off: bool = True) -> None:
    """Find no plug-ins from here on (or find them again), as `kvtool --no-plugins` does."""
    global _switched_off
    _switched_off = off


@contextlib.contextmanager
def switched_off(off: bool = True) -> Iterator[None]:
    """No plug-ins inside, if `off`; as before afterwards."""
    before = _switched_off
    switch_off(before or off)
    try:
        yield
    finally:
        switch_off(before)


def disabled() -> bool:
    """Whether plug-ins are left out: by `switch_off`, or by KVTOOL_NO_PLUGINS=1 in the environment."""
    return _switched_off or os.environ.get(ENVIRONMENT, "").strip().lower() not in ("", "0", "false", "no", "off")


def find(group: str) -> dict[str, tuple[Plugin, ...]]:
    """Name -> every package's plug-in of that name, usually one; empty where plug-ins are disabled.

    Args:
        group: `kvtool.policies` or `kvtool.metrics`.
    """
    found: dict[str, tuple[Plugin, ...]] = {}
    if not disabled():
        for plugin in _installed(tuple(sys.path))[0].get(group, ()):
            others = found.get(plugin.name, ())
            if plugin not in others:
                found[plugin.name] = (*others, plugin)
    return dict(sorted(found.items()))


def unreadable() -> tuple[str, ...]:
    """A sentence for every package that means to plug into kvtool and whose entry points cannot be read."""
    return () if disabled() else _installed(tuple(sys.path))[1]


def untypable(name: str) -> str | None:
    """Why `name` cannot be given as a policy or metric, None where it can."""
    if name.lower() == "all":
        return "`all` stands for kvtool's own"
    if not _WORD.fullmatch(name) or name.endswith((".py", ".txt")):
        return "a name has letters, digits, `-`, `_` and `.` only"
    return None


def load(plugin: Plugin, noun: str) -> object:
    """What the entry point names.

    What the package prints while it is imported goes to stderr: stdout carries answers only.

    Raises:
        KvtoolError: code `plugin-broken` naming the package.
    """
    module, _, path = plugin.value.partition(":")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found: object = importlib.import_module(module.strip())
            for part in filter(None, path.split("[")[0].strip().split(".")):
                found = getattr(found, part)
    except (Exception, SystemExit) as error:
        raise broken(plugin, noun, f"cannot be loaded: {type(error).__name__}: {error}") from error
    return found


def broken(plugin: Plugin, noun: str, what: str) -> KvtoolError:
    """The error for a plug-in that is not what it says."""
    return KvtoolError("plugin-broken", f"{noun} {plugin.name} of package {plugin} {' '.join(what.split())}")


@functools.lru_cache(maxsize=8)
def _installed(path: tuple[str, ...]) -> tuple[dict[str, list[Plugin]], tuple[str, ...]]:
    """(plug-ins by group, faults) of what is installed on `path`; of one package found twice, the first counts.

    Packages are read one by one, so that broken metadata of one hides no other.
    """
    from importlib.metadata import distributions

    found: dict[str, list[Plugin]] = {}
    faults: list[str] = []
    seen: set[str] = set()
    texts: list[tuple[Distribution, str]] = []
    for distribution in distributions(path=list(path)):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            texts.append((distribution, distribution.read_text("entry_points.txt") or ""))
    if not any(group in text for _, text in texts for group in GROUPS.values()):
        return {}, ()  # the usual case: who is who need not be read, which is slow
    for distribution, text in texts:
        package = _said(distribution, "Name")
        known = re.sub(r"[-_.]+", "-", package).lower()
        if known in seen:
            continue
        seen.add(known)
        if not any(group in text for group in GROUPS.values()):
            continue
        version = _said(distribution, "Version")
        try:
            entries = [(e.group, Plugin(e.name, e.value, package, version)) for e in distribution.entry_points]
        except Exception as error:
            faults.append(f"package {package} {version}: its entry points cannot be read: {error}")
            continue
        for group, plugin in entries:
            found.setdefault(group, []).append(plugin)
    return found, tuple(faults)


def _said(distribution: Distribution, field: str) -> str:
    """A field of the package's metadata, the name of its folder standing in where that cannot be read."""
    with contextlib.suppress(Exception):
        if value := distribution.metadata[field]:
            return str(value)
    folder = getattr(distribution, "_path", None)
    name, _, version = getattr(folder, "name", "").removesuffix(".dist-info").rpartition("-")
    return (name if field == "Name" else version) or "unknown"
