"""Ages, summed up: how old what a policy keeps is, and how long tokens survive. Weighted by tokens, not by heads."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from kvtool.metrics.ages import mean_over_heads
from kvtool.result import Result
from kvtool.words import asked

EXPOSURES = (1, 4, None)  # None: all there were


@dataclass(frozen=True)
class AgeLine:
    """One policy at one ratio or budget: over events, sequences, layers and KV heads.

    Attributes:
        asked: ratio or budget in words.
        layer: the layer that it speaks of, None for all.
        events: that were told, the most of any head.
        median, p90: of the kept tokens' ages after an event in rows, mean of the heads'; oldest: the oldest.
        sinks, window, flexible: shares of the kept tokens.
        turnover: share of the candidates that an event evicts.
        frozen: share of heads whose flexible set had long been the same at their last event.
        survival: part -> the share alive after 1, 4 and all exposures; None where no token had so many.
        histogram: kept tokens by age, bin b from 2^b to 2^(b+1) - 1.
    """

    policy: str
    schedule: str
    asked: str
    layer: int | None
    events: int
    median: float | None
    p90: float | None
    oldest: int | None
    sinks: float | None
    window: float | None
    flexible: float | None
    turnover: float | None
    frozen: float | None
    survival: dict[str, list[float | None]]
    histogram: list[int]


def age_lines(result: Result, by_layer: bool = False) -> list[AgeLine]:
    """One line per policy, schedule and ratio or budget, in the order of the cells; `by_layer` per layer too.

    Without an event the ages are those at the end of the sequence.
    """
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for entry in result.entries("ages"):
        key = entry["policy"], entry["schedule"], entry["ratio"], entry["budget"]
        grouped[*key, entry["layer"] if by_layer else None].append(entry)
    return [_line(key, entries) for key, entries in grouped.items()]


def _line(key: tuple[Any, ...], entries: list[dict[str, Any]]) -> AgeLine:
    policy, schedule, ratio, budget, layer = key
    ends = [entry for entry in entries if entry["event"] is None]
    told = [entry for entry in entries if entry["event"] is not None]
    heads: dict[tuple[int, int, int], list[dict[str, Any]]] = defaultdict(list)
    for entry in told:
        heads[entry["sequence"], entry["layer"], entry["kv_head"]].append(entry)
    last = [max(mine, key=lambda entry: int(entry["event"])) for mine in heads.values()]
    shown = told or ends
    pooled = sum(entry["turnover_candidates"] for entry in ends)  # of all events, told or not
    return AgeLine(
        policy=policy,
        schedule=schedule,
        asked=asked(ratio, budget),
        layer=layer,
        events=max((len(mine) for mine in heads.values()), default=0),
        median=mean_over_heads(shown, "kept_age_p50"),
        p90=mean_over_heads(shown, "kept_age_p90"),
        oldest=max((e["kept_age_max"] for e in shown if e["kept_age_max"] is not None), default=None),
        sinks=mean_over_heads(shown, "kept_sinks_share"),
        window=mean_over_heads(shown, "kept_window_share"),
        flexible=mean_over_heads(shown, "kept_flexible_share"),
        turnover=sum((e["turnover"] or 0.0) * e["turnover_candidates"] for e in ends) / pooled if pooled else None,
        frozen=sum(entry["frozen"] for entry in last) / len(last) if last else None,
        survival={part: _survival(ends, part) for part in ("prompt", "decode")},
        histogram=[sum(column) for column in zip_longest(*(e["kept_age_histogram"] for e in shown), fillvalue=0)],
    )


def _survival(ends: list[dict[str, Any]], part: str) -> list[float | None]:
    """S after 1, 4 and all exposures, tokens of all heads at risk together."""
    risk: dict[int, int] = defaultdict(int)
    left: dict[int, float] = defaultdict(float)
    for entry in ends:
        before = 1.0
        for exposure, (alive, count) in enumerate(
            zip(entry[f"survival_{part}"], entry[f"survival_{part}_at_risk"], strict=True)
        ):
            risk[exposure] += count
            left[exposure] += count * (1 - alive / before)  # whoever is at risk survived so far: before > 0
            before = alive
    curve, alive = [], 1.0
    for exposure in range(len(risk)):
        alive *= 1 - left[exposure] / risk[exposure]
        curve.append(max(alive, 0.0))
    return [curve[(number or len(curve)) - 1] if len(curve) >= (number or 1) else None for number in EXPOSURES]
