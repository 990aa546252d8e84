"""Output space: how far the local picture of a head's output is from the truth, and which step of it is to blame.

selection = f_P(q) - f_C(q)                     eviction itself
taylor    = f_C(q) - f_C(mu) - J_C dq           linearising
diagonal  = (J_C - JD_C) dq                     dropping the competition between tokens
total     = f_P(q) - [f_C(mu) + JD_C dq]        their sum, computed on its own
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from kvtool.kernels.tangent import Tangent, attention_weights

TERMS = ("selection", "taylor", "diagonal")
PAIRS = tuple(combinations(TERMS, 2))
STEP = 1e-4  # largest move of a logit in a finite difference
FLOOR = 1e-6  # of max|u|: below it a tangent is too small to be measured against


@dataclass(frozen=True, eq=False)
class OutputTerms:
    """The errors of G query heads at F queries, as vectors.

    Attributes:
        pool, kept: [G, F, Dv], f_P and f_C at the queries.
        signal: [G, F, Dv], f_C(q) - f_C(mu): what there is to explain.
        parts: name of `TERMS` -> [G, F, Dv].
        unshared: [G, F, Dv], what is left of `diagonal` without the shift that all logits share.
        total: [G, F, Dv], computed on its own.
    """

    pool: Tensor
    kept: Tensor
    signal: Tensor
    parts: dict[str, Tensor]
    unshared: Tensor
    total: Tensor

    @classmethod
    def of(
        cls, pool: Tensor, kept: Tensor, shift: Tensor, tangent: Tangent, full: Tensor, diagonal: Tensor
    ) -> OutputTerms:
        """From f_P and f_C [G, F, Dv], dq [G, F, D] and the matrices J_C and JD_C [G, Dv, D]."""
        middle = tangent.output[:, None, :]
        signal = kept - middle
        straight, alone = shift @ full.transpose(1, 2), shift @ diagonal.transpose(1, 2)
        parts = {
            "selection": pool - kept,
            "taylor": signal - straight,
            "diagonal": shift @ (full - diagonal).transpose(1, 2),
        }
        unshared = shift @ tangent.concentrated_matrix().transpose(1, 2)
        return cls(pool, kept, signal, parts, unshared, pool - (middle + alone))

    def columns(self) -> dict[str, Tensor]:
        """[G] each; NaN where f_P is zero at every query."""
        square = self.pool.square().sum((1, 2))

        def relative(vectors: Tensor) -> Tensor:
            return (vectors.square().sum((1, 2)) / square).sqrt()

        found = {f"e_{name}": relative(self.parts[name]) for name in TERMS}
        found["e_diagonal_unshared"] = relative(self.unshared)
        found |= {"e_total": relative(self.total), "tangent_signal": relative(self.signal)}
        for one, other in PAIRS:
            found[f"cross_{one}_{other}"] = 2 * (self.parts[one] * self.parts[other]).sum((1, 2)) / square
        found["identity_residual"] = relative(self.total - sum(self.parts.values()))
        return found


def tangent_residual(
    shift: Tensor, centre: Tensor, tangent: Tangent, full: Tensor, softcap: float | None, sink_logits: Tensor | None
) -> Tensor:
    """[G]: how far J_C dq is from central differences of f_C at the centre [G, D], along the shifts [G, r, D].

    Root sums of squares over the shifts, relative to the tangent itself or, where that is all but zero, to
    1e-6 of the longest direction. A step moves no logit by more than 1e-4.
    """
    if not tangent.keys.shape[0]:  # nothing is kept, and nothing moves
        return torch.full((len(shift),), torch.nan, dtype=shift.dtype)
    straight = shift @ full.transpose(1, 2)
    largest = tangent.responses(shift).abs().amax(-1, keepdim=True)  # [G, r, 1]
    still = largest == 0  # no logit moves, and neither does the output
    step = torch.where(still, 0.0, STEP / torch.where(still, 1.0, largest))
    moved = step * shift
    both = torch.cat([centre[:, None] + moved, centre[:, None] - moved], dim=1)
    how = {"scale": tangent.scale, "softcap": softcap, "sink_logits": sink_logits}
    weights, sink = (torch.sub(*found.chunk(2, dim=1)) for found in attention_weights(both, tangent.keys, **how))
    # Weights and the sink's add up to 1 on both sides, so what their sum moves is rounding. Where one token holds
    # nearly all of the weight, that rounding is as large as the tangent; along the output it is taken off.
    rounding = (weights.sum(-1) + sink)[:, :, None] * tangent.output[:, None]
    differences = torch.where(still, 0.0, (weights @ tangent.directions - rounding) / torch.where(still, 1.0, 2 * step))
    longest = tangent.directions.norm(dim=1).amax()
    return _norm(differences - straight) / torch.maximum(_norm(straight), FLOOR * longest)


def _norm(vectors: Tensor) -> Tensor:
    return vectors.square().sum((1, 2)).sqrt()
