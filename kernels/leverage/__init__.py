"""Leverage scores: weighted Gram matrix, Cholesky factor, w_i u_i^T A^-1 u_i."""

from kvtool.kernels.device import door
from kvtool.kernels.leverage import reference
from kvtool.kernels.leverage.reference import Leverage, LeverageError, weighted_gram

__all__ = ["Leverage", "LeverageError", "factor_of", "leverage_scores", "weighted_gram"]

factor_of = door("leverage", reference.factor_of)
leverage_scores = door("leverage", reference.leverage_scores)
