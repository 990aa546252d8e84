"""Path: the way from CapKV to JaCap, one choice at a time."""

from __future__ import annotations

from kvtool.ablate.design import Variant
from kvtool.policies import policy_from_text
from kvtool.registry import spell

_SOFTMAX = "capkv:relevance=softmax,tau=1"

# (what changed, the policy then). Every step changes one choice; the last two lines are one policy set differently.
STEPS: tuple[tuple[str, str], ...] = (
    ("capkv", "capkv"),
    ("weights from softmax attention", _SOFTMAX),
    ("+ sensitivity a(1 - a)", f"{_SOFTMAX},sensitivity=saturating"),
    ("+ response to the queries' spread", f"{_SOFTMAX},sensitivity=saturating,response=diagonal"),
    ("- first tokens set apart: jacap at tau=1", "jacap:tau=1"),
    ("tau=10: jacap", "jacap"),
)

# Known policies that stand beside a study for scale.
BESIDE = ("jacap", "capkv", "snapkv", "random", "oracle-mass")


def capkv_to_jacap() -> list[tuple[str, Variant]]:
    """(what changed, the policy then)."""
    return [(said, named(text)) for said, text in STEPS]


def named(text: str) -> Variant:
    """A policy that is no change of the reference."""
    return Variant((), spell(*policy_from_text(text)))
