"""On a trace: the attention and scoring rows once more, on stored layers instead of made-up ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvtool.bench import attention, scoring
from kvtool.bench.goals import GOALS, Goal, Measured, entry
from kvtool.bench.situation import Situation
from kvtool.bench.synthetic import Case, case_of
from kvtool.bench.timing import OutOfTime
from kvtool.layer import Layer
from kvtool.policies.capacity_pool import Pool
from kvtool.trace import Trace, open_trace

LAYERS = 2  # the first and the middle one: layers differ in what attention looks like, not in what it costs
SECONDS = 15.0
OUT_OF_TIME = "the time of the bench was over: give it more with --budget"
ROWS = {
    "output_errors": "output_errors_8k",
    "against_masked_sdpa": "against_masked_sdpa",
    "against_gathered_sdpa": "against_gathered_sdpa",
    "leverage_against_solving": "leverage_against_solving",
    "leverage_against_two_gemms": "leverage_against_two_gemms",
    "greedy_against_refactorising": "greedy_against_refactorising",
}


@dataclass(frozen=True)
class Opened:
    """A trace and the layers of its first sequence that are measured."""

    trace: Trace
    layers: list[int]

    @classmethod
    def of(cls, trace: str | Path) -> Opened:
        """Open it.

        Raises:
            KvtoolError: whatever opening raises.
        """
        opened = open_trace(trace)
        ids = opened.sequences[0].layer_ids
        return cls(opened, sorted({ids[0], ids[len(ids) // 2]})[:LAYERS])

    def describe(self) -> dict[str, Any]:
        """For the manifest."""
        return {"digest": self.trace.digest, "layers": self.layers}

    def entries(self, here: Situation) -> list[dict[str, Any]]:
        """One entry per layer and row, named with the layer's id. They have no goal: the shape is the trace's own."""
        goals = {goal.name: goal for goal in GOALS}
        found = []
        for layer_id in self.layers:
            measured = on_layer(here, self.trace.sequences[0].layer(layer_id))
            for row, name in ROWS.items():
                like = goals[name]
                against = like.against.split(";")[0]
                goal = Goal(f"{row}_layer_{layer_id}", None, like.at_most, against, like.floor, like.unit)
                found.append(entry(goal, measured[row]))
        return found


def on_layer(here: Situation, layer: Layer) -> dict[str, Measured]:
    """Every row of one layer."""
    made = case_of(layer, attention.QUERIES)
    found: dict[str, Measured] = {}
    for names, measure in (
        (("output_errors", "against_masked_sdpa", "against_gathered_sdpa"), lambda: _attention(here, made)),
        (("leverage_against_solving", "leverage_against_two_gemms"), lambda: _leverage(here, made)),
        (("greedy_against_refactorising",), lambda: _greedy(here, made)),
    ):
        found |= _in_time(names, measure)
    return found


def _in_time(names: tuple[str, ...], measure: Callable[[], dict[str, Measured]]) -> dict[str, Measured]:
    try:
        return measure()
    except OutOfTime:
        return dict.fromkeys(names, Measured.without(OUT_OF_TIME))


def _attention(here: Situation, made: Case) -> dict[str, Measured]:
    names = ("output_errors", "against_masked_sdpa", "against_gathered_sdpa")
    if made.softcap is not None or made.sink_logits is not None:
        return dict.fromkeys(names, Measured.without("SDPA has no softcap and no sink logits, and this layer has"))
    return attention.on_case(here, made, SECONDS)


def _weights(made: Case) -> torch.Tensor:
    """[H, N] float64, attention of the mean query of each head."""
    group = made.queries.shape[0] // made.keys.shape[0]
    centre = made.queries.to(torch.float64).mean(1)
    keys = made.keys.to(torch.float64).repeat_interleave(group, 0)
    return (made.scale * (keys @ centre[:, :, None])[..., 0]).softmax(1)


def _leverage(here: Situation, made: Case) -> dict[str, Measured]:
    return scoring.compared_leverage(here, made.values.to(torch.float64), _weights(made), SECONDS / 2)


def _greedy(here: Situation, made: Case) -> dict[str, Measured]:
    newest = slice(-scoring.CANDIDATES, None)
    weights = _weights(made)[:1, newest]
    pool = Pool(weights, made.values[:1, newest].to(torch.float64), weights.mean(1))
    picks = max(1, min(scoring.PICKS, weights.shape[1] // 4))
    return {"greedy_against_refactorising": scoring.compared_greedy(here, pool, picks, SECONDS)}
