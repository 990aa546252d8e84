"""Sentences of a comparison: what was compared, what came out, and how far to trust it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.report.diff_names import by_event, group_name
from kvtool.report.diff_order import gain, ordering, telling, worse_metrics
from kvtool.report.diff_words import count, interval, layers_that, number, plural, sequences_of, spelled, times
from kvtool.report.page import Line
from kvtool.words import printable

Document = Mapping[str, Any]

_KINDS = {
    "behaviour": "Behaviour: B keeps other tokens than A",
    "numerics": "Numerics only: B keeps the same tokens as A, and only numbers moved",
    "identical": "Identical: same tokens, same numbers",
    "unknown": "Unknown kind: there are no kept sets on both sides, so only numbers were compared",
}
OF_THE_RUN = "which are kept and lost is told of the whole run only, not event by event"


def nothing_differs(document: Document) -> bool:
    """Whether there is nothing to tell but that."""
    return not any(document[key] for key in ("groups", "settings", "only_a", "only_b")) and not document["worse"]


def no_difference(document: Document) -> str:
    same = document.get("identical_groups")
    over = f"{count(same, 'comparison')} over " if same else ""
    holds = "holds" if (same or document["sequences"]) == 1 else "hold"
    return f"no difference: {over}{count(document['sequences'], 'sequence')} {holds} the same numbers and tokens"


def compared(document: Document) -> list[Line]:
    """What A and B are, and what they have in common."""
    a, b = document["a"], document["b"]
    said = [Line(f"{name}: {_side(side)}") for name, side in (("A", a), ("B", b))]
    pairs = count(document["sequences"], "sequence")
    if a["trace_digest"] == b["trace_digest"]:
        said.append(Line(f"trace {_short(a['trace_digest'])}, {pairs} compared"))
    else:
        traces = f"A {_short(a['trace_digest'])}, B {_short(b['trace_digest'])}"
        are = "is" if document["sequences"] == 1 else "are"
        said.append(Line(f"The traces differ ({traces}); {pairs} of equal prompt and length {are} compared", "bold"))
    return said


def _side(side: Document) -> str:
    chosen = side.get("selector")
    return printable(f"{side['path'] or 'a result'}{f' ({chosen})' if chosen else ''}")


def _short(digest: str | None) -> str:
    return "unknown" if digest is None else f"{digest[:12]}…"


def headline(document: Document, groups: Sequence[Document]) -> list[str]:
    """The kind of change, then the verdict; `groups` are those that decide, the most worsened first."""
    return [_kind(document, groups), _verdict(document, groups)]


def _kind(document: Document, groups: Sequence[Document]) -> str:
    kind = document["kind"]
    text = _KINDS[kind]
    if kind == "identical" and any(document.get(name) for name in ("only_a", "only_b", "refused")):
        return "Identical in what both sides hold: same tokens, same numbers."
    if kind == "behaviour":
        kept = document.get("kept_sets")
        if kept:
            text += f" in {kept['moved']} of {count(kept['of'], 'kept set')}"
        layers = sorted({layer for group in groups for layer in layers_that(group, "behaviour")})
        if layers:
            text += f", {plural('layer', len(layers))} {spelled(layers)}"
        named = [group["first"] for group in groups if group.get("first") and group["kind"] == kind]
        first = min(named, key=_place, default=None)
        text += f"; first: {first}" if first else ""
    ties = document.get("ties")
    if ties and kind == "numerics":
        sets = count(ties, "kept set")
        return f"Numerics only: B keeps other tokens than A where rounding decides ({sets}), nowhere else."
    if ties:
        text += f"; {ties} of these only where rounding decides"
    return f"{text}."


def _place(first: str) -> list[int]:
    """Sequence, layer and head of `sequence 0, layer 7, KV head 2 loses token …`."""
    return [int(number_) for number_ in re.findall(r"\d+", first)[:3]]


def _verdict(document: Document, groups: Sequence[Document]) -> str:
    worse = [group for group in groups if worse_metrics(group)]
    details = dict.fromkeys(entry["metric"] for group in groups for entry in worse_metrics(group, decides=False))
    but = f" Details that are worse, and decide nothing: {', '.join(details)}." if details and not worse else ""
    if document["worse"] and not worse:
        if refused := document.get("refused"):
            more = f"; and {len(refused) - 1} more" if len(refused) > 1 else ""
            return f"Not passed: {refused[0]}{more}."
        lacking = next((group for group in groups if group.get("lost")), None)
        if lacking is not None:
            name = group_name(lacking, by_event(groups))
            return f"Not passed: B has no {', '.join(lacking['lost'])} where A has, in {name}."
        return f"Not passed: {count(sum(e['rows'] for e in document['only_a']), 'row')} of A missing in B."
    if worse:
        return _worse(document, worse, groups)
    if better := _with(groups, "better"):
        best = max(better, key=gain)
        return f"B is better{_chance(telling(best))}: {_told(document, best, telling(best), groups)}.{but}"
    if _with(groups, "moved"):
        return (
            f"B is neither better nor worse: only metrics without a better direction moved beyond the tolerance.{but}"
        )
    if but:
        return f"B is neither better nor worse: what decides stays within the tolerance ({_tolerance(document)}).{but}"
    if groups:
        return f"B is neither better nor worse: every metric stays within the tolerance ({_tolerance(document)})."
    return "No number and no kept token differs."


def _with(groups: Sequence[Document], verdict: str) -> list[Document]:
    """The groups in which some metric has that verdict, and says so to decide; `moved` is of those that never do."""
    return [
        group
        for group in groups
        if any(e["verdict"] == verdict and (e["decides"] or verdict == "moved") for e in group["metrics"])
    ]


def _worse(document: Document, worse: Sequence[Document], groups: Sequence[Document]) -> str:
    """How B is worse; where the metric that orders policies says otherwise, that comes first."""
    group = worse[0]
    first, told = ordering(group), telling(group)
    more = f" {len(worse)} of {len(groups)} comparisons {'is' if len(worse) == 1 else 'are'} worse."
    more = more if len(groups) > 1 else ""
    said = _told(document, group, told, groups)
    if first is None or first is told:
        return f"B is worse{_chance(told)}: {said}.{more}"
    size = f"{first['metric']} {number(first['a'])} → {number(first['b'])}, {times(first['ratio'])}"
    word = {"better": "is better", "within": "is within the tolerance", "same": "is the same"}.get(first["verdict"])
    return f"B is worse{_chance(told)}: {said}; but {size}, {word or first['verdict']}.{more}"


def _chance(entry: Document | None) -> str:
    return ", though that may be chance" if entry is not None and entry["sure"] is False else ""


def _told(document: Document, group: Document, entry: Document | None, groups: Sequence[Document]) -> str:
    """`mean_layer_error 0.081 → 0.102, 1.26x, 95 % interval of the difference +0.012 … +0.031 over 4 sequences`, and
    which group that is where there are several."""
    name = group_name(group, by_event(groups))
    if entry is None:
        return name
    text = f"{entry['metric']} {number(entry['a'])} → {number(entry['b'])}"
    text += f", {times(entry['ratio'])}" if entry["ratio"] is not None else ""
    if entry["low"] is not None:
        student = interval(entry, "t_")
        text += f", 95 % interval of the difference {interval(entry)}"
        text += f" (Student's t {student})" if student != "-" else ""
    text += f" over {count(sequences_of(group, document), 'sequence')}"
    text += ", so without an interval" if document["sequences"] == 1 else ""
    return f"{text} ({name})" if len(groups) > 1 else text


def _tolerance(document: Document) -> str:
    tolerance = document["tolerance"]
    text = f"relative {tolerance['relative']:g}, absolute {tolerance['absolute']:g}"
    named = tolerance.get("by_metric") or {}
    own = "; ".join(
        f"{metric}: {', '.join(f'{word} {value:g}' for word, value in values.items() if value is not None)}"
        for metric, values in named.items()
    )
    return f"{text}; {own}" if own else text


def uncompared(document: Document) -> list[str]:
    """What could not be told of tokens, and why."""
    untold: dict[bool, list[str]] = {True: [], False: []}  # of whole runs, of events
    for group in document["groups"]:
        why = (group.get("tokens") or {}).get("not_told")
        if why:
            untold[group.get("event") is None].append(why)
    said = dict.fromkeys(untold[True])
    if any(why not in said for why in untold[False]):
        said[OF_THE_RUN] = None
    return [f"Tokens: {sentence}." for sentence in said]


def trust(document: Document, groups: Sequence[Document]) -> list[str]:
    """What the tolerance and the interval are."""
    said = [f"Tolerance: |B - A| <= absolute + relative·|A|, {_tolerance(document)}."]
    found = document.get("interval")
    one = all(sequences_of(group, document) == 1 for group in groups)
    if found is None or one:
        said.append(
            "No interval: one sequence says nothing about another text; its heads and layers move together."
            if one
            else "No interval: no sequence was paired."
        )
        return said
    text = f"Interval: {100 * found['level']:g} %, {found['method']}, {count(found['resamples'], 'resample')}"
    said.append(f"{text}, seed {found['seed']}. A verdict is unsure where 0 lies inside it or inside Student's t.")
    if found.get("note"):
        said.append(f"{found['note'][:1].upper()}{found['note'][1:].rstrip('.')}.")
    return said
