"""Shelf: where the names of policies, or of metrics, lead: into kvtool, another package, or a file."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtool import plugins
from kvtool.errors import KvtoolError
from kvtool.files import located
from kvtool.manifest import parameters, remember_source, source_digest
from kvtool.registry import Spec, configure, did_you_mean


@dataclasses.dataclass(frozen=True)
class Shelf:
    """Where the words of one noun lead.

    Attributes:
        noun: `policy` or `metric`.
        table: the built-in names, each `module:Class`.
        refused: name -> why no package may give it.
    """

    noun: str
    table: Mapping[str, str]
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def plugins(self) -> dict[str, tuple[plugins.Plugin, ...]]:
        """What other packages give, whether it can be used or not."""
        return plugins.find(plugins.GROUPS[self.noun])

    def names(self) -> list[str]:
        """Every name there is, kvtool's own first."""
        return [*self.table, *(name for name in self.plugins if name not in self.table)]

    def givers(self, name: str) -> list[str]:
        """Every package that gives `name`, as `package version`; the file where it is a file's class."""
        file, python, _ = name.partition(".py:")
        if python:
            return [file + ".py"]
        own = [f"kvtool {kvtool_version()}"] if name in self.table else []
        return own + [str(plugin) for plugin in self.plugins.get(name, ())]

    def package(self, name: str) -> dict[str, str] | None:
        """{"name", "version"} of the package that `name` leads to; None for a file's class."""
        if name in self.table:
            return {"name": "kvtool", "version": kvtool_version()}
        return next(({"name": p.package, "version": p.version} for p in self.plugins.get(name, ())), None)

    def fault(self, name: str) -> KvtoolError | None:
        """Why `name` cannot be used although packages give it, before anything is loaded."""
        given = self.plugins.get(name, ())
        if not given:
            return None
        if (reason := self.refused.get(name.lower()) or plugins.untypable(name)) is not None:
            return plugins.broken(given[0], self.noun, f"cannot be used: {reason}")
        if len(givers := self.givers(name)) > 1:
            return KvtoolError("plugin-twice", f"{self.noun} {name} is given by {' and by '.join(givers)}")
        return None

    def load(self, name: str, base: type, *, own: bool = False) -> type:
        """The dataclass, a subclass of `base`, behind a built-in name, a plug-in's name, or `file.py:Class`.

        Args:
            own: the name means kvtool's own, whoever else gives it.

        Raises:
            KvtoolError: `policy-unknown` (or `metric-unknown`), `file-missing`, `plugin-twice` or `plugin-broken`.
        """
        head, _, class_name = name.partition(":")
        if head.endswith(".py"):
            return _from_file(Path(head), class_name, self.noun)
        if (fault := self.fault(name)) is not None and not (own and name in self.table):
            raise fault
        if name in self.table:
            module, _, attribute = self.table[name].partition(":")
            built_in: type = getattr(importlib.import_module(module), attribute)
            return built_in
        if name in self.plugins:
            (plugin,) = self.plugins[name]
            found = plugins.load(plugin, self.noun)
            if not isinstance(found, type) or not issubclass(found, base):
                what = f"leads to {plugin.value}, which is no subclass of {_public(base)}"
                raise plugins.broken(plugin, self.noun, what)
            source_digest(found)  # of what was loaded just now
            return found
        known = did_you_mean(name, sorted(self.names()))
        known += "; plug-ins are switched off" if plugins.disabled() else ""
        raise KvtoolError(f"{self.noun}-unknown", f"there is no {self.noun} {name!r}", known)

    def made(self, spec: Spec, base: type, *, own: bool = False) -> Any:
        """An instance of what `spec` names, with its parameters.

        Raises:
            KvtoolError: as `load` and `configure`; a plug-in that fails otherwise is `plugin-broken`, a file's class
                `policy-broken` (or `metric-broken`), and so is a parameter that no manifest can hold.
        """
        cls = self.load(spec.name, base, own=own)
        try:
            made = configure(cls, spec, self.noun)
        except KvtoolError:
            raise
        except (Exception, SystemExit) as error:
            if spec.name in self.table:
                raise
            what = f"cannot be made: {type(error).__name__}: {error}"
            if spec.name in self.plugins:
                raise plugins.broken(self.plugins[spec.name][0], self.noun, what) from error
            raise self._broken(spec.name, what) from error
        if not isinstance(made, base):
            raise KvtoolError(f"{self.noun}-unknown", f"{spec.name} is not a subclass of {_public(base)}")
        try:
            parameters(made)
        except TypeError as error:
            raise self._broken(spec.name, f"cannot be used: {error}") from error
        return made

    def _broken(self, name: str, what: str) -> KvtoolError:
        package = self.package(name)
        of = "" if package is None else f" of package {package['name']} {package['version']}"
        return KvtoolError(f"{self.noun}-broken", f"{self.noun} {name}{of} {' '.join(what.split())}")


def _public(base: type) -> str:
    """Where a class is to be imported from: the package of its module."""
    return f"{base.__module__.rpartition('.')[0]}.{base.__name__}"


def kvtool_version() -> str:
    """Of this kvtool."""
    from kvtool import __version__

    return __version__


def _from_file(path: Path, class_name: str, noun: str) -> type:
    code = f"{noun}-unknown"
    if not class_name:
        raise KvtoolError(code, f"{path} needs a class behind it", f"write {path}:ClassName")
    place = located(path)
    if not place.is_file():
        raise KvtoolError("file-missing", f"{path} does not exist")
    try:
        source = place.read_bytes()
    except OSError as error:
        raise KvtoolError("file-missing", f"{path} cannot be read: {error.strerror}") from error
    # One module per file and content: two files of one name, or a file before and after an edit, are two modules.
    name = hashlib.sha256(f"{noun} {place.resolve()} ".encode(errors="surrogateescape") + source)
    module = types.ModuleType(f"kvtool_file_{name.hexdigest()}")
    module.__file__ = str(place.resolve())
    sys.modules[module.__name__] = module  # dataclasses look their module up there
    try:
        # The very bytes whose digest is kept are run: an import would read again, or take an older compiled file.
        exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        sys.modules.pop(module.__name__, None)
        raise KvtoolError(code, f"{path} failed to load: {type(error).__name__}: {error}") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        raise KvtoolError(code, f"{path} holds no {noun} dataclass {class_name!r}")
    cls: type = found
    elsewhere = sys.modules.get(cls.__module__)
    if elsewhere is not module and getattr(elsewhere, cls.__name__, None) is cls:
        source_digest(cls)  # the file only imports it
    else:
        remember_source(cls, source)
    return cls
