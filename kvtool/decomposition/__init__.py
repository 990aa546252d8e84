"""Decomposition: what the local linear picture of eviction costs, term by term (docs/decomposition.md)."""

from kvtool.decomposition.center import Centre, centre_of_layer
from kvtool.decomposition.kv_head import KVHead
from kvtool.decomposition.settings import CENTERS, Decompose

__all__ = ["CENTERS", "Centre", "Decompose", "KVHead", "centre_of_layer"]
