"""Registry: how a command-line word becomes a configured policy or metric; kvtool.shelf says where its name leads."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any

from kvtool.errors import KvtoolError

LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Spec:
    """`name:key=value,key=value`, split but not yet typed."""

    name: str
    parameters: Mapping[str, str]


def split_spec(text: str, noun: str = "policy") -> Spec:
    """Parse `name:key=value,…` or `path/to/file.py:Class:key=value,…`. Values may hold colons."""
    text = text.strip()
    head, _, rest = text.partition(":")
    if head.endswith(".py"):
        cls, _, rest = rest.partition(":")
        head = f"{head}:{cls}"
    elif "/" in head or head.endswith(".txt"):
        raise KvtoolError(f"{noun}-unknown", f"{head} is no Python file", f"a {noun} of your own is file.py:Class")
    parameters: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise KvtoolError(f"{noun}-parameter", f"{part!r} in {text!r} is not key=value")
        if key.strip() in parameters:
            raise KvtoolError(f"{noun}-parameter", f"{key.strip()} is given twice in {text!r}")
        parameters[key.strip()] = value.strip()
    return Spec(head.strip(), parameters)


def did_you_mean(word: str, known: list[str]) -> str:
    """A hint naming the nearest known words and all of them."""
    near = difflib.get_close_matches(word, known, n=1)
    return (f"did you mean {near[0]}? " if near else "") + "known: " + ", ".join(known)


def _typed(value: str, annotation: Any) -> Any:
    """`value` as the dataclass field's type: bool, int, float, str, Literal, or one of those or None."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        choices = typing.get_args(annotation)
        for choice in choices:
            if value == str(choice):
                return choice
        raise ValueError("one of " + ", ".join(str(c) for c in choices))
    if origin in (typing.Union, types.UnionType):
        members = typing.get_args(annotation)
        if value.lower() == "none" and type(None) in members:
            return None
        reasons = []
        for member in members:
            if member is type(None):
                continue
            try:
                return _typed(value, member)
            except ValueError as error:
                reasons.append(str(error))
        raise ValueError(" or ".join(reasons))
    if annotation is bool:
        words = {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }
        if value.lower() not in words:
            raise ValueError("true or false")
        return words[value.lower()]
    if annotation in (int, float):
        try:
            number = annotation(value)
        except ValueError:
            raise ValueError("a whole number" if annotation is int else "a number") from None
        if annotation is int and abs(number) > LARGEST:
            raise ValueError(f"at most {LARGEST}")
        if not -float("inf") < number < float("inf"):
            raise ValueError("a finite number")
        return number
    return value


def configure(cls: type, spec: Spec, noun: str = "policy") -> Any:
    """Build the dataclass `cls` from the words of `spec`.

    Raises:
        KvtoolError: code `policy-parameter` (or `metric-parameter`); a wrong key lists the right ones.
    """
    code = f"{noun}-parameter"
    hints = typing.get_type_hints(cls)
    fields = {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}
    arguments = {}
    for key, text in spec.parameters.items():
        if key not in fields:
            raise KvtoolError(
                code,
                f"{spec.name} has no parameter {key!r}",
                did_you_mean(key, sorted(fields)) if fields else f"{spec.name} takes no parameters",
            )
        try:
            arguments[key] = _typed(text, fields[key])
        except ValueError as error:
            raise KvtoolError(code, f"{spec.name}: {key}={text} should be {error}") from None
    for f in dataclasses.fields(cls):
        missing = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if f.init and missing and f.name not in arguments:
            raise KvtoolError(code, f"{spec.name} needs {f.name}", f"write {spec.name}:{f.name}=…")
    try:
        return cls(**arguments)
    except ValueError as error:
        raise KvtoolError(code, f"{spec.name}: {error}") from None


def spell(name: str, value: Any) -> str:
    """The shortest spec that `configure` turns back into `value`: defaults are left out."""
    changed = []
    for f in dataclasses.fields(value):
        if not f.init:
            continue
        current = getattr(value, f.name)
        if f.default is dataclasses.MISSING or current != f.default:
            changed.append(f"{f.name}={str(current).lower() if isinstance(current, bool) else current}")
    return name + (":" + ",".join(changed) if changed else "")
