"""The answer of `kvtool diff`, part by part, in the order in which a reader asks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.report import diff_heads, diff_settings, diff_verdict
from kvtool.report.diff_words import (
    count,
    directed,
    direction_words,
    group_name,
    interval,
    number,
    ordering,
    spelled,
    times,
    verdict,
    worse_metrics,
    worsening,
)
from kvtool.report.page import Grid, Heading, Line, Part

Document = Mapping[str, Any]

MOST_DETAILED = 3  # groups that are told whole
FEW = 3  # groups that need no table of groups
MOST_METRICS = 6  # beside those that order policies
_FIRST = ("predicted_kl", "predicted_kl_w32", "mean_layer_error", "mean_output_error")
_SAME_AS = {"layer_error": "mean_layer_error", "output_error": "mean_output_error"}  # once means are taken
_QUIET = ("same", "within", "undefined")
_LOUDEST = ("worse", "better", "moved")
_GIVES_WAY = ("Student's t", "B : A", "B - A", "A")


def diff_page(document: Document) -> list[Part]:
    """What `document` (`kvtool.diff/1`) says, as parts of a page; one line where nothing differs."""
    if diff_verdict.nothing_differs(document):
        return [Line(diff_verdict.no_difference(document), "bold")]
    groups = sorted(document["groups"], key=worsening)
    parts: list[Part] = [*diff_verdict.compared(document), *diff_settings.settings(document)]
    parts += [Line(sentence, "bold") for sentence in diff_verdict.headline(document, groups)]
    parts += [Line(sentence) for sentence in diff_verdict.uncompared(document)]
    if len(groups) > FEW:
        parts += _all_groups(groups)
    detailed = groups if len(groups) <= FEW else groups[:MOST_DETAILED]
    for group in detailed:
        parts += [Heading(_heading(group), folded=True), *_metrics(group)]
        parts += [*diff_heads.layers(group), *diff_heads.heads(group), *diff_heads.kept(group)]
        parts += diff_heads.tokens(group, document)
    one_sided = [Line(sentence) for sentence in _one_sided(document)]
    parts += [Heading("Not compared"), *one_sided] if one_sided else []
    further: list[Part] = []
    if len(groups) > len(detailed):
        further.append(
            Line(f"Told whole above: the {len(detailed)} that matter most of {len(groups)}; --json has all.")
        )
    same = document.get("identical_groups", 0)
    if same:
        further.append(Line(f"{count(same, 'further comparison')} without any difference."))
    if not groups:
        return [*parts, *further]  # nothing to trust or to doubt
    further += [Line(sentence, "italic") for sentence in diff_verdict.trust(document)]
    return [*parts, Heading("How far to trust this"), *further]


def _heading(group: Document) -> str:
    return f"{group_name(group)}: {group['kind']}"


def _numbers(entry: Document) -> dict[str, str]:
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


_COMPACT = {
    "verdict": "A verdict with ? is unsure: 0 lies inside an interval.",
    "worse in": "Worse in: how many of the metrics that decide.",
}
_NUMBERS = ("A", "B", "B - A", "B : A", "95 % interval", "Student's t", "verdict")


def _all_groups(groups: Sequence[Document]) -> list[Part]:
    """One line per group, a table per metric that groups are judged by."""
    by_metric: dict[str, list[Document]] = defaultdict(list)
    for group in groups:
        entry = ordering(group)
        by_metric["" if entry is None else str(entry["metric"])].append(group)
    found: list[Part] = []
    for metric, members in by_metric.items():
        rows, bold = [], set()
        for index, group in enumerate(members):
            entry = ordering(group)
            row = {"compared": group_name(group), "kind": group["kind"]}
            row |= dict.fromkeys(_NUMBERS, "-") if entry is None else _numbers(entry)
            row["verdict"] = row["verdict"].replace(", unsure", "?")
            worse = len(worse_metrics(group))
            if worse:
                bold.add(index)
            rows.append(row | {"worse in": f"{worse} of {sum(e['decides'] for e in group['metrics'])}"})
        first = ordering(members[0])
        title = "nothing was compared" if first is None else f"{metric}, {direction_words(first['direction'])}"
        columns = _with_intervals(rows)
        found.append(
            Grid(
                ("compared", "kind", *columns, "worse in"),
                rows,
                ("compared",),
                gives_way=("kind", "worse in", *_GIVES_WAY),
                code=("compared",),
                words=("kind", "verdict"),
                bold=frozenset(bold),
                title=title,
                explains=_COMPACT,
            )
        )
    return found


def _with_intervals(rows: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """The columns of numbers, without intervals where one sequence gives none."""
    empty = {name for name in ("95 % interval", "Student's t") if all(row[name] == "-" for row in rows)}
    return tuple(name for name in _NUMBERS if name not in empty)


def _loudness(entry: Document) -> tuple[bool, int]:
    """Sorts metrics: what decides first, what is worse first."""
    return not entry["decides"], _LOUDEST.index(entry["verdict"])


def _metrics(group: Document) -> list[Part]:
    """The metrics of one group: those that order policies always, others where they left the tolerance."""
    named = {entry["metric"]: entry for entry in group["metrics"]}
    shown: list[Document] = [named[name] for name in _FIRST if name in named]
    told = {*_FIRST, *(name for name in _SAME_AS if _SAME_AS[name] in named)}
    others = [entry for entry in group["metrics"] if entry["metric"] not in told]
    quiet = [entry for entry in others if entry["verdict"] in _QUIET]
    further = sorted((e for e in others if e["verdict"] not in _QUIET), key=_loudness)
    shown += further[:MOST_METRICS]
    quiet += further[MOST_METRICS:]
    rows = [{"metric": directed(entry)} | _numbers(entry) for entry in shown]
    if not rows:
        return [Line("Every metric is the same or within the tolerance.")]
    worse = frozenset(i for i, entry in enumerate(shown) if entry["verdict"] == "worse" and entry["decides"])
    caption = "↓ lower is better, ↑ higher is better."
    if any(entry["level"] != "cell" for entry in shown):
        caption += " Metrics of heads and layers are means over them."
    details = [entry["metric"] for entry in shown if not entry["decides"]]
    if details:
        caption += f" {details[0]}{' and what follows explain' if len(details) > 1 else ' explains'}, and decide"
        caption += f"{'' if len(details) > 1 else 's'} nothing."
    if quiet:
        caption += f" Not shown: {_counted(quiet)}."
    return [
        Grid(
            ("metric", *_with_intervals(rows)),
            rows,
            ("metric",),
            gives_way=_GIVES_WAY,
            code=("metric",),
            words=("verdict",),
            bold=worse,
            caption=caption,
        )
    ]


def _counted(entries: Sequence[Document]) -> str:
    """`3 within the tolerance, 12 the same`."""
    words = {"same": "the same", "within": "within the tolerance"}
    tally: dict[str, int] = defaultdict(int)
    for entry in entries:
        tally[entry["verdict"]] += 1
    return ", ".join(f"{tally[word]} {words.get(word, word)}" for word in sorted(tally))


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
