"""TracesDiff: what comparing two traces found, as a document and in sentences."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from kvtool.words import printable, spans

SCHEMA = "kvtool.diff-traces/1"
MOST_LINES = 4  # sentences of one kind
NOUNS = {
    "keys": "the key is",
    "values": "the value is",
    "queries": "the query is",
    "output_sample": "attention's output is",
    "output_projection": "the output projection is",
}
Entry = dict[str, Any]


@dataclass(frozen=True)
class TracesDiff:
    """Two traces held together.

    Attributes:
        a, b: path, digest, run dtype and stored dtype of each.
        identical: the digests are equal, so nothing was read.
        bound: relative error that rounding alone may cause in one run of attention; what a row of a layer may deviate
            by is `bound_of_layer`.
        fixed: `bound` was given and holds for every layer alike.
        settings: what the manifests say differently: `name`, `a`, `b`. No verdict hangs on it.
        geometry: what attention of a layer is, where it differs: `sequence`, `layer`, `name`, `a`, `b`.
        tokens: per sequence the first row whose `what` (token, position, prompt_length) differs, and both sides of it.
        layers: one entry per sequence, layer and array.
        projections: one entry per layer with an output projection in both.
        first: the first row beyond its bound, by sequence, layer, token, KV head; None where there is none.
        only_a, only_b: what one of them lacks: `sequence`, `layer`, `array`, `rows`, null for all.
    """

    a: Entry
    b: Entry
    identical: bool
    bound: float
    fixed: bool
    settings: list[Entry] = field(default_factory=list)
    geometry: list[Entry] = field(default_factory=list)
    tokens: list[Entry] = field(default_factory=list)
    layers: list[Entry] = field(default_factory=list)
    projections: list[Entry] = field(default_factory=list)
    first: Entry | None = None
    only_a: list[Entry] = field(default_factory=list)
    only_b: list[Entry] = field(default_factory=list)

    def bound_of_layer(self, layer: int) -> float:
        """How far a row of `layer` may deviate, relative: see `layer_bound`."""
        return self.bound if self.fixed else layer_bound(self.bound, layer)

    @property
    def parted(self) -> bool:
        """Whether they are not one run: beyond a bound, or not comparable in full."""
        return bool(
            self.first
            or self.geometry
            or self.tokens
            or self.only_a
            or self.only_b
            or any(entry["heads_off"] for entry in self.projections)
        )

    def findings(self) -> list[str]:
        """The answer in sentences, what decides first."""
        if self.identical:
            return ["the two traces are the same to the byte"]
        found = [*map(_token_sentence, self.tokens), *_geometry(self.geometry), *_first(self)]
        found += _projections(self.projections)
        found += [f"only A holds {hole}" for hole in _holes(self.only_a)]
        found += [f"only B holds {hole}" for hole in _holes(self.only_b)]
        return found + _agreement(self)

    def document(self) -> Entry:
        """The JSON document `kvtool.diff-traces/1`."""
        return {
            "schema": SCHEMA,
            "a": self.a,
            "b": self.b,
            "identical": self.identical,
            "parted": self.parted,
            "bound": {"relative": self.bound, "of_layer": "relative" if self.fixed else "2 relative sqrt(1 + layer)"},
            "first": self.first,
            "settings": self.settings,
            "geometry": self.geometry,
            "tokens": self.tokens,
            "layers": self.layers,
            "projections": self.projections,
            "only_a": self.only_a,
            "only_b": self.only_b,
            "findings": self.findings(),
            "warnings": [],
        }


def layer_bound(bound: float, layer: int) -> float:
    """How far a row of two sound runs may be apart in layer number `layer`: 2 · bound · sqrt(1 + layer).

    Each run may be off by `bound`, which speaks of one attention; what earlier layers rounded away comes in with their
    outputs and adds up like a random walk.
    """
    return 2.0 * bound * math.sqrt(1.0 + layer)


def _token_sentence(entry: Entry) -> str:
    where = f"sequence {entry['sequence']}"
    if entry["what"] == "prompt_length":
        return f"{where}: the prompt has {entry['a']} tokens in A and {entry['b']} in B"
    sides = [f"{entry[side]}{_quoted(entry[f'text_{side}'])}" for side in ("a", "b")]
    return (
        f"{where}: the {entry['what']}s differ first at row {entry['row']}, {sides[0]} in A and {sides[1]} in B "
        f"({entry['differing']} rows differ); arrays are compared before it only"
    )


def _quoted(text: str | None) -> str:
    return "" if text is None else f" '{printable(text)}'"


def _few(sentences: list[str]) -> list[str]:
    """The first of them, and how many more there are."""
    more = len(sentences) - MOST_LINES
    return sentences if more <= 0 else [*sentences[:MOST_LINES], f"and {more} more like these"]


def _geometry(entries: list[Entry]) -> list[str]:
    """One sentence per layer and name; sequences mostly repeat each other."""
    found = {(entry["layer"], entry["name"]): entry for entry in reversed(entries)}
    return _few(
        [f"layer {layer}: {name} is {e['a']} in A and {e['b']} in B" for (layer, name), e in sorted(found.items())]
    )


def _off(value: float | None, bound: float) -> str:
    return "not a number in one of them" if value is None else f"off by {value:.3g}, relative (bound {bound:.3g})"


def _first(diff: TracesDiff) -> list[str]:
    first = diff.first
    if first is None:
        return []
    head = f"KV head {first['kv_head']}" + ("" if first["q_head"] is None else f", query head {first['q_head']}")
    off: dict[int, int] = defaultdict(int)
    for line in diff.layers:
        off[line["layer"]] += line["heads_off"]
    parting = sorted(layer for layer, heads in off.items() if heads)
    return [
        f"they part first in sequence {first['sequence']}, layer {first['layer']}, at row {first['token']}"
        f"{_quoted(first['text'])} (position {first['position']}), {head}: {NOUNS[first['array']]} "
        f"{_off(first['deviation'], first['bound'])}",
        f"{len(parting)} of {len(off)} layer{'s' * (len(off) != 1)} part{'s' * (len(parting) == 1)}: {spans(parting)}",
    ]


def _projections(entries: list[Entry]) -> list[str]:
    off = [entry for entry in entries if entry["heads_off"]]
    return _few(
        [
            f"layer {entry['layer']}: {NOUNS['output_projection']} {_off(entry['largest'], entry['bound'])}, "
            f"most in query head {entry['q_head']}"
            for entry in off
        ]
    )


def _holes(entries: list[Entry]) -> list[str]:
    """Whole sequences, then layers, then arrays, like ones together."""
    found: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for hole in entries:
        if hole["layer"] is None:
            found[("sequence",)].append(hole["sequence"])
        elif hole["array"] is None:
            found["layer", hole["sequence"]].append(hole["layer"])
        else:
            found["array", hole["sequence"], hole["array"], hole["rows"]].append(hole["layer"])
    words = []
    for key, ids in found.items():
        many = "s" * (len(ids) != 1)
        what = f"{key[0]}{many} {spans(ids)}"
        if key[0] == "array":
            rows = "" if key[3] is None else f" of {key[3]} steps"
            what = f"{key[2]}{rows} of layer{many} {spans(ids)}"
        words.append(what if key[0] == "sequence" else f"{what} of sequence {key[1]}")
    return words


def _agreement(diff: TracesDiff) -> list[str]:
    """What may be said where no row parts: how near the largest deviation comes to its bound."""
    compared = [line for line in diff.layers if line["rows"]]
    if diff.first is not None or not compared:
        return [] if diff.first is not None else ["no row was compared"]
    if not any(line["unequal"] for line in compared):
        return ["every row that both hold is equal to the bit"]
    top = max(compared, key=lambda line: line["largest"] / line["bound"] if line["bound"] else math.inf)
    within = "the bound" if diff.fixed else "what rounding may cause"
    return [
        f"every row that both hold agrees within {within}: nearest to it in layer {top['layer']}, "
        f"where {NOUNS[top['array']]} {_off(top['largest'], top['bound'])}"
    ]
