"""Decomposition summary: which of the three errors dominates for each policy and where, as plain values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from kvtool.report.summary import CONTROLS
from kvtool.result import Result
from kvtool.words import asked, spans

TERMS = ("selection", "taylor", "diagonal")
STEPS = ("selection", "diagonal", "renormalisation", "information", "linearity")
# What each term is called, and what to make of it where it is the largest.
NAMES = {"selection": "selection", "taylor": "the Taylor term", "diagonal": "the diagonal term"}
MEANING = {
    "selection": "tokens left that the queries needed, which only another choice of tokens mends",
    "taylor": "queries scatter too far for one tangent; scores of several centres (statistics=mixture:K) may do better",
    "diagonal": "common shifts of all logits, which centred competition removes",
    "concentrated": "few tokens hold most of the weight and compete for it, which centred competition keeps",
}


@dataclass(frozen=True)
class Errors:
    """One policy at one ratio or budget; medians over sequences, layers and query heads.

    Attributes:
        terms: name of `TERMS` -> relative L2.
        total, signal: `e_total` and `tangent_signal`.
        nats: name of `TERMS` -> nats per step, None without gradients.
        largest: the term with the largest median, None where all three are 0.
        share: of heads in which it is the largest.
        layers: name of `TERMS` -> layers in which its median over heads is the largest of the three.
        worst: (layer, query head, e_total) of the head whose local picture is furthest off.
    """

    policy: str
    terms: dict[str, float]
    total: float
    signal: float
    nats: dict[str, float] | None
    largest: str | None
    share: float
    layers: dict[str, list[int]]
    worst: tuple[int, int, float]


@dataclass(frozen=True)
class ErrorSection:
    """All policies at one ratio or budget, in the order in which they ran."""

    asked: str
    lines: list[Errors]
    rows: dict[str, list[dict[str, Any]]]  # policy -> its entries of the table


def error_sections(result: Result) -> list[ErrorSection]:
    """One section per ratio or budget, in the order asked."""
    grouped: dict[tuple, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in result.entries("decomposition"):
        if row["e_total"] is not None:
            grouped[row["ratio"], row["budget"]][row["policy"]].append(row)
    return [
        ErrorSection(
            asked(ratio, budget),
            [_errors(policy, rows) for policy, rows in sorted(members.items(), key=lambda pair: pair[0] == "full")],
            members,
        )
        for (ratio, budget), members in grouped.items()
    ]


def _errors(policy: str, rows: list[dict[str, Any]]) -> Errors:
    leading = [_largest({term: row[f"e_{term}"] for term in TERMS}) for row in rows]
    terms = {term: median(row[f"e_{term}"] for row in rows) for term in TERMS}
    largest = _largest(terms)
    by_layer: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_layer[row["layer"]].append(row)
    layers: dict[str, list[int]] = {term: [] for term in TERMS}
    for layer, members in sorted(by_layer.items()):
        leader = _largest({term: median(row[f"e_{term}"] for row in members) for term in TERMS})
        if leader is not None:
            layers[leader].append(layer)
    known = [row for row in rows if row["nats_total"] is not None]
    worst = max(rows, key=lambda row: row["e_total"])
    return Errors(
        policy=policy,
        terms=terms,
        total=median(row["e_total"] for row in rows),
        signal=median(row["tangent_signal"] for row in rows),
        nats={term: median(row[f"nats_{term}"] for row in known) for term in TERMS} if known else None,
        largest=largest,
        share=leading.count(largest) / len(leading),
        layers=layers,
        worst=(worst["layer"], worst["q_head"], worst["e_total"]),
    )


def _largest(values: dict[str, float]) -> str | None:
    """The term of the largest value, None where all are 0."""
    found = max(values, key=lambda term: values[term])
    return found if values[found] > 0 else None


def error_verdicts(result: Result) -> list[str]:
    """Per ratio or budget one sentence for every term that is the largest for some policy: whose it is and where,
    and where the other terms lead. Then, once, what to make of the terms that were named."""
    said: list[str] = []
    named: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for section in error_sections(result):
        contenders = [line for line in section.lines if line.policy not in CONTROLS]
        for term in TERMS:
            lines = [line for line in contenders if line.largest == term]
            if lines:
                text, leading = _verdict(term, lines, section)
                said.append(f"{section.asked}: {text}")
                for name, rows in leading.items():
                    named[name] += rows
    return said + [f"{NAMES[term]}: {MEANING[kind]}" for term in TERMS for kind in _kinds(term, named)]


def _kinds(term: str, named: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What to make of `term` in the rows in which it leads. Dropped competition has two causes: a shift that all
    logits share, which is most of the term where it is, or weight that few tokens hold."""
    if term not in named:
        return []
    if term != "diagonal":
        return [term]
    left = [row["e_diagonal_unshared"] / row["e_diagonal"] for row in named[term] if row["e_diagonal"]]
    return ["diagonal" if not left or median(left) < 0.5 else "concentrated"]


