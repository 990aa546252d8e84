"""What the metrics of one compared group say, as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.report.diff_words import directed, interval, number, times, verdict
from kvtool.report.page import Grid, Line, Part

Document = Mapping[str, Any]

NUMBERS = ("A", "B", "B - A", "B : A", "95 % interval", "Student's t", "verdict")
GIVES_WAY = ("Student's t", "B : A", "B - A", "A")
MOST_METRICS = 6  # beside those that order policies
MOST_NAMED = 3  # of those that are not shown
_FIRST = ("predicted_kl", "predicted_kl_w32", "mean_layer_error", "mean_output_error")
_SAME_AS = {"layer_error": "mean_layer_error", "output_error": "mean_output_error"}  # once means are taken
_QUIET = ("same", "within", "undefined")
_LOUDEST = ("worse", "better", "moved")
_STUDENT = "unsure (t): 0 lies inside Student's t interval alone."


def numbers(entry: Document) -> dict[str, str]:
    """One metric of one group, by column."""
    said = verdict(entry)
    if entry.get("undefined"):
        said += f" ({entry['undefined']} undefined)" if entry["verdict"] != "undefined" else ""
    return {
        "A": number(entry["a"]),
        "B": number(entry["b"]),
        "B - A": number(entry["difference"], True),
        "B : A": times(entry["ratio"]),
        "95 % interval": interval(entry),
        "Student's t": interval(entry, "t_"),
        "verdict": said,
    }


def with_intervals(rows: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """The columns of numbers, without intervals where one sequence gives none."""
    empty = {name for name in ("95 % interval", "Student's t") if all(row[name] == "-" for row in rows)}
    return tuple(name for name in NUMBERS if name not in empty)


def metrics(group: Document) -> list[Part]:
    """The metrics of one group: those that order policies always, others where they left the tolerance; where all
    these are the same, what moved inside it."""
    named = {entry["metric"]: entry for entry in group["metrics"]}
    shown: list[Document] = [named[name] for name in _FIRST if name in named]
    others = _once([entry for entry in group["metrics"] if entry["metric"] not in _FIRST and not _said(entry, named)])
    loud = sorted((entry for entry in others if entry["verdict"] not in _QUIET), key=_loudness)
    shown += loud[:MOST_METRICS]
    if all(entry["verdict"] in ("same", "undefined") for entry in shown):
        shown += sorted((e for e in others if e["verdict"] == "within"), key=_relative)[:MOST_NAMED]
    if not shown:
        shown = [entry for entry in others if entry["verdict"] == "undefined"]
    if not shown:
        return [Line("Every metric is the same.")]
    rows = [{"metric": directed(entry)} | numbers(entry) for entry in shown]
    left = [entry for entry in others if not any(entry is one for one in shown)]
    return [
        Grid(
            ("metric", *with_intervals(rows)),
            rows,
            ("metric",),
            gives_way=GIVES_WAY,
            code=("metric",),
            words=("verdict",),
            bold=frozenset(i for i, entry in enumerate(shown) if entry["verdict"] == "worse" and entry["decides"]),
            caption=_caption(shown, left),
        )
    ]


def _said(entry: Document, named: Mapping[str, Document]) -> bool:
    """Whether another metric says the same: a mean over layers or heads is what the cell holds already."""
    twin = named.get(_SAME_AS.get(str(entry["metric"]), ""))
    return twin is not None and twin["verdict"] == entry["verdict"]


def _once(entries: Sequence[Document]) -> list[Document]:
    """Without what a mean over finer entries says again: the same name and verdict."""
    found: dict[tuple[str, str], Document] = {}
    for entry in entries:
        found.setdefault((str(entry["metric"]), str(entry["verdict"])), entry)
    return list(found.values())


def _loudness(entry: Document) -> tuple[bool, int]:
    """Sorts metrics: what decides first, what is worse first."""
    return not entry["decides"], _LOUDEST.index(entry["verdict"])


def _relative(entry: Document) -> float:
    """Sorts metrics by relative change, the largest first."""
    return -abs(_change(entry))


def _change(entry: Document) -> float:
    return float((entry["difference"] or 0.0) / (abs(entry["a"] or 0.0) or 1.0))


def _named(entry: Document) -> str:
    """A metric and its relative change; the change itself where it was 0."""
    size = f"{100 * _change(entry):+.2g} %" if entry["a"] else f"{entry['difference'] or 0.0:+.2g}"
    return f"{entry['metric']} ({size})"


def _caption(shown: Sequence[Document], left: Sequence[Document]) -> str:
    said = ["↓ lower is better, ↑ higher is better."]
    if any(entry["level"] != "cell" for entry in shown):
        said.append("Metrics of heads and layers are means over them.")
    details = [entry["metric"] for entry in shown if not entry["decides"]]
    if len(details) == 1:
        said.append(f"{details[0]} explains, and decides nothing.")
    elif details:
        said.append(f"{details[0]} and what follows explain, and decide nothing.")
    if any("(t)" in verdict(entry) for entry in shown):
        said.append(_STUDENT)
    if left:
        said.append(f"Not shown: {_listed(left)}.")
    return " ".join(said)


def _listed(entries: Sequence[Document]) -> str:
    """`11 the same; 2 within the tolerance: turnover (+1.2e-06 %), …`: what moved is named, the most first."""
    words = {"same": "the same", "within": "within the tolerance"}
    by_verdict: dict[str, list[Document]] = defaultdict(list)
    for entry in entries:
        by_verdict[entry["verdict"]].append(entry)
    said = []
    for word in (*_LOUDEST, "within", "undefined", "same"):
        mine = by_verdict.get(word, [])
        if not mine:
            continue
        text = f"{len(mine)} {words.get(word, word)}"
        if word == "undefined":
            text += f": {', '.join(entry['metric'] for entry in mine)}"
        elif word != "same":
            mine.sort(key=_relative)
            text += f": {', '.join(map(_named, mine[:MOST_NAMED]))}"
            text += f" and {len(mine) - MOST_NAMED} more" if len(mine) > MOST_NAMED else ""
        said.append(text)
    return "; ".join(said)
