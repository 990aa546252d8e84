"""Eviction policies: each scores the candidates of a causal view, higher is kept."""

from kvtool.policies.describe import describe_policies
from kvtool.policies.policy import Policy, Protection
from kvtool.policies.table import ALL, BUILT_IN, policy_from_text

__all__ = ["ALL", "BUILT_IN", "Policy", "Protection", "describe_policies", "policy_from_text"]
