"""Sides: what "A" and "B" are: a result, or what a selector picks from one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.registry import did_you_mean, split_spec
from kvtool.result import LIVE, SCHEMA, Result
from kvtool.trace.layout import COMMIT

COMPARABLE = (SCHEMA, LIVE)
CONTROLS = ("full", "random")  # run in every replay; they choose no policy for anybody
Source = str | Path | Result | tuple[Result, str]
SPELLING = "write RESULT::policy@0.75, RESULT::policy@256@every:64 or RESULT::@0.75"


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a comparison.

    Attributes:
        path, selector: as they were given; None for a result in memory, for the whole of it.
        policy, ratio, budget, schedule: what is selected, None where everything is.
    """

    result: Result
    path: str | None = None
    selector: str | None = None
    policy: str | None = None
    ratio: float | None = None
    budget: int | None = None
    schedule: str | None = None

    @property
    def pins(self) -> dict[str, Any]:
        """Component -> selected value: `policy`, `asked` (ratio, budget), `schedule`."""
        asked = None if self.ratio is None and self.budget is None else (self.ratio, self.budget)
        found = {"policy": self.policy, "asked": asked, "schedule": self.schedule}
        return {name: value for name, value in found.items() if value is not None}

    def has(self, component: str) -> list[Any]:
        """The values of that component in the cells, each once."""
        cells = self.result.tables["cells"]
        columns = ("ratio", "budget") if component == "asked" else (component,)
        values = zip(*(cells.column(name).to_pylist() for name in columns), strict=True)
        return list(dict.fromkeys(value if component == "asked" else value[0] for value in values))

    def pinned(self, component: str, value: Any) -> Side:
        """The same side with one more component selected."""
        if component == "asked":
            return replace(self, ratio=value[0], budget=value[1])
        return replace(self, **{component: value})

    @property
    def spelled(self) -> str:
        """What is selected, as it would be typed."""
        asked = f"{self.ratio:g}" if self.ratio is not None else "" if self.budget is None else str(self.budget)
        return "@".join([self.policy or "", *filter(None, (asked, self.schedule))])

    @property
    def label(self) -> str:
        """How sentences call it."""
        said = self.path or "a result"
        return f"{said}::{self.selector}" if self.selector else said

    def describe(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "selector": self.selector,
            "label": self.label,
            "schema": self.result.schema,
            "trace_digest": self.result.manifest["trace"]["digest"],
        }


def side_of(given: Source, name: str) -> Side:
    """The side that `RESULT`, `RESULT::SELECTOR`, a Result or (Result, selector) means; `name` is A or B.

    Raises:
        KvtoolError: `file-missing`, `result-damaged`, or `usage` for a trace, an empty path, and a selector without
            content or that fits nothing.
    """
    path: str | None = None
    if isinstance(given, Result):
        result, selector = given, ""
    elif isinstance(given, tuple):
        result, selector = given
    else:
        text = str(given)
        path, mark, selector = (text, "", "") if text and Path(text).exists() else text.partition("::")
        if not path.strip():
            raise KvtoolError("usage", f"{name} names no result: {text!r} has no folder", SPELLING)
        if mark and not selector:
            raise _without_content(text, name)
        if (Path(path) / COMMIT).is_file():
            raise KvtoolError("usage", f"{name} ({path}) is a trace, no result", "--traces compares two traces")
        result = Result.load(path)
    if result.schema not in COMPARABLE:
        raise KvtoolError(
            "usage", f"{name} is a {result.schema}, which has no rows to compare", f"compared: {', '.join(COMPARABLE)}"
        )
    return _selected(Side(result, path, selector or None), selector, name)


def _selected(side: Side, selector: str, name: str) -> Side:
    if not selector:
        return side
    if not selector.strip("@ "):
        raise _without_content(side.label, name)
    labels: list[str] = side.has("policy")
    whole = [label for label in labels if selector == label or selector.startswith(f"{label}@")]
    word = max(whole, key=len) if whole else selector.partition("@")[0]
    rest = selector[len(word) :].removeprefix("@")
    if word:
        side = side.pinned("policy", _label(word, labels, side, name))
    asked, _, schedule = rest.partition("@")
    if asked:
        side = side.pinned("asked", _asked(asked, side, name))
    if schedule:
        known: list[str] = side.has("schedule")
        if schedule not in known:
            raise KvtoolError("usage", f"{name} holds no schedule {schedule!r}", did_you_mean(schedule, known))
        side = side.pinned("schedule", schedule)
    for component in ("asked", "schedule"):
        _holds_some(side, name, component)
    return side


