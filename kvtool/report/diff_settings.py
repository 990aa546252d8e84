"""Settings in which two results differ: a table of those that decide results, one line for the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.report.page import Grid, Line, Part
from kvtool.words import printable

Document = Mapping[str, Any]

MOST_SETTINGS = 20
MOST_OF_ONE_NAME = 5  # settings that decide nothing


def settings(document: Document) -> list[Part]:
    """Settings that differ: those that decide results as a table, the others in one line.

    Args:
        document: its `settings`: `name`, `a`, `b` and `decides`.
    """
    deciding = _whole_policies([entry for entry in document["settings"] if entry["decides"]])
    other = [entry for entry in document["settings"] if not entry["decides"]]
    found: list[Part] = []
    if deciding:  # a table of nothing would say that something differs
        rows = [
            {"setting": entry["name"], "A": _setting(entry["a"]), "B": _setting(entry["b"])}
            for entry in deciding[:MOST_SETTINGS]
        ]
        more = len(deciding) - len(rows)
        caption = f"and {more} more, which --json lists." if more else None
        names = ("setting", "A", "B")
        found.append(Grid(names, rows, names, code=names, title="settings that differ", caption=caption))
    else:
        found.append(Line("Settings that decide results: all the same."))
    if other:
        one = len(other) == 1
        verb, decide = "Differs too" if one else "Differ too", "decides" if one else "decide"
        found.append(Line(f"{verb}, but {decide} nothing: {', '.join(_environments(other))}."))
    return found


def _whole_policies(deciding: list[Document]) -> list[Document]:
    """A policy that one side lacks takes one line, not one per parameter."""
    absent = {
        entry["name"].removesuffix(".class")
        for entry in deciding
        if entry["name"].endswith("].class") and "absent" in (entry["a"], entry["b"])
    }
    found: list[Document] = []
    for entry in deciding:
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


def _environments(idle: Sequence[Document]) -> list[str]:
    """Settings that decide nothing; where many stand under one name, only that and their number."""
    by_root: dict[str, list[Document]] = defaultdict(list)
    for entry in idle:
        by_root[entry["name"].rpartition(".")[0] or entry["name"]].append(entry)
    said: list[str] = []
    for root, mine in by_root.items():
        many = len(mine) > MOST_OF_ONE_NAME
        said += [f"{root} ({len(mine)} settings)"] if many else [_environment(entry) for entry in mine]
    return said


def _environment(entry: Document) -> str:
    """A setting that decides nothing: with its values where they are short."""
    values = f" {_setting(entry['a'])} → {_setting(entry['b'])}"
    return f"{entry['name']}{values if len(values) <= 28 else ''}"
