"""The built-in metrics, and the columns they fill."""

from __future__ import annotations

from functools import cache

from kvtool.metrics.metric import Column, Metric
from kvtool.registry import load_class

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


@cache
def built_in_metrics() -> dict[str, Metric]:
    """Name -> metric, in the order of the table."""
    found = {name: load_class(name, BUILT_IN, "metric")() for name in BUILT_IN}
    for name, metric in found.items():
        if not isinstance(metric, Metric) or metric.name != name:
            raise AssertionError(f"{name} in the table of metrics leads to {metric}")
    return found


def columns() -> tuple[Column, ...]:
    """The columns of all built-in metrics."""
    return tuple(column for metric in built_in_metrics().values() for column in metric.columns)
