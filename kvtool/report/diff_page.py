"""The answer of `kvtool diff`, part by part, in the order in which a reader asks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from kvtool.report import diff_heads, diff_settings, diff_tokens, diff_verdict
from kvtool.report.diff_groups import all_groups
from kvtool.report.diff_metrics import metrics
from kvtool.report.diff_names import by_event, group_name
from kvtool.report.diff_order import worsening
from kvtool.report.diff_words import count, spelled
from kvtool.report.page import Heading, Line, Part

Document = Mapping[str, Any]

MOST_DETAILED = 3  # groups that are told whole
FEW = 3  # groups that need no table of groups


def diff_page(document: Document) -> list[Part]:
    """What `document` (`kvtool.diff/1`) says, as parts of a page; one line where nothing differs."""
    if diff_verdict.nothing_differs(document):
        return [Line(diff_verdict.no_difference(document), "bold")]
    groups = sorted(document["groups"], key=worsening)
    whole = sorted(document["whole"], key=worsening) if document.get("whole") else groups
    parts: list[Part] = [*diff_verdict.compared(document), *diff_settings.settings(document)]
    parts += [Line(sentence, "bold") for sentence in diff_verdict.headline(document, whole)]
    parts += [Line(sentence) for sentence in diff_verdict.uncompared(document)]
    if len(groups) > FEW:
        parts += all_groups(groups)
    events = by_event(groups)
    detailed = groups if len(groups) <= FEW else groups[:MOST_DETAILED]
    for group in detailed:
        heading = f"{group_name(group, events)}: {group['kind']}"
        parts += [Heading(heading, folded=True), *metrics(group)]
        parts += [*diff_heads.layers(group), *diff_heads.heads(group), *diff_heads.kept(group)]
        parts += diff_tokens.tokens(group, document)
    one_sided = [Line(sentence) for sentence in _one_sided(document)]
    parts += [Heading("Not compared"), *one_sided] if one_sided else []
    further: list[Part] = []
    if len(groups) > len(detailed):
        further.append(
            Line(f"Told whole above: the {len(detailed)} that matter most of {len(groups)}; --json has all.")
        )
    same = document.get("identical_groups", 0)
    if same:
        what = "further comparison" if groups else "comparison"
        further.append(Line(f"{count(same, what)} without any difference."))
    if not groups:
        return [*parts, *further]  # nothing to trust or to doubt
    further += [Line(sentence, "italic") for sentence in diff_verdict.trust(document, groups)]
    return [*parts, Heading("How far to trust this"), *further]


def _one_sided(document: Document) -> list[str]:
    """Rows that only one side has, cell by cell."""
    said = []
    for side, name in (("only_a", "A"), ("only_b", "B")):
        cells: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        sequences: dict[str, set[int | None]] = defaultdict(set)
        for entry in document[side]:
            key = group_name({k: entry.get(k) for k in ("policy", "ratio", "budget", "schedule", "event")})
            cells[key][entry["table"]] += entry["rows"]
            sequences[key].add(entry["sequence"])
        if cells:
            listed = [f"{key} ({_numbered(sequences[key])}{_tables(rows)})" for key, rows in cells.items()]
            more = f"; and {len(listed) - 8} more, which --json lists" if len(listed) > 8 else ""
            counts = "a comparison with holes is no pass" if side == "only_a" and document["worse"] else ""
            said.append(f"Only in {name}: {'; '.join(listed[:8])}{more}.{f' ({counts})' if counts else ''}")
    return said


def _numbered(sequences: set[int | None]) -> str:
    """`sequences 0-1: `; nothing where the mean over all is meant."""
    known = sorted(index for index in sequences if index is not None)
    return f"sequence{'s' * (len(known) != 1)} {spelled(known)}: " if known else ""


def _tables(rows: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {rows[name]}" for name in rows)
