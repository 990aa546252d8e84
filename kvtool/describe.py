"""Describe: what a class says of its parameters, and where its name comes from."""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Callable
from typing import Any

from kvtool import plugins
from kvtool.errors import KvtoolError
from kvtool.registry import split_spec
from kvtool.shelf import Shelf


def spell_type(annotation: Any) -> str:
    """A parameter's type in the words of the command line."""
    if typing.get_origin(annotation) is typing.Annotated:
        return str(annotation.__metadata__[0])
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(str(choice) for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " | ".join(spell_type(member) for member in typing.get_args(annotation))
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def has_defaults(cls: type) -> bool:
    """Whether an instance can be made without parameters."""
    required = [f for f in dataclasses.fields(cls) if f.init]
    return all(f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING for f in required)


def words_of(cls: type) -> dict[str, Any]:
    """`idea` (the first paragraph), `text` and `parameters` of a policy or metric."""
    text = inspect.cleandoc(cls.__doc__ or "")
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        "idea": text.split("\n\n")[0].replace("\n", " "),
        "text": text,
        "parameters": [
            {
                "name": f.name,
                "type": spell_type(hints[f.name]),
                "default": _plain(f.default),
            }
            for f in dataclasses.fields(cls)
            if f.init
        ],
    }


def _plain(default: Any) -> Any:
    """A parameter's default as JSON can say it."""
    if default is dataclasses.MISSING:
        return None
    if isinstance(default, float) and not math.isfinite(default):
        return str(default)
    if isinstance(default, tuple | list):
        return [_plain(value) for value in default]
    return default if default is None or isinstance(default, bool | int | float | str) else str(default)


def described(
    shelf: Shelf, base: type, names: list[str] | None, say: Callable[[type], dict[str, Any]], unknown: dict[str, Any]
) -> list[dict[str, Any]]:
    """An entry for each of these names, or for every name on the shelf.

    Args:
        say: what is said of a class besides `name`, `from` and `fault`.
        unknown: the same of a class that cannot be loaded.

    Returns:
        `from` is the package (or packages) and version, or the file; `fault` says why the name cannot be used.

    Raises:
        KvtoolError: for a name that was asked for and cannot be used; in a list of all, its entry holds the fault.
    """
    entries = []
    for text in names or shelf.names():
        name = split_spec(text, shelf.noun).name if names else text
        entry: dict[str, Any] = {"name": name, **unknown, "from": None, "fault": None}
        try:
            if name not in shelf.table and (fault := shelf.fault(name)) is not None:
                raise fault
            # A name that others give too still shows what kvtool's own is.
            cls = shelf.load(name, base, own=not names)
            entry |= _said(shelf, name, cls, say)
            if (fault := shelf.fault(name)) is not None:
                raise fault
        except KvtoolError as error:
            if names:
                raise
            entry["fault"] = error.message
        entry["from"] = " and ".join(shelf.givers(name))
        entries.append(entry)
    return entries


def _said(shelf: Shelf, name: str, cls: type, say: Callable[[type], dict[str, Any]]) -> dict[str, Any]:
    """What `say` says of `cls`; where that fails, the package is named.

    Raises:
        KvtoolError: code `plugin-broken`.
    """
    try:
        return say(cls)
    except KvtoolError:
        raise
    except Exception as error:
        if name not in shelf.plugins:
            raise
        what = f"does not say what it is: {type(error).__name__}: {error}"
        raise plugins.broken(shelf.plugins[name][0], shelf.noun, what) from error
