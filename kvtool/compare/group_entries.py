"""Group entries: everything that is told of a group that differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtool.compare.columns import HEAD_ERROR, LAYER_ERROR
from kvtool.compare.comparison import Comparison
from kvtool.compare.groups import Key, cell_fields, group_ids, has_places
from kvtool.compare.kinds import KINDS
from kvtool.compare.measured import Means, Values, compare, means
from kvtool.compare.pairs import NONE, Ids
from kvtool.compare.sets import Sets
from kvtool.compare.tolerance import Tolerance
from kvtool.compare.wins import Heads, Won, compare_heads, layer_entries, won

Progress = Callable[[int, int, str], None]


def group_entries(
    found: Comparison,
    keys: Sequence[Key],
    kinds: dict[Key, int],
    places: Sequence[str],
    tolerance: Tolerance,
    sets: Sets,
    tokens: int,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """One entry per group, in the order of `keys`.

    Args:
        found: the numbers of these groups.
        kinds: of these groups.
        places: by which they are told apart.
        tokens: most tokens to name per sequence.
    """
    known = {key: index for index, key in enumerate(keys)}
    metrics, lost = _metrics(found, known, places, tolerance)
    layers = _Layers(found, known, places, tolerance)
    heads, wins, error = _heads(found, known, places, tolerance)
    members = sets.members(places)
    entries = []
    for key, index in known.items():
        mine = members.get(_of_heads(key, places), [])
        if progress is not None:
            progress(index, len(keys), f"{key.cells[0].policy} tokens")
        by_layer = layers.of(key)
        counts = {"a": 0, "b": 0, "even": 0} if wins is None else wins.of(index)
        entries.append(
            {
                **cell_fields(key.cells),
                "event": None if key.event == NONE else key.event,
                **dict(zip(places, key.places, strict=True)),
                "kind": KINDS[kinds[key]],
                "rows": layers.rows[index],
                "sequences": layers.sequences[index],
                "lost": lost[index],
                "metrics": metrics[index],
                "layers": by_layer,
                "wins": {
                    "metric": error,
                    **counts,
                    "by_layer": [
                        {"layer": one["layer"], "a": one["wins_a"], "b": one["wins_b"], "even": one["even"]}
                        for one in by_layer
                    ],
                },
                "worst_heads": [] if heads is None else heads.entries.get(index, []),
                "significant_heads": None if heads is None else heads.significant.get(index),
                **sets.told(mine, tokens if key.event == NONE else 0),
                "first": sets.first_lost(mine),
            }
        )
    return entries


def _of_heads(key: Key, places: Sequence[str]) -> Key:
    """Where the decisions of a group stand: those of the whole run, and of its query head's KV head."""
    return Key(key.cells, NONE, tuple(v for v, place in zip(key.places, places, strict=True) if place != "q_head"))


def _metrics(
    found: Comparison, known: dict[Key, int], places: Sequence[str], tolerance: Tolerance
) -> tuple[list[list[dict[str, Any]]], list[list[str]]]:
    """Per group its `metrics`, and the names of those that decide and have a number in A and none in B."""
    metrics: list[list[dict[str, Any]]] = [[] for _ in known]
    lost: list[list[str]] = [[] for _ in known]
    for table, pairs in found.pairs.items():
        if not len(pairs) or not has_places(pairs, places):
            continue
        ids, _ = group_ids(pairs, places, known)
        for values in found.values[table]:
            column = values.compared.column
            mine = means(values, ids, pairs.sequence, len(known), found.sequences)
            said: dict[str, Any] = {"metric": column.name, "level": column.level, "unit": column.unit}
            decides = values.compared.decides and column.direction != "none"
            said |= {"direction": column.direction, "decides": decides}
            for group, entry in enumerate(compare(mine, column.name, column.direction, tolerance)):
                if not mine.paired[group] or (entry["a"] is None and entry["verdict"] == "same"):
                    continue  # null in both: nothing was measured
                metrics[group].append({**said, **entry})
                if mine.lost[group] and decides:
                    lost[group].append(column.name)
    return metrics, lost


