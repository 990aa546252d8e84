"""What each policy says of itself, for `kvtool policies` and the documentation's tests."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from typing import Any

from kvtool.policies.policy import Policy
from kvtool.policies.table import BUILT_IN
from kvtool.registry import load_class, split_spec


def _spell(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Annotated:
        return str(annotation.__metadata__[0])
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(str(choice) for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " | ".join(_spell(member) for member in typing.get_args(annotation))
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _has_defaults(cls: type[Policy]) -> bool:
    required = [f for f in dataclasses.fields(cls) if f.init]
    return all(f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING for f in required)


def describe_policies(names: list[str] | None = None) -> list[dict[str, Any]]:
    """Name, idea, documentation, traits and parameters of the named policies, or of all built-in ones.

    Raises:
        KvtoolError: `policy-unknown`.
    """
    described = []
    for name in names or BUILT_IN:
        spec = split_spec(name)
        cls: type[Policy] = load_class(spec.name, BUILT_IN, "policy")
        text = inspect.cleandoc(cls.__doc__ or "")
        hints = typing.get_type_hints(cls, include_extras=True)
        described.append(
            {
                "name": spec.name,
                "idea": text.split("\n\n")[0].replace("\n", " "),
                "text": text,
                # both may depend on parameters, so that only an instance knows
                "oracle": cls().oracle if _has_defaults(cls) else cls.oracle is True,
                "needs": list(cls().needs) if _has_defaults(cls) else [],
                "parameters": [
                    {
                        "name": f.name,
                        "type": _spell(hints[f.name]),
                        "default": None if f.default is dataclasses.MISSING else f.default,
                    }
                    for f in dataclasses.fields(cls)
                    if f.init
                ],
            }
        )
    return described
