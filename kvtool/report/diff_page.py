"""The answer of `kvtool diff`, part by part, in the order in which a reader asks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.report import diff_heads, diff_verdict
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
    worsening,
)
from kvtool.report.page import Grid, Heading, Line, Part
from kvtool.words import printable

Document = Mapping[str, Any]

MOST_DETAILED = 3  # groups that are told whole
FEW = 3  # groups that need no table of groups
MOST_METRICS = 6  # beside those that order policies
MOST_SETTINGS = 20
MOST_OF_ONE_NAME = 5  # settings that decide nothing
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
    parts: list[Part] = [*diff_verdict.compared(document), *_settings(document)]
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


def _settings(document: Document) -> list[Part]:
    """Settings that differ: those that decide results as a table, the others in one line."""
    deciding = _whole_policies([entry for entry in document["settings"] if entry["decides"]])
    other = [entry for entry in document["settings"] if not entry["decides"]]
    found: list[Part] = []
    if deciding:
        rows = [
            {"setting": entry["name"], "A": _setting(entry["a"]), "B": _setting(entry["b"])}
            for entry in deciding[:MOST_SETTINGS]
        ]
        more = len(deciding) - len(rows)
        caption = f"and {more} more, which --json lists" if more else None
        names = ("setting", "A", "B")
        found.append(Grid(names, rows, names, code=names, title="settings that differ", caption=caption))
    else:
        found.append(Line("Settings that decide results: all the same."))
    if other:
        found.append(Line(f"Differ too, but decide nothing: {', '.join(_environments(other))}."))
    return found


def _whole_policies(settings: list[Document]) -> list[Document]:
    """A policy that one side lacks takes one line, not one per parameter."""
    absent = {
        entry["name"].removesuffix(".class")
        for entry in settings
        if entry["name"].endswith("].class") and "absent" in (entry["a"], entry["b"])
    }
    found: list[Document] = []
    for entry in settings:
        policy = next((name for name in absent if entry["name"].startswith(f"{name}.")), None)
        if policy is None:
            found.append(entry)
        elif entry["name"] == f"{policy}.class":
            found.append({**entry, "name": policy})
    return found


def _setting(value: Any) -> str:
    """A setting as it would be typed; long digests keep their first letters."""
    if value is None:
        return "-"
    if isinstance(value, str):
        digest = len(value) == 64 and all(letter in "0123456789abcdef" for letter in value)
        return f"{value[:12]}…" if digest else printable(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(_setting(entry) for entry in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}={_setting(entry)}" for key, entry in value.items() if entry is not None) or "none"
    return repr(value)


def _environments(settings: Sequence[Document]) -> list[str]:
    """Settings that decide nothing; where many stand under one name, only that and their number."""
    by_root: dict[str, list[Document]] = defaultdict(list)
    for entry in settings:
        by_root[entry["name"].partition(".")[0]].append(entry)
    said: list[str] = []
    for root, mine in by_root.items():
        many = len(mine) > MOST_OF_ONE_NAME
        said += [f"{root} ({len(mine)} settings)"] if many else [_environment(entry) for entry in mine]
    return said


def _environment(entry: Document) -> str:
    """A setting that decides nothing: with its values where they are short."""
    values = f" {_setting(entry['a'])} → {_setting(entry['b'])}"
    return f"{entry['name']}{values if len(values) <= 28 else ''}"


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
    "all worse": "All worse: so many of all compared metrics are worse.",
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
            worse = sum(e["verdict"] == "worse" for e in group["metrics"])
            if worse:
                bold.add(index)
            rows.append(row | {"all worse": f"{worse} of {len(group['metrics'])}"})
        first = ordering(members[0])
        title = "nothing was compared" if first is None else f"{metric}, {direction_words(first['direction'])}"
        columns = _with_intervals(rows)
        found.append(
            Grid(
                ("compared", "kind", *columns, "all worse"),
                rows,
                ("compared",),
                gives_way=("kind", "all worse", *_GIVES_WAY),
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


def _metrics(group: Document) -> list[Part]:
    """The metrics of one group: those that order policies always, others where they left the tolerance."""
    named = {entry["metric"]: entry for entry in group["metrics"]}
    shown: list[Document] = [named[name] for name in _FIRST if name in named]
    told = {*_FIRST, *(name for name in _SAME_AS if _SAME_AS[name] in named)}
    others = [entry for entry in group["metrics"] if entry["metric"] not in told]
    quiet = [entry for entry in others if entry["verdict"] in _QUIET]
    further = sorted((e for e in others if e["verdict"] not in _QUIET), key=lambda e: _LOUDEST.index(e["verdict"]))
    shown += further[:MOST_METRICS]
    quiet += further[MOST_METRICS:]
    rows = [{"metric": directed(entry)} | _numbers(entry) for entry in shown]
    if not rows:
        return [Line("Every metric is the same or within the tolerance.")]
    worse = frozenset(index for index, entry in enumerate(shown) if entry["verdict"] == "worse")
    caption = "↓ lower is better, ↑ higher is better."
    if any(entry["level"] != "cell" for entry in shown):
        caption += " Metrics of heads and layers are means over them."
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
