"""What each policy says of itself, for `kvtool policies` and the documentation's tests."""

from __future__ import annotations

from typing import Any

from kvtool.describe import described, has_defaults, words_of
from kvtool.policies.policy import Policy
from kvtool.policies.table import SHELF

_UNKNOWN: dict[str, Any] = {"idea": "", "text": "", "oracle": None, "needs": [], "parameters": []}


def describe_policies(names: list[str] | None = None) -> list[dict[str, Any]]:
    """Name, idea, documentation, traits and parameters of the named policies, or of all: kvtool's and plug-ins.

    Returns:
        One entry a policy. `from` is the package and version, or the file. In a list of all, `fault` says why a name
        cannot be used, and is None where it can.

    Raises:
        KvtoolError: `policy-unknown`, `plugin-broken` or `plugin-twice` for a name that was asked for.
    """
    return described(SHELF, Policy, names, _of, _UNKNOWN)


def _of(cls: type[Policy]) -> dict[str, Any]:
    words = words_of(cls)
    return {
        "idea": words["idea"],
        "text": words["text"],
        # both may depend on parameters, so that only an instance knows
        "oracle": cls().oracle if has_defaults(cls) else cls.oracle is True,
        "needs": list(cls().needs) if has_defaults(cls) else [],
        "parameters": words["parameters"],
    }
