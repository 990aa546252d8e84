"""The built-in policies, and how a command-line word becomes one."""

from __future__ import annotations

from kvtool.errors import KvtoolError
from kvtool.policies.policy import Policy
from kvtool.registry import configure, load_class, split_spec

BUILT_IN: dict[str, str] = {
    "full": "kvtool.policies.full:Full",
    "random": "kvtool.policies.random:Random",
    "streaming-llm": "kvtool.policies.streaming_llm:StreamingLLM",
    "knorm": "kvtool.policies.knorm:KNorm",
    "keydiff": "kvtool.policies.keydiff:KeyDiff",
    "tova": "kvtool.policies.tova:TOVA",
    "h2o": "kvtool.policies.h2o:H2O",
    "observed-attention": "kvtool.policies.observed_attention:ObservedAttention",
    "snapkv": "kvtool.policies.snapkv:SnapKV",
    "r-kv": "kvtool.policies.r_kv:RKV",
    "lagkv": "kvtool.policies.lagkv:LagKV",
    "scissorhands": "kvtool.policies.scissorhands:Scissorhands",
    "expected-attention": "kvtool.policies.expected_attention:ExpectedAttention",
    "capacity": "kvtool.policies.capacity:Capacity",
    "capkv": "kvtool.policies.capkv:CapKV",
    "capkv-paper": "kvtool.policies.capkv:CapKVPaper",
    "jacap": "kvtool.policies.jacap:Jacap",
    "oracle-mass": "kvtool.policies.oracle_mass:OracleMass",
    "oracle-caote": "kvtool.policies.oracle_caote:OracleCAOTE",
}

# What `all` stands for: `capacity` without parameters is `jacap` once more.
ALL: tuple[str, ...] = tuple(name for name in BUILT_IN if name != "capacity")

# Methods that pick other tokens for every query: nothing leaves the cache, so there is no
# evict_step and no replay. They are refused by name rather than called unknown.
NOT_EVICTION = ("quest", "infllm", "retrieval-attention", "sparq", "magicpig", "double-sparsity", "loki")


def policy_from_text(text: str) -> tuple[str, Policy]:
    """`name:key=value,…` or `file.py:Class:key=value,…` -> (name, policy).

    Raises:
        KvtoolError: `policy-unknown`, `policy-parameter` or `not-eviction`.
    """
    spec = split_spec(text)
    if spec.name.lower() in NOT_EVICTION:
        raise KvtoolError(
            "not-eviction",
            f"{spec.name} re-selects tokens for every query and evicts nothing, so it cannot be replayed",
        )
    cls = load_class(spec.name, BUILT_IN, "policy")
    policy = configure(cls, spec)
    if not isinstance(policy, Policy):
        raise KvtoolError("policy-unknown", f"{spec.name} is not a subclass of kvtool.policies.Policy")
    return spec.name, policy
