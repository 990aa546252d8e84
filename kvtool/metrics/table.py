"""The built-in metrics and the columns they fill, and how a command-line word becomes a metric."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from kvtool.metrics.metric import Column, Metric
from kvtool.registry import spell, split_spec
from kvtool.shelf import Shelf

BUILT_IN: dict[str, str] = {
    "output_error": "kvtool.metrics.output_error:OutputError",
    "layer_error": "kvtool.metrics.output_error:LayerError",
    "cosine_distance": "kvtool.metrics.attention_change:CosineDistance",
    "evicted_mass": "kvtool.metrics.attention_change:EvictedMass",
    "direction_gap": "kvtool.metrics.attention_change:DirectionGap",
    "predicted_kl": "kvtool.metrics.predicted_kl:PredictedKL",
    "cache_size": "kvtool.metrics.cache_size:CacheSize",
    "mass_regret": "kvtool.metrics.mass_regret:MassRegret",
}

SHELF = Shelf("metric", BUILT_IN)


@cache
def built_in_metrics() -> dict[str, Metric]:
    """Name -> metric, in the order of the table."""
    found = {name: SHELF.load(name, Metric, own=True)() for name in BUILT_IN}
    for name, metric in found.items():
        if not isinstance(metric, Metric) or metric.name != name:
            raise AssertionError(f"{name} in the table of metrics leads to {metric}")
    return found


def metric_from_text(text: str) -> tuple[str, Metric]:
    """`name:key=value,…` or `file.py:Class:…` -> (label, metric), the label with defaults left out.

    Raises:
        KvtoolError: `metric-unknown`, `metric-parameter`, `plugin-broken` or `plugin-twice`.
    """
    spec = split_spec(text, "metric")
    metric: Metric = SHELF.made(spec, Metric)
    return spell(spec.name, metric), metric


def columns(metrics: Iterable[Metric] | None = None) -> tuple[Column, ...]:
    """The columns of these metrics, or of all built-in ones."""
    metrics = built_in_metrics().values() if metrics is None else metrics
    return tuple(column for metric in metrics for column in metric.columns)
