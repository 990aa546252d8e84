"""Scene: what a construction asks for, in words that say nothing of heads, noise or storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

SINK = "sink"  # row 0, in every scene


@dataclass(frozen=True)
class Size:
    """How large the sequence is.

    Attributes:
        prompt, steps: rows of the prompt, and behind it.
        depth: of what the scene hides, as a share of the prompt; only some scenes read it.
    """

    prompt: int
    steps: int
    depth: float = 0.5

    @property
    def tokens(self) -> int:
        """T."""
        return self.prompt + self.steps

    def row(self, depth: float) -> int:
        """The row at `depth` (0 to 1) of the prompt; the first 8 rows stay free, the sink is among them."""
        return max(8, round(depth * (self.prompt - 1)))

    def passage(self, depth: float, share: int = 16) -> list[int]:
        """Consecutive rows of the prompt from `depth` on, one in `share` of the prompt's."""
        first = self.row(depth)
        return list(range(first, first + self.prompt // share))


@dataclass(frozen=True, eq=False)
class Group:
    """Rows that are alike.

    Attributes:
        rows: ascending.
        channels: named content channel -> coefficient of the rows' un-rotated keys.
        plain: these keys lack what all others share: the common component, the rotated part, noise.
        value: value channel -> what it holds; None for background values.
        spread: standard deviation of the value's other channels.
    """

    rows: list[int]
    channels: Mapping[str, float]
    plain: bool = False
    value: Mapping[int, float] | None = None
    spread: float = 0.05


@dataclass(frozen=True, eq=False)
class Wish:
    """Attention that groups shall get from the queries of steps start..stop-1, every query head.

    The query's coefficients on `channels` are solved for: as many channels as groups, and the groups'
    coefficients on them an invertible matrix.

    Attributes:
        shares: group -> its share of attention at each step, [stop - start] or one number; together below 1.
    """

    start: int
    stop: int
    channels: tuple[str, ...]
    shares: Mapping[str, float | Tensor]


@dataclass(frozen=True, eq=False)
class Scene:
    """One construction at one size.

    Attributes:
        answer: what a sound cache must keep, and why, in a sentence.
        landmarks: name -> ascending rows, the ones the answer speaks of.
        groups: name -> rows that are no background. The sink is added where it is not among them.
        queries: channel -> coefficient [T] of the queries of every step; 0 where not named.
        wishes: solved last, on top of everything else.
        sink: attention of the sink among all that is not wished for.
        at_least: channel -> (group, share): one constant coefficient, so that the group gets at least that share of
            every query that sees it.
    """

    answer: str
    landmarks: Mapping[str, list[int]]
    groups: Mapping[str, Group]
    queries: Mapping[str, Tensor] = field(default_factory=dict)
    wishes: tuple[Wish, ...] = ()
    sink: float = 0.35
    at_least: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    locality: float = 4.0
