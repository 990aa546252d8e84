"""Tangents: attention over one set of tokens as a function of the query, and its derivative at a centre."""

from kvtool.kernels.tangent.reference import Tangent, attend, attention_weights, tangent_at

__all__ = ["Tangent", "attend", "attention_weights", "tangent_at"]