def _error(found: Comparison) -> Values | None:
    """The head column that heads are ordered by."""
    return next((v for name in HEAD_ERROR for v in found.values["rows"] if v.compared.column.name == name), None)


def _heads(
    found: Comparison, known: dict[Key, int], places: Sequence[str], tolerance: Tolerance
) -> tuple[Heads | None, Won | None, str | None]:
    values, pairs = _error(found), found.pairs["rows"]
    if values is None or not len(pairs):
        return None, None, None
    counted = won(values, group_ids(pairs, places, known)[0], len(known), tolerance)
    heads = compare_heads(values, pairs, known, places, found.sequences, tolerance)
    return heads, counted, values.compared.column.name


class _Layers:
    """What every layer of every group says: layer error where there is one, else the mean output error."""

    def __init__(self, found: Comparison, known: dict[Key, int], places: Sequence[str], tolerance: Tolerance) -> None:
        finer = tuple(p for p in ("sequence", "layer", "kv_head", "q_head") if p in (*places, "layer"))
        kinds = found.kinds(finer)
        place = finer.index("layer")
        kept = tuple(index for index, name in enumerate(finer) if name in places)
        inside: dict[Key, list[Key]] = {}
        for key in kinds:
            group = Key(key.cells, key.event, tuple(key.places[index] for index in kept))
            if group in known:
                inside.setdefault(group, []).append(key)
        numbered = {key: index for index, key in enumerate(key for group in known for key in inside.get(group, []))}
        self._inside, self._numbered = inside, numbered
        self.rows, self.sequences = _rows(found, known, places)
        by_layer = _means(found, "layers", LAYER_ERROR, numbered, finer)
        values, pairs = _error(found), found.pairs["rows"]
        by_head, wins, name = None, None, None
        if values is not None and len(pairs):
            ids, _ = group_ids(pairs, finer, numbered)
            name = values.compared.column.name
            by_head = means(values, ids, pairs.sequence, len(numbered), found.sequences)
            wins = won(values, ids, len(numbered), tolerance)
        layers = [key.places[place] for key in numbered]
        strengths: Ids = np.array([kinds[key] for key in numbered], dtype=np.int64)
        found_a = layer_entries(layers, strengths, LAYER_ERROR, by_layer, wins, tolerance)
        found_b = layer_entries(layers, strengths, name, by_head, wins, tolerance)
        self._entries = [one if one["a"] is not None else other for one, other in zip(found_a, found_b, strict=True)]

    def of(self, key: Key) -> list[dict[str, Any]]:
        """The entries of one group, by layer."""
        mine = [self._entries[self._numbered[inner]] for inner in self._inside.get(key, [])]
        return sorted(mine, key=lambda entry: int(entry["layer"]))


def _means(found: Comparison, table: str, column: str, known: dict[Key, int], places: Sequence[str]) -> Means | None:
    pairs = found.pairs[table]
    values = next((v for v in found.values[table] if v.compared.column.name == column), None)
    if values is None or not len(pairs) or not has_places(pairs, places):
        return None
    return means(values, group_ids(pairs, places, known)[0], pairs.sequence, len(known), found.sequences)


def _rows(found: Comparison, known: dict[Key, int], places: Sequence[str]) -> tuple[list[int], list[int]]:
    """Of every group the paired entries over all tables, and how many sequences they speak of."""
    counted = np.zeros(len(known), dtype=np.int64)
    speak = [set[int]() for _ in known]
    for pairs in found.pairs.values():
        if len(pairs) and has_places(pairs, places):
            ids, _ = group_ids(pairs, places, known)
            counted += np.bincount(ids[ids >= 0], minlength=len(known))
            for group, sequence in np.unique(np.stack([ids, pairs.sequence], axis=1), axis=0).tolist():
                if group >= 0:
                    speak[group].add(sequence)
    return counted.tolist(), [len(one) for one in speak]
