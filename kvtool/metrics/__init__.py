"""Metrics: what eviction did to attention, and how old the tokens are that stayed."""

from kvtool.metrics.ages import AGE_COLUMNS, ages
from kvtool.metrics.evaluate import evaluate_layer
from kvtool.metrics.landmarks import landmark_entries
from kvtool.metrics.mass_regret import mass_regret
from kvtool.metrics.metric import Column, Metric, mean_over_sequences, nullable
from kvtool.metrics.predicted_kl import PredictedKL, Whole
from kvtool.metrics.renumbered import evaluate_cells, renumbered_errors
from kvtool.metrics.step_errors import StepErrors, measure
from kvtool.metrics.table import BUILT_IN, built_in_metrics, columns
from kvtool.metrics.token_shares import token_shares

__all__ = [
    "AGE_COLUMNS",
    "BUILT_IN",
    "Column",
    "Metric",
    "PredictedKL",
    "StepErrors",
    "Whole",
    "ages",
    "built_in_metrics",
    "columns",
    "evaluate_cells",
    "evaluate_layer",
    "landmark_entries",
    "mass_regret",
    "mean_over_sequences",
    "measure",
    "nullable",
    "renumbered_errors",
    "token_shares",
]