def _verdict(term: str, lines: list[Errors], section: ErrorSection) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """What is said of the policies for which `term` is the largest, and the terms that it names with their rows."""
    text = f"{NAMES[term]} is the largest error of {_listed([line.policy for line in lines])}"
    every = {row["layer"] for members in section.rows.values() for row in members}
    named = {}
    for name in sorted(TERMS, key=lambda other: other != term):
        layers = _leading(name, lines)
        if not layers and name != term:
            continue
        rows = named[name] = [
            row for line in lines for row in section.rows[line.policy] if not layers or row["layer"] in layers
        ]
        against = [row[f"e_{name}"] / row["tangent_signal"] for row in rows if row["tangent_signal"]]
        size = f" {median(against):.1f}x the tangent signal" if against else ""
        where = f"in layer{'s' * (len(layers) > 1)} {spans(layers)}"
        if not layers or set(layers) == every:
            where = "in every layer" if layers else "in single heads of all layers"
        text += f",{size} {where}" if name == term else f"; {NAMES[name]} leads {where},{size}".rstrip(",")
    return text, named


def _leading(term: str, lines: list[Errors]) -> list[int]:
    """Layers in which `term` is the largest for at least half of these policies."""
    counts = Counter(layer for line in lines for layer in line.layers[term])
    return sorted(layer for layer, count in counts.items() if 2 * count >= len(lines))


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


@dataclass(frozen=True)
class Ladder:
    """One policy on sub-caches; means over sequences, layers and KV heads, relative to the output's energy.

    Attributes:
        total: damage beyond the least possible.
        steps: name of `STEPS` -> its part, None where the policy has no objective.
    """

    policy: str
    total: float
    steps: dict[str, float] | None


def ladders(result: Result) -> list[Ladder]:
    """One per policy, the least damage first."""
    grouped: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in result.entries("ladder"):
        if row["ladder_total"] is not None and row["output_energy"]:
            grouped[row["policy"]].append(row)
    found = []
    for policy, rows in grouped.items():
        whole = [row for row in rows if all(row[f"ladder_{step}"] is not None for step in STEPS)]
        steps = {step: _mean(whole, f"ladder_{step}") for step in STEPS} if whole else None
        found.append(Ladder(policy, _mean(rows, "ladder_total"), steps))
    return sorted(found, key=lambda line: line.total)


def _mean(rows: Iterable[dict[str, Any]], column: str) -> float:
    return fmean(row[column] / row["output_energy"] for row in rows)


def ladder_verdicts(result: Result) -> list[str]:
    """For every policy with an objective: how much damage it does beyond the best set, and the dearest step."""
    asked = result.manifest["replay"]["decompose"]
    said = []
    for line in ladders(result):
        if line.steps is None or line.policy in CONTROLS:
            continue
        step = max(line.steps, key=lambda name: line.steps[name] if line.steps else 0.0)
        said.append(
            f"keeping {asked['keep']} of {asked['pool']} tokens: {line.policy} damages the output by {line.total:.3g} "
            f"of its energy more than the best set; the dearest step is {step}, {line.steps[step]:+.3g}"
        )
    return said
