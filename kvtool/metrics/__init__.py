"""Metrics: what eviction did to attention, and how old the tokens are that stayed."""

from kvtool.metrics.ages import AGE_COLUMNS, ages, ages_of_cells
from kvtool.metrics.asked import Asked, asked_metrics, in_sequence
from kvtool.metrics.describe import describe_metrics
from kvtool.metrics.evaluate import evaluate_layer
from kvtool.metrics.landmarks import landmark_entries
from kvtool.metrics.mass_regret import mass_regret
from kvtool.metrics.metric import Column, Metric, mean_over_sequences, nullable
from kvtool.metrics.predicted_kl import PredictedKL, Whole
from kvtool.metrics.renumbered import evaluate_cells, renumbered_errors
from kvtool.metrics.step_errors import StepErrors, measure
from kvtool.metrics.table import BUILT_IN, built_in_metrics, columns, metric_from_text
from kvtool.metrics.token_shares import token_shares
from kvtool.metrics.trial import trial

__all__ = [
    "AGE_COLUMNS",
    "BUILT_IN",
    "Asked",
    "Column",
    "Metric",
    "PredictedKL",
    "StepErrors",
    "Whole",
    "ages",
    "ages_of_cells",
    "asked_metrics",
    "built_in_metrics",
    "columns",
    "describe_metrics",
    "evaluate_cells",
    "evaluate_layer",
    "in_sequence",
    "landmark_entries",
    "mass_regret",
    "mean_over_sequences",
    "measure",
    "metric_from_text",
    "nullable",
    "renumbered_errors",
    "token_shares",
    "trial",
]