def _without_content(text: str, name: str) -> KvtoolError:
    return KvtoolError("usage", f"the selector of {name} selects nothing: {text!r}", f"{SPELLING}, or RESULT alone")


def _label(word: str, labels: list[str], side: Side, name: str) -> str:
    """The label that `word` is, or the only one of that policy."""
    if word in labels:
        return word
    named = [label for label in labels if split_spec(label).name == word]
    if len(named) == 1:
        return named[0]
    if named:
        raise KvtoolError("usage", f"{name} holds several {word}", "choose one: " + "  ".join(named))
    raise KvtoolError("usage", f"{name} ({side.label}) holds no policy {word!r}", did_you_mean(word, labels))


def _asked(text: str, side: Side, name: str) -> tuple[float | None, int | None]:
    """`0.75` as a ratio, `256` as a budget in tokens."""
    try:
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise KvtoolError("usage", f"{text!r} in the selector of {name} is no ratio and no budget", SPELLING) from None
    if number < 0 or (number >= 1 and number.denominator != 1):
        raise KvtoolError("usage", f"{text} in the selector of {name} is no ratio below 1 and no whole budget")
    value = (float(number), None) if number < 1 else (None, int(number))
    known = side.has("asked")
    if value not in known:
        there = ", ".join(f"{ratio:g}" if ratio is not None else str(budget) for ratio, budget in known)
        raise KvtoolError("usage", f"{name} ({side.label}) was not asked for {text}", f"it holds {there}")
    return value


def _holds_some(side: Side, name: str, component: str) -> None:
    """Whether the cells have all that was selected together."""
    chosen = {"policy": side.policy, "schedule": side.schedule}
    cells = side.result.tables["cells"]
    columns = {key: cells.column(key).to_pylist() for key in ("policy", "ratio", "budget", "schedule")}
    for policy, ratio, budget, schedule in zip(*columns.values(), strict=True):
        asked = "asked" not in side.pins or (ratio, budget) == side.pins["asked"]
        if asked and chosen["policy"] in (None, policy) and chosen["schedule"] in (None, schedule):
            return
    raise KvtoolError("usage", f"{name} ({side.label}) holds no cell with this {component}")


def matched(a: Side, b: Side) -> tuple[Side, Side, list[str]]:
    """Both sides with what only one of them selects settled for the other, and sentences about what that leaves out.

    Where the other holds one value (one policy besides the controls) it is that one; else the value selected is
    looked up there.

    Raises:
        KvtoolError: code `usage` where the other holds several and not that one, where two selectors come down to the
            same cells of one result, or where the schemas differ.
    """
    if a.result.schema != b.result.schema:
        raise KvtoolError(
            "usage",
            f"A is a {a.result.schema} and B a {b.result.schema}: they measure different things",
            "compare two results of one command",
        )
    (left, about_a), (right, about_b) = _followed(a, b, "A"), _followed(b, a, "B")
    one_result = a.result is b.result
    if a.path is not None and b.path is not None:
        one_result = one_result or Path(a.path).resolve() == Path(b.path).resolve()
    if one_result and a.selector != b.selector and left.pins == right.pins:
        raise KvtoolError(
            "usage",
            f"{a.label} and {b.label} come down to the same cells: {left.spelled}",
            "select on both sides what should be compared",
        )
    return left, right, [*about_a, *about_b]


def _followed(side: Side, other: Side, name: str) -> tuple[Side, list[str]]:
    """`side` with what the other selects, and what that leaves out of it."""
    said = []
    for component, value in other.pins.items():
        if component in side.pins:
            continue
        known = side.has(component)
        if component == "policy":
            known = [label for label in known if split_spec(label).name not in CONTROLS] or known
        if len(known) == 1:
            side = side.pinned(component, known[0])
        elif value in side.has(component):
            side = side.pinned(component, value)
            said.append(
                f"of {name} only {_worded(component, value)} is compared, since that is what the other side selects"
            )
        else:
            there = "  ".join(_worded(component, one) for one in known)
            raise KvtoolError(
                "usage",
                f"only one side selects {_worded(component, value)}, and {name} has none to go with it",
                f"has: {there}",
            )
    return side, said


def _worded(component: str, value: Any) -> str:
    if component != "asked":
        return f"{component} {value}"
    ratio, budget = value
    return f"ratio {ratio:g}" if ratio is not None else f"budget {budget}"
