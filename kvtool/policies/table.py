"""The built-in policies, and how a command-line word becomes one, of kvtool's or of another package."""

from __future__ import annotations

from kvtool.errors import KvtoolError
from kvtool.policies.policy import Policy
from kvtool.registry import split_spec
from kvtool.shelf import Shelf

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


# What replay asks of every policy before it sees a trace; properties may fail.
TRAITS = ("oracle", "nested", "keeps_all", "positions", "needs", "calibration_trace")

SHELF = Shelf("policy", BUILT_IN, dict.fromkeys(NOT_EVICTION, "a method of that name evicts nothing"))


def policy_from_text(text: str, *, own: bool = False) -> tuple[str, Policy]:
    """`name:key=value,…` or `file.py:Class:…` -> (name, policy).

    Args:
        own: the name means kvtool's own policy, whoever else gives it.

    Raises:
        KvtoolError: `policy-unknown`, `policy-parameter`, `policy-broken`, `not-eviction`, `plugin-broken` or
            `plugin-twice`.
    """
    spec = split_spec(text)
    if spec.name.lower() in NOT_EVICTION:
        raise KvtoolError(
            "not-eviction",
            f"{spec.name} re-selects tokens for every query and evicts nothing, so it cannot be replayed",
        )
    policy: Policy = SHELF.made(spec, Policy, own=own)
    for trait in TRAITS:
        try:
            getattr(policy, trait)
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())
            raise KvtoolError("policy-broken", f"{spec.name} does not say its {trait}: {words}") from error
    return spec.name, policy
