"""The conformance suite passes on every built-in metric, and fails on metrics that break a rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvtool.metrics import BUILT_IN, Column, Metric, built_in_metrics
from kvtool.testing import check_metric


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_metrics_conform(name: str) -> None:
    zero = ("output_error", "mean_output_error", "layer_error", "mean_layer_error", "evicted_mass", "cosine_distance")
    zero += ("predicted_kl", "predicted_kl_w32")
    metric = built_in_metrics()[name]
    full = {column.name: 0.0 for column in metric.columns if column.name in zero}
    check_metric(type(metric), full=full)
    assert metric == type(metric)()


@dataclass(frozen=True)
class Good(Metric):
    """The mean error of a head."""

    name = "mean_error"
    columns = (
        Column("mean_error", "head", "relative L2", "lower", "mean over steps"),
        Column("mean_error_layer", "layer", "relative L2", "lower", "mean over heads"),
        Column("mean_error_cell", "cell", "relative L2", "lower", "mean over layers"),
    )

    def partial(self, errors, geometry, retained):
        heads = (errors.squared_error / errors.squared_output).sqrt().nanmean(-1)
        return {"mean_error": heads, "mean_error_layer": heads.nanmean()}

    def combine(self, partials: Sequence[dict[str, torch.Tensor]]) -> dict[str, Any]:
        known = [float(p["mean_error_layer"]) for p in partials if not bool(p["mean_error_layer"].isnan())]
        return {"mean_error_cell": math.fsum(known) / len(known) if known else None}


def test_a_metric_that_keeps_the_rules_passes() -> None:
    check_metric(Good, full={"mean_error": 0.0, "mean_error_cell": 0.0})
    assert check_metric(Good()) is None  # type: ignore[func-returns-value]


class Random(Good):
    def partial(self, errors, geometry, retained):
        return {n: v + torch.rand(()) for n, v in super().partial(errors, geometry, retained).items()}


ASKED: list[int] = []


class Remembers(Good):
    def partial(self, errors, geometry, retained):
        ASKED.append(1)
        found = super().partial(errors, geometry, retained)
        return {**found, "mean_error": found["mean_error"] + len(ASKED) % 2}


class Writes(Good):
    def partial(self, errors, geometry, retained):
        retained.evict_step.clamp_(max=3)
        return super().partial(errors, geometry, retained)


class WritesThroughNumPy(Good):
    def partial(self, errors, geometry, retained):
        retained.evict_step.numpy()[:] = 3
        return super().partial(errors, geometry, retained)


class ClearsEvents(Good):
    def partial(self, errors, geometry, retained):
        retained.events.clear()
        return super().partial(errors, geometry, retained)


class SortsPartials(Good):
    def combine(self, partials):
        for partial in partials:
            partial["mean_error"].numpy().sort()
        return super().combine(partials)


class NeedsGradients(Good):
    def partial(self, errors, geometry, retained):
        errors.gradient_dot.sum()
        return super().partial(errors, geometry, retained)


class NeedsAProjection(Good):
    def partial(self, errors, geometry, retained):
        return {**super().partial(errors, geometry, retained), "mean_error_layer": errors.layer_squared_error.sum()}


class NeedsOneEvent(Good):
    def partial(self, errors, geometry, retained):
        (event,) = retained.events
        return {**super().partial(errors, geometry, retained), "step": torch.tensor(event.step)}


class NeedsCandidates(Good):
    def partial(self, errors, geometry, retained):
        for event in retained.events:
            event.candidates.sum()
        return super().partial(errors, geometry, retained)


class NeedsFutureMass(Good):
    def partial(self, errors, geometry, retained):
        return {**super().partial(errors, geometry, retained), "mass": errors.future_mass.sum()}


class NeedsManySteps(Good):
    def partial(self, errors, geometry, retained):
        errors.squared_error[:, 1].sum()
        return super().partial(errors, geometry, retained)


class WrongHeads(Good):
    def partial(self, errors, geometry, retained):
        found = super().partial(errors, geometry, retained)
        return {**found, "mean_error": found["mean_error"].view(geometry.kv_heads, -1).mean(1)}


class NotFullAtZero(Good):
    def partial(self, errors, geometry, retained):
        return {n: v + 1 for n, v in super().partial(errors, geometry, retained).items()}


class FirstLayerOnly(Good):
    def combine(self, partials):
        return super().combine(partials[:1])


class NaNInside(Good):
    def combine(self, partials):
        known = [float(p["mean_error_layer"]) for p in partials]
        return {"mean_error_cell": max(known) if all(k == k for k in known) else 1 / 0}


class AveragesToHalf(Good):
    def average(self, cells):
        known = [c["mean_error_cell"] for c in cells if c["mean_error_cell"] is not None]
        return {"mean_error_cell": sum(known) / 2 if known else None}


class FirstSequence(Good):
    def average(self, cells):
        return dict(cells[0])


class NoNone(Good):
    def average(self, cells):
        return {"mean_error_cell": sum(c["mean_error_cell"] for c in cells) / len(cells)}


class SharesTooFew(Good):
    columns = (
        *Good.columns,
        Column("mean_error_part", "head", "relative L2", "none", "a part", share=True),
        Column("mean_error_part", "layer", "relative L2", "none", "a part", share=True),
    )

    def shares(self, partials):
        return {"mean_error_part": [p["mean_error"][:1] for p in partials]}


class Doubled(Good):
    columns = (*Good.columns, Good.columns[0])


class Taken(Good):
    columns = (*Good.columns, Column("evicted_mass", "head", "share", "lower", "mine"))


BROKEN = {
    Random: "gives other numbers when it is asked again",
    Remembers: "asked",
    Writes: "changed what it was shown",
    WritesThroughNumPy: "changed what it was shown",
    ClearsEvents: "changed what it was shown",
    SortsPartials: "changed what it was shown",
    NeedsGradients: "no output projection and no gradients",
    NeedsAProjection: "no output projection and no gradients",
    NeedsOneEvent: "nothing evicted and no event",
    NeedsCandidates: "two events",
    NeedsFutureMass: "'NoneType' object has no attribute 'sum'",
    NeedsManySteps: "index 1 is out of bounds",
    WrongHeads: "expected [4] of numbers",
    NotFullAtZero: "gives mean_error = 1.0 where nothing was evicted, not 0",
    FirstLayerOnly: "combines otherwise in another order of layers",
    NaNInside: "outputs that are zero",
    AveragesToHalf: "averages one sequence to something else",
    FirstSequence: "averages otherwise in another order of sequences",
    NoNone: "unsupported operand type",
    SharesTooFew: "shares out mean_error_part as",
    Doubled: "declares a column twice",
    Taken: "evicted_mass, which is a column of a built-in metric",
}


@pytest.mark.parametrize("metric", BROKEN, ids=lambda cls: cls.__name__)
def test_a_broken_rule_is_said_in_one_sentence(metric: type[Good]) -> None:
    frozen = dataclass(frozen=True)(metric)
    with pytest.raises(AssertionError) as caught:
        check_metric(frozen, full={"mean_error": 0.0} if metric is NotFullAtZero else None)
    assert str(caught.value).startswith(metric.__name__)
    assert BROKEN[metric] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_declarations_that_are_none() -> None:
    class Bare(Good):
        pass

    @dataclass
    class Thawed:
        share: float = field(default=0.5)

    with pytest.raises(AssertionError, match="lacks @dataclass"):
        check_metric(Bare)
    with pytest.raises(AssertionError, match=r"not a subclass of kvtool\.metrics\.Metric"):
        check_metric(Thawed)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="has no column other"):
        check_metric(Good, full={"other": 0.0})
