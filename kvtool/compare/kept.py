"""Kept: how far the retained sets of two runs overlap, head by head."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvtool.errors import KvtoolError


@dataclass(frozen=True, eq=False)
class HeadSets:
    """What two runs did to one KV head of one layer of one sequence.

    Attributes:
        a, b: [T] int32 `evict_step`; token p is retained for query t iff p <= t < evict_step[p], T means never evicted.
        prompt_length: rows of the prompt, None where unknown.
        evaluated_from: the first evaluated step, that of the run's first event.
        last_event: step of the last event of either run; None takes the last step at which something left, at
            least `evaluated_from`. Tokens from it on were never candidates.
        oldest: the oldest row that the query of the last event sees; above 0 on windowed layers. Older rows may never
            have been candidates, and nothing reads them any more.
    """

    sequence: int
    layer: int
    kv_head: int
    a: Tensor
    b: Tensor
    prompt_length: int | None
    evaluated_from: int
    last_event: int | None = None
    oldest: int = 0

    def __post_init__(self) -> None:
        if self.a.ndim != 1 or self.a.shape != self.b.shape:
            raise KvtoolError(
                "shape",
                f"evict_step of sequence {self.sequence}, layer {self.layer}, KV head {self.kv_head} has "
                f"{self.a.numel()} tokens on one side and {self.b.numel()} on the other",
                "only runs of equally long sequences have kept sets to compare",
            )

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.a.shape[0])

    @property
    def differs(self) -> bool:
        """Whether any token left at another step."""
        return not torch.equal(self.a, self.b)

    def kept(self) -> tuple[Tensor, Tensor]:
        """Of each side [T] bool: the candidates that are still retained behind the last event."""
        last = self.last_event
        if last is None:
            gone = [side[side < self.tokens] for side in (self.a, self.b)]
            last = max([self.evaluated_from, *(int(steps.max()) for steps in gone if steps.numel())])
        rows = torch.arange(self.tokens)
        candidate = (rows < last) & (rows >= self.oldest)
        return (self.a == self.tokens) & candidate, (self.b == self.tokens) & candidate


@dataclass(frozen=True)
class _Overlap:
    head: HeadSets
    jaccard: float
    kept_a: int
    kept_b: int
    moved: int


def _overlap(head: HeadSets) -> _Overlap:
    a, b = head.kept()
    both, either = int((a & b).sum()), int((a | b).sum())
    return _Overlap(head, both / either if either else 1.0, int(a.sum()), int(b.sum()), either - both)


def overlap(heads: Sequence[HeadSets]) -> dict[str, Any] | None:
    """Overlap of the kept sets; None without a head.

    The sets are those behind the last event, candidates only: what can be read by every later query. The Jaccard
    index is |A and B| / |A or B|, 1 where both are empty.

    Returns:
        `jaccard` (mean over heads of all sequences), `jaccard_min`, `worst` (sequence, layer and KV head of the
        smallest; the first of equals), `kept_a`, `kept_b` (tokens a head keeps, mean), `by_layer` (`layer`, `jaccard`,
        `jaccard_min`, and `moved_tokens`, tokens in one of the two sets only, summed over heads and sequences),
        `heads`, and `heads_moved`, heads in which a token left at another step, whatever is left in the end.
    """
    if not heads:
        return None
    found = [_overlap(head) for head in heads]
    layers: dict[int, list[_Overlap]] = defaultdict(list)
    for one in found:
        layers[one.head.layer].append(one)
    worst = min(found, key=lambda one: one.jaccard)
    return {
        "jaccard": fmean(one.jaccard for one in found),
        "jaccard_min": worst.jaccard,
        "worst": {
            "sequence": worst.head.sequence,
            "layer": worst.head.layer,
            "kv_head": worst.head.kv_head,
            "jaccard": worst.jaccard,
        },
        "kept_a": fmean(one.kept_a for one in found),
        "kept_b": fmean(one.kept_b for one in found),
        "by_layer": [
            {
                "layer": layer,
                "jaccard": fmean(one.jaccard for one in of_layer),
                "jaccard_min": min(one.jaccard for one in of_layer),
                "moved_tokens": sum(one.moved for one in of_layer),
            }
            for layer, of_layer in sorted(layers.items())
        ],
        "heads": len(found),
        "heads_moved": sum(head.differs for head in heads),
    }
