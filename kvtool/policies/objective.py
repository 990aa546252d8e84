"""Objective: the capacity that a policy means to maximise, as numbers that a search can read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Objective:
    """1/2 logdet(I + sum over kept i of w_i u_i u_i^T / ridge) in nats, one of it per query head.

    Attributes:
        weights: [H, N] float64, >= 0, one per candidate.
        directions: [H, N, Dv] float64 (or fewer channels where directions are compressed).
        ridge: [H] float64, > 0.
    """

    weights: Tensor
    directions: Tensor
    ridge: Tensor
