"""Nats: how much the model's predictions would move if a head's output were wrong by one of the terms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtool.decomposition.output_space import PAIRS, TERMS, OutputTerms
from kvtool.layer import Layer


@dataclass(frozen=True, eq=False)
class HeadGradients:
    """The gradients of G query heads at those of the F evaluated steps that have one.

    Attributes:
        gradients: [S, G, m, Dv] float64.
        at: [m] int64, which of the F steps.
        drawn: how many of the F steps had their next token drawn, the divisor.
    """

    gradients: Tensor
    at: Tensor
    drawn: int

    @classmethod
    def of(cls, layer: Layer, steps: Tensor, heads: slice) -> HeadGradients | None:
        """Those of the query heads `heads` at `steps` [F]; None where none of the steps has one."""
        known, gradients = layer.gradient_steps, layer.output_gradients
        if layer.gradients is None or known is None or gradients is None:
            return None
        found = torch.searchsorted(known, steps).clamp_max(known.numel() - 1)
        at = (known[found] == steps).nonzero()[:, 0]
        low, high = layer.gradients.targets
        drawn = int(((steps >= low) & (steps < high)).sum())
        if not at.numel() or not drawn:
            return None
        return cls(gradients[:, heads, found[at]].to(torch.float64), at, drawn)

    def columns(self, terms: OutputTerms) -> dict[str, Tensor]:
        """[G] each, nats per step: 1/2 mean over draws of (1/steps) sum over steps of (g·e)^2 of this head alone.

        The total is the sum of the three terms and the three crosses.
        """
        dots = {name: self._dot(terms.parts[name]) for name in TERMS}
        found = {f"nats_{name}": self._mean(dots[name] * dots[name]) for name in TERMS}
        for name, vectors in (("total", terms.total), ("signal", terms.signal)):
            dot = self._dot(vectors)
            found[f"nats_{name}"] = self._mean(dot * dot)
        for one, other in PAIRS:
            found[f"nats_cross_{one}_{other}"] = 2 * self._mean(dots[one] * dots[other])
        return found

    def _dot(self, vectors: Tensor) -> Tensor:
        """[S, G, m], g·e of the vectors [G, F, Dv]."""
        return torch.einsum("sgmv,gmv->sgm", self.gradients, vectors[:, self.at])

    def _mean(self, products: Tensor) -> Tensor:
        return products.sum((0, 2)) / (2 * products.shape[0] * self.drawn)


def undefined(heads: int) -> dict[str, Tensor]:
    """The same columns where there are no gradients."""
    names = [*TERMS, "total", "signal", *(f"cross_{one}_{other}" for one, other in PAIRS)]
    return {f"nats_{name}": torch.full((heads,), torch.nan, dtype=torch.float64) for name in names}
