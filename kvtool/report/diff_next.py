"""What a reader of a comparison may want to run next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from kvtool.report.diff_order import worsening


def next_command(document: Mapping[str, Any]) -> str:
    """A command that compares what this one compared, more closely, and what it is for.

    Args:
        document: `kvtool.diff/1`.
    """
    a, b = document["a"], document["b"]
    if not document["groups"]:
        return f"kvtool diff {shlex.quote(str(a['label']))} OTHER holds it against another run"
    by = document.get("by")
    if by:
        sides = " ".join(shlex.quote(str(side["label"])) for side in (a, b))
        return f"kvtool diff {sides} --by {','.join(by)} --markdown is for a pull request"
    worst = min(document["groups"], key=worsening)
    sides = " ".join(shlex.quote(f"{side['path']}::{_selector(worst, end)}") for side, end in ((a, "a"), (b, "b")))
    return f"kvtool diff {sides} --by layer tells every layer apart"


def _selector(group: Mapping[str, Any], side: str) -> str:
    """What picks exactly that side of the group from its result: policy, what was asked, and schedule, each named
    even where it is the usual one, since the result may hold others."""
    ratio, budget, schedule = (
        group.get(f"{name}_b", group.get(name)) if side == "b" else group.get(name)
        for name in ("ratio", "budget", "schedule")
    )
    label = group.get("policy", group.get(f"policy_{side}"))
    asked = repr(float(ratio)) if ratio is not None else "" if budget is None else str(budget)
    return f"{label}@{asked}@{schedule}" if schedule else f"{label}@{asked}".removesuffix("@")
