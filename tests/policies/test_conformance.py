"""The conformance suite passes on every built-in policy, and fails on policies that break a rule."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from kvtool.policies import BUILT_IN, Policy, Protection, policy_from_text
from kvtool.testing import check_policy

VARIANTS = [
    "expected-attention:value=projected,epsilon=0.02",
    "expected-attention:exact=true,horizon=5,group=max",
    "expected-attention:covariance=false,value=none",
    "capkv:relevance=exp_dot,shift=none,exclude_first=0",
    "jacap:tau=1,ridge=relative,statistics=prompt",
    "jacap:response=full,leverage=false,ridge=0.5,exclude_first=6",
    "snapkv:window=3,kernel=7,pooling=max,order=reduce-then-pool,group=max",
    "tova:heads=kv-head,newest=competing,reducer=sum",
    "h2o:recent=0,group=sum",
    "random:mode=shared,seed=7",
    "keydiff:anchor=raw",
    "streaming-llm:sinks=0",
    "r-kv:window=3,kernel=1,threshold=-0.5,group=mean",
    "lagkv:sinks=1,lag=6",
    "lagkv:sinks=0,lag=3,ranking=false",
    "scissorhands:history=5,recent=0",
]


@pytest.mark.parametrize("text", [*BUILT_IN, *VARIANTS])
def test_built_in_policies_conform(text):
    _, policy = policy_from_text(text)
    check_policy(policy)
    assert policy == policy_from_text(text)[1]


@dataclass(frozen=True)
class Good(Policy):
    """Newest first."""

    def score(self, state: Any, view: Any) -> torch.Tensor:
        return view.tokens.to(torch.float64)


@dataclass(frozen=True)
class HalfPrecision(Good):
    def score(self, state, view):
        return view.tokens.to(torch.bfloat16)


@dataclass(frozen=True)
class PerQueryHead(Good):
    def score(self, state, view):
        return view.tokens.to(torch.float32).repeat_interleave(view.geometry.group, 0)


@dataclass(frozen=True)
class PeeksAtKeys(Good):
    def score(self, state, view):
        return view._layer.keys.sum(-1).sum(1, keepdim=True) + view.tokens.to(view.dtype)


@dataclass(frozen=True)
class AsksForTheFuture(Good):
    def score(self, state, view):
        return view.future.layer.keys.sum() + view.tokens.to(view.dtype)


@dataclass(frozen=True)
class Undecided(Good):
    def score(self, state, view):
        return torch.rand(view.tokens.shape, dtype=view.dtype)


@dataclass(frozen=True)
class Vandal(Good):
    def score(self, state, view):
        return view.keys.mul_(2).sum(-1)


@dataclass(frozen=True)
class Remembers(Good):
    seen: list = field(default_factory=list, compare=False)

    def score(self, state, view):
        self.seen.append(float(view.keys.sum()))
        return view.keys.sum(-1).double() + sum(self.seen[:-1])


@dataclass(frozen=True)
class SharesState(Good):
    def start(self, geometry):
        return {"mass": 0.0}

    def observe(self, state, view):
        state["mass"] += float(view.keys.sum())
        return state

    def score(self, state, view):
        return view.tokens.double() + state["mass"]


@dataclass(frozen=True)
class NotANumber(Good):
    def score(self, state, view):
        return view.keys.sum(-1).log()


@dataclass(frozen=True)
class CountsCalls(Good):
    def start(self, geometry):
        return 0

    def observe(self, state, view):
        return state + 1

    def score(self, state, view):
        return view.tokens.double() * (-1) ** state


@dataclass(frozen=True)
class IgnoresGaps(Good):
    def score(self, state, view):
        return view._layer.keys[:, : view.step].sum(-1)[:, -view.tokens.shape[1] :]


@dataclass(frozen=True)
class SecretHalves(Good):
    def protection(self, budget):
        return Protection(window=budget // 2)


@dataclass(frozen=True)
class UnknownNeed(Good):
    needs: ClassVar[tuple[str, ...]] = ("luck",)


@dataclass(frozen=True)
class BlindOracle(Good):
    oracle: ClassVar[bool] = True


class Undecorated(Good):
    pass


@dataclass
class NotAPolicy:
    pass


def test_a_good_policy_conforms_as_class_and_as_instance():
    assert check_policy(Good) is None
    assert check_policy(Good()) is None


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (HalfPrecision, "float16 scores, expected float32 or float64"),
        (PerQueryHead, r"expected \[2, "),
        (PeeksAtKeys, "reads the future"),
        (AsksForTheFuture, "does not declare oracle"),
        (Undecided, "asked again"),
        (Vandal, "changed what it was shown"),
        (Remembers, "asked again"),
        (SharesState, "changes a state in place"),
        (NotANumber, "gives NaN at KV head 0"),
        (CountsCalls, "observed in two runs"),
        (IgnoresGaps, "slots of evicted tokens|NaN on a cache with gaps"),
        (SecretHalves, "declare nested = False"),
        (UnknownNeed, "luck"),
        (BlindOracle, "without queries after the event"),
        (Undecorated, "of its own"),
        (NotAPolicy, "not a subclass"),
    ],
)
def test_a_broken_policy_is_told_which_rule_it_breaks(policy, sentence):
    with pytest.raises(AssertionError, match=sentence) as caught:
        check_policy(policy)
    assert policy.__name__ in str(caught.value)
