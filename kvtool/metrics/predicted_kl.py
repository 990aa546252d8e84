"""predicted_kl: how far eviction moves the model's predictions, to second order, without running the model.

Let c be drawn at every step's logits z with the Fisher information of the model's own full-cache distribution
as covariance, and g = d/df of the summed c·z. Then E[(g·delta)^2] is delta^T F delta with the Fisher
information F of the outputs, and half of it is the leading term of KL(full || evicted).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.metrics.metric import Column, Metric, Number, mean_over_sequences
from kvtool.metrics.step_errors import StepErrors
from kvtool.metrics.student_t import two_sided
from kvtool.retained import RetainedSet

WINDOW = 32  # the window of the second column
LEAST_WINDOWS = 16  # below them the draws' means are too far from normal for an interval
UNIT = "nats per step"


@dataclass(frozen=True, eq=False)
class Whole:
    """g·delta of one sequence and cell, summed over all layers and heads before anything is squared.

    Attributes:
        first: the first evaluated step with a gradient, where the windows start.
        dot: [S, L] float64, one column per row from `first` on; zero where no layer has a gradient.
        last_target: the last step whose next token was drawn; no gradient reaches beyond it.
        steps: evaluated steps whose next token was drawn.
    """

    first: int
    dot: Tensor
    last_target: int
    steps: int

    @classmethod
    def of(cls, partials: Sequence[dict[str, Tensor]]) -> Whole | None:
        """From what `PredictedKL.partial` stored of every layer; None where there is nothing to predict from."""
        known = [partial for partial in partials if partial["dot"].numel()]
        drawn = max((int(p["drawn_steps"]) for p in known), default=0)
        if not drawn:
            return None
        first, last = (pick(int(p["steps"][end]) for p in known) for pick, end in ((min, 0), (max, -1)))
        dot = torch.zeros(known[0]["dot"].shape[0], last - first + 1, dtype=torch.float64)
        for partial in known:
            dot.index_add_(1, partial["steps"] - first, partial["dot"].to(torch.float64).sum(1))
        return cls(first, dot, int(known[0]["last_target"]), drawn)

    def at(self, steps: Tensor) -> Tensor:
        """[S, n] of these steps [n]."""
        return self.dot[:, steps - self.first]

    def between(self, start: int, stop: int) -> tuple[int, float | None]:
        """How many of the steps start..stop-1 had their next token drawn, and predicted_kl of these steps alone,
        windows of one step; None where there are none.

        Weighted by the steps drawn, spans that cover all steps add up to the whole.
        """
        past = self.last_target + 1
        drawn = max(min(stop, past) - max(start, past - self.steps), 0)
        inside = self.dot[:, max(start - self.first, 0) : max(stop - self.first, 0)]
        return drawn, float(inside.square().sum(1).mean()) / (2 * drawn) if drawn else None

    def windows(self, width: int) -> int:
        """How many windows of `width` steps there are; the last may be short."""
        return -(-(min(self.first + self.dot.shape[1] - 1, self.last_target) - self.first + 1) // width)

    def per_draw(self, width: int) -> Tensor:
        """[S] half the sum over windows of the squared sum over the window's steps, per step; one window at most
        is as wide as all steps."""
        draws, length = self.dot.shape
        width = min(width, length)
        padded = torch.zeros(draws, -(-length // width) * width, dtype=torch.float64)
        padded[:, :length] = self.dot
        return padded.view(draws, -1, width).sum(-1).square().sum(-1) / (2 * self.steps)


@dataclass(frozen=True)
class PredictedKL(Metric):
    """1/2 · mean over draws of (1/steps) · sum over windows of (sum over steps of the window, layers, heads of
    g·delta)^2, in nats per evaluated step.

    Attributes:
        windows: further windows in steps; column `predicted_kl_w<N>` each.
    """

    windows: tuple[int, ...] = ()

    name: ClassVar[str] = "predicted_kl"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("predicted_kl_share", "head", UNIT, "none", "the head's part of predicted_kl", share=True),
        Column("predicted_kl_share", "layer", UNIT, "none", "the layer's part of predicted_kl", share=True),
        Column("predicted_kl", "cell", UNIT, "lower", "KL(full || evicted) to second order, windows of one step"),
        Column("predicted_kl_se", "cell", UNIT, "none", "standard error over draws"),
        Column("predicted_kl_low", "cell", UNIT, "none", "lower end of a 95 % interval over draws"),
        Column("predicted_kl_high", "cell", UNIT, "none", "upper end"),
        Column(f"predicted_kl_w{WINDOW}", "cell", UNIT, "lower", f"the same with windows of {WINDOW} steps"),
        Column("predicted_kl_steps", "cell", "steps", "none", "evaluated steps whose next token was drawn"),
        Column("predicted_kl_draws", "cell", "draws", "none", "independent draws of gradients"),
    )

    def partial(self, errors: StepErrors, geometry: Geometry, retained: RetainedSet) -> dict[str, Tensor]:
        """`dot` [S, H, m] at the `steps` [m] that have a gradient; S and m are 0 where none has."""
        return self.partials([errors], geometry, [retained])[0]

    def partials(
        self, errors: Sequence[StepErrors], geometry: Geometry, retained: Sequence[RetainedSet]
    ) -> list[dict[str, Tensor]]:
        found = []
        for mine, every in zip(errors, _with_gradient(errors), strict=True):
            dot, gradients, known = mine.gradient_dot, mine.gradients, mine.steps
            if dot is None or gradients is None:
                dot, known = torch.zeros(0, geometry.query_heads, 0), known[:0]
            elif not every:
                has = ~torch.isnan(dot[0, 0])
                dot, known = dot[:, :, has], known[has]
            last = -1 if gradients is None else gradients.targets[1] - 1
            drawn = torch.tensor(mine.drawn_steps)
            found.append({"dot": dot, "steps": known, "drawn_steps": drawn, "last_target": torch.tensor(last)})
        return found

    def combine(self, partials: Sequence[dict[str, Tensor]]) -> dict[str, Number]:
        whole = Whole.of(partials)
        found: dict[str, Number] = {column.name: None for column in self.columns if column.level == "cell"}
        extra = {width: f"predicted_kl_w{width}" for width in self.windows if width != 1}
        found.update(dict.fromkeys(extra.values()))
        if whole is None:
            return found
        single = whole.per_draw(1)
        draws = single.numel()
        found |= {"predicted_kl": float(single.mean()), "predicted_kl_steps": whole.steps, "predicted_kl_draws": draws}
        for width, column in {WINDOW: f"predicted_kl_w{WINDOW}", **extra}.items():
            found[column] = float(whole.per_draw(width).mean())
        if draws > 1:
            found["predicted_kl_se"] = float(single.std()) / math.sqrt(draws)
            if whole.windows(1) >= LEAST_WINDOWS:
                found |= _interval(found, draws)
        return found

    def shares(self, partials: Sequence[dict[str, Tensor]]) -> dict[str, list[Tensor]]:
        """1/2 · mean over draws of (1/steps) · sum over steps of (the head's own part · the whole): they add up
        to predicted_kl and may be negative."""
        whole = Whole.of(partials)
        found = []
        for partial in partials:
            if whole is None or not partial["dot"].numel():
                found.append(torch.full((partial["dot"].shape[1],), math.nan, dtype=torch.float64))
                continue
            own = partial["dot"].to(torch.float64)  # [S, H, m]
            parts = torch.einsum("shm,sm->h", own, whole.at(partial["steps"]))
            found.append(parts / (2 * whole.steps * own.shape[0]))
        return {"predicted_kl_share": found}

    def average(self, cells: Sequence[dict[str, Number]]) -> dict[str, Number]:
        """Means over sequences; their draws are independent, so variances add. An interval needs one of each
        sequence and takes the freedom of the one with the fewest draws, which is on the wide side."""
        mean = mean_over_sequences(cells)
        known = [cell for cell in cells if cell["predicted_kl"] is not None]
        mean |= {"predicted_kl_se": None, "predicted_kl_low": None, "predicted_kl_high": None}
        steps = [cell["predicted_kl_steps"] for cell in cells if cell["predicted_kl_steps"] is not None]
        mean["predicted_kl_steps"] = sum(steps) if steps else None
        mean["predicted_kl_draws"] = min((cell["predicted_kl_draws"] or 0 for cell in known), default=None)
        errors = [cell["predicted_kl_se"] for cell in known]
        spread = [e for e in errors if e is not None]
        if known and len(spread) == len(known):
            mean["predicted_kl_se"] = math.hypot(*spread) / len(known)
            if all(cell["predicted_kl_high"] is not None for cell in known):
                mean |= _interval(mean, int(mean["predicted_kl_draws"] or 0))
        return mean


def _with_gradient(errors: Sequence[StepErrors]) -> list[bool]:
    """Whether every step of a cell has a gradient."""
    firsts = [mine.gradient_dot[0, 0] for mine in errors if mine.gradient_dot is not None]
    if len(firsts) < len(errors):
        return [False] * len(errors)
    missing: list[bool] = torch.isnan(torch.stack(firsts)).any(1).tolist()
    return [not any_missing for any_missing in missing]


def _interval(found: dict[str, Number], draws: int) -> dict[str, Number]:
    """Student t over draws, 95 %, cut at 0."""
    middle, error = float(found["predicted_kl"] or 0.0), float(found["predicted_kl_se"] or 0.0)
    half = two_sided(draws - 1) * error
    return {"predicted_kl_low": max(0.0, middle - half), "predicted_kl_high": middle + half}
