"""Choose: what one event keeps, once a policy's state is known. Heads may hold caches of different lengths."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.layer import Layer
from kvtool.policies import Policy, Protection
from kvtool.replay.ask import diagnoses_of, refined_scores, scores_with
from kvtool.replay.rows import by_length
from kvtool.retained import DEADLINE, FACTORISATION
from kvtool.selection import NaNScore, Ranking, Selection, cut, rank, select_pages
from kvtool.view import View


@dataclass(frozen=True, eq=False)
class Scored:
    """A policy's answer about caches that hold the same number of tokens in every head.

    Attributes:
        view: what was scored.
        heads: the KV heads that the answer is for; the others only fill the view.
        scores: [Hk, N].
        diagnostics: name -> [H].
        state: the policy's, at the event.
        rankings: the order of the candidates by the protection that it was made with: one for all budgets, while
            neither scores nor protection depend on the budget.
    """

    view: View
    heads: list[int]
    scores: Tensor
    diagnostics: dict[str, Tensor]
    state: Any = None
    rankings: dict[Protection, Ranking] = field(default_factory=dict, repr=False)

    def ranked(self, label: str, shield: Protection) -> Ranking:
        """The order of the candidates under `shield`.

        Raises:
            KvtoolError: `policy-broken` for NaN.
        """
        if shield not in self.rankings:
            self.rankings[shield] = ranked(label, self.scores, self.view, shield)
        return self.rankings[shield]


@dataclass(frozen=True, eq=False)
class Answer:
    """Scores of all caches at one event, and what they cost."""

    state: Any
    scored: list[Scored]
    seconds: dict[str, float]
    elapsed: float
    temporary_bytes: int | None


@dataclass(frozen=True, eq=False)
class First:
    """What the tracks of one policy share: until its first event every cache is untouched.

    Attributes:
        answers: step -> the scores at a first event there.
        shields: what the policy protects itself at its first event, by budget.
        shared: see `View.shared`.
        candidates: step -> [Hk, N] rows of an untouched cache there: one tensor for all budgets.
    """

    answers: dict[int, Answer] = field(default_factory=dict)
    shields: list[Protection] = field(default_factory=list)
    shared: dict[Any, Any] = field(default_factory=dict)
    candidates: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Choice:
    """What an event keeps.

    Attributes:
        keep: per KV head [N_h] bool over its candidates.
        achieved, ties, fallback: [Hk] int64; margin, relative_margin: [Hk] float64; near: as in `Event`.
        ranking: [Hk, N], None where heads hold caches of different lengths.
        diagnostics: name -> [H].
    """

    keep: list[Tensor]
    achieved: Tensor
    ties: Tensor
    margin: Tensor
    relative_margin: Tensor
    near: list[Tensor]
    overfull: bool
    fallback: Tensor
    ranking: Tensor | None
    diagnostics: dict[str, Tensor]


def score_caches(
    label: str,
    policy: Policy,
    layer: Layer,
    state: Any,
    rows: Many[Tensor],
    step: int,
    ahead: Tensor | None,
    shared: dict[Any, Any] | None = None,
) -> list[Scored]:
    """Scores of the candidates `rows` [N_h] of every KV head, ascending.

    Where a layer's window cut the heads' caches to different lengths, the policy is asked once per length. The
    heads of another length are filled with the tokens of one that has it, and what is said of them is dropped:
    a policy scores each KV head by itself, or gives all heads the same tokens. `shared` is that of `View`, if any.
    """
    found, common = [], {} if shared is None else shared
    for heads, tokens in by_length(rows):
        view = View(layer, step, tokens, step, torch.full_like(tokens, layer.tokens), ahead, shared=common)
        scores = scores_with(label, policy, layer, view, state)
        found.append(Scored(view, heads, scores, diagnoses_of(label, policy, layer, view, state), state))
    return found


def choose(
    label: str,
    policy: Policy,
    layer: Layer,
    scored: Many[Scored],
    allowed: Many[int],
    shield: Protection,
    *,
    block: int = 1,
    window_on_failure: bool = False,
) -> Choice:
    """Cut at `allowed` tokens per KV head.

    Args:
        block: tokens per page; above 1 whole pages leave, the same in all heads.
        window_on_failure: heads in which the policy's declared fallback scored keep the newest tokens instead.

    Raises:
        KvtoolError: `policy-broken` for NaN, `usage` for pages under a selector that chooses tokens together.
    """
    heads = layer.geometry.kv_heads
    fallback = torch.zeros(heads, dtype=torch.int64)
    diagnostics: dict[str, Tensor] = {}
    selections: list[Selection | None] = [None] * heads
    near = [torch.empty(0, dtype=torch.int64)] * heads
    for answer in scored:
        # A memo of its own: budgets may share the scores, but not what a selector finds at one of them.
        view, scores = replace(answer.view, memo=dict(answer.view.memo)), answer.scores
        mine = [
            allowed[head] if head in answer.heads else min(allowed[answer.heads[0]], view.tokens.shape[1])
            for head in range(heads)
        ]
        refined = refined_scores(label, policy, layer, view, scores, mine, shield)
        if refined is not scores:
            answer = replace(answer, diagnostics=diagnoses_of(label, policy, layer, view, answer.state))
        if block > 1 and refined is not scores:
            raise KvtoolError(
                "usage",
                f"{label} chooses tokens together, so it cannot be cut into pages",
                "give it selector=one_shot, or leave --granularity out",
            )
        if window_on_failure and bool((failed := _failed(answer.diagnostics, heads)).any()):
            refined = torch.where(failed[:, None], view.tokens.to(refined.dtype), refined)
            fallback[answer.heads] = torch.where(failed, FACTORISATION, 0)[answer.heads]
        if block == 1 and refined is scores:
            selection = cut(answer.ranked(label, shield), mine, view.dtype)
        else:
            selection = _cut(label, refined, view, mine, shield, block)
        for head in answer.heads:
            selections[head] = selection
            near[head] = view.tokens[head][selection.near[head]]
        diagnostics = _merged(diagnostics, answer, layer.geometry.group)
    return _choice(selections, near, fallback, diagnostics, len(scored) == 1)


def untouched(rows: Many[Tensor]) -> Choice:
    """Everything stays, and nobody was asked: what an event does at which all fits."""
    nothing = torch.zeros(len(rows), dtype=torch.int64)
    undefined = torch.full((len(rows),), torch.nan, dtype=torch.float64)
    return Choice(
        keep=[torch.ones_like(mine, dtype=torch.bool) for mine in rows],
        achieved=torch.tensor([len(mine) for mine in rows]),
        ties=nothing,
        margin=undefined,
        relative_margin=undefined,
        near=[torch.empty(0, dtype=torch.int64) for _ in rows],
        overfull=False,
        fallback=nothing,
        ranking=None,
        diagnostics={},
    )


def newest(
    label: str, layer: Layer, rows: Many[Tensor], allowed: Many[int], shield: Protection, step: int, block: int
) -> Choice:
    """The sliding window, where the policy took too long."""
    scored = []
    for heads, tokens in by_length(rows):
        view = View(layer, step, tokens, step, torch.full_like(tokens, layer.tokens))
        scored.append(Scored(view, heads, tokens.to(torch.float64), {}))
    choice = choose(label, Policy(), layer, scored, allowed, shield, block=block)
    choice.fallback.fill_(DEADLINE)
    return choice


def ranked(label: str, scores: Tensor, view: View, shield: Protection) -> Ranking:
    """The order of the candidates, NaN blamed on the policy."""
    try:
        return rank(scores, view.tokens, sinks=shield.sinks, window=shield.window, step=view.step)
    except NaNScore as found:
        raise _nan(label, view, found) from None


def _cut(label: str, scores: Tensor, view: View, allowed: Many[int], shield: Protection, block: int) -> Selection:
    if block == 1:
        return cut(ranked(label, scores, view, shield), allowed, view.dtype)
    try:
        return select_pages(
            scores,
            view.tokens[0],
            min(allowed),
            block=block,
            sinks=shield.sinks,
            window=shield.window,
            step=view.step,
            dtype=view.dtype,
        )
    except NaNScore as found:
        raise _nan(label, view, found) from None


def _nan(label: str, view: View, found: NaNScore) -> KvtoolError:
    return KvtoolError(
        "policy-broken",
        f"{label} gave NaN at layer {view.geometry.layer}, KV head {found.head}, step {view.step}, token {found.row}",
        "scores must be numbers; -inf says evict first",
    )


def _failed(diagnostics: dict[str, Tensor], heads: int) -> Tensor:
    """[Hk] bool: in which KV heads a policy could not factor a matrix."""
    said = diagnostics.get("fallback")
    return torch.zeros(heads, dtype=torch.bool) if said is None else (said > 0).view(heads, -1).any(1)


def _merged(known: dict[str, Tensor], answer: Scored, group: int) -> dict[str, Tensor]:
    """`known` with what the answer says of its own heads; NaN where nothing is said."""
    query_heads = [head * group + index for head in answer.heads for index in range(group)]
    merged = dict(known)
    for name, values in answer.diagnostics.items():
        whole = merged.get(name)
        whole = torch.full(values.shape, torch.nan, dtype=torch.float64) if whole is None else whole.clone()
        whole[query_heads] = values[query_heads].to(torch.float64)
        merged[name] = whole
    return merged


def _choice(
    selections: Many[Selection | None], near: list[Tensor], fallback: Tensor, diagnostics: dict[str, Tensor], even: bool
) -> Choice:
    found = [selection for selection in selections if selection is not None]
    assert len(found) == len(selections), "a KV head without an answer"

    def each(name: str) -> Any:
        return getattr(found[0], name) if even else torch.stack([getattr(s, name)[h] for h, s in enumerate(found)])

    return Choice(
        keep=[selection.keep[head] for head, selection in enumerate(found)],
        achieved=each("achieved"),
        ties=each("ties"),
        margin=each("margin"),
        relative_margin=each("relative_margin"),
        near=near,
        overfull=any(selection.overfull for selection in found),
        fallback=fallback,
        ranking=found[0].ranking if even else None,
        diagnostics=diagnostics,
    )
