"""Sources of made-up packages, and how one is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

POLICY = '''
from dataclasses import dataclass
from kvtool.policies import Policy

@dataclass(frozen=True)
class Newest(Policy):
    """Keep the newest."""

    power: float = 1.0

    def score(self, state, view):
        return view.tokens.to(view.dtype) * self.power
'''
METRIC = '''
from dataclasses import dataclass
import torch
from kvtool.metrics import Column, Metric

@dataclass(frozen=True)
class Worst(Metric):
    """The worst step of a head."""

    times: float = 1.0

    name = "worst"
    version = 3
    columns = (
        Column("worst_tokens", "head", "relative L2", "lower", "the worst step"),
        Column("worst_layer", "layer", "relative L2", "lower", "the worst head"),
        Column("worst_cell", "cell", "relative L2", "lower", "the worst layer"),
        Column("layers_seen", "cell", "layers", "none", "how many layers there were"),
    )

    def partial(self, errors, geometry, retained):
        heads = (errors.squared_error / errors.squared_output).sqrt().amax(-1) * self.times
        return {"worst_tokens": heads, "worst_layer": heads.max()}

    def combine(self, partials):
        return {"worst_cell": max(float(p["worst_layer"]) for p in partials), "layers_seen": len(partials)}
'''

Install = Callable[..., Path]
