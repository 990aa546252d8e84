"""Conformance checks for policies and metrics, kvtool's own or yours.

    from kvtool.testing import check_metric, check_policy

    def test_mine():
        check_policy(MyPolicy)
        check_metric(MyMetric)

Each raises AssertionError with one clear sentence at the first rule that is broken.
"""

from kvtool.example_layer import example_layer
from kvtool.testing.metrics import check_metric
from kvtool.testing.policies import check_policy, scores_at

__all__ = ["check_metric", "check_policy", "example_layer", "scores_at"]
