"""Axes: the choices inside a capacity policy, and the levels of each that a study tries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtool.errors import KvtoolError
from kvtool.registry import did_you_mean


@dataclass(frozen=True, eq=False)
class Level:
    """One choice on an axis.

    Attributes:
        parameters: of the policy, as they are typed. A reference that has all of them is at this level.
        along: parameters that always join, since their meaning is another at this level.
        beside: parameters that join only where the policy refuses the level without them.
        protected: share of the tokens before the event that the run protects; None leaves the run's own.
    """

    parameters: Mapping[str, str] = field(default_factory=dict)
    along: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    protected: str | None = None

    @property
    def name(self) -> str:
        if self.protected is not None:
            return f"protect {self.protected} %"
        return ",".join(f"{key}={value}" for key, value in self.sets.items())

    @property
    def sets(self) -> dict[str, str]:
        """All parameters that the level sets wherever it is tried."""
        return {**self.parameters, **self.along}


@dataclass(frozen=True, eq=False)
class Axis:
    """One choice that the makers of a policy had.

    Attributes:
        question: what is asked, in a few words.
        levels: in the order in which they stand in for the reference's own: the first that differs from it is
            the axis's first alternative.
        paired: whether its first alternative is tried together with that of every other paired axis.
        when: parameter -> values; the axis acts only in policies that have one of them.
    """

    name: str
    question: str
    levels: tuple[Level, ...]
    paired: bool = False
    when: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _choices(key: str, *values: str) -> tuple[Level, ...]:
    return tuple(Level({key: value}) for value in values)


# Its first alternative is tried together with every level of every axis: how flat attention is taken to be
# decides how much everything else can matter.
COMPANION = "temperature"
PROTECTION = "protection"

AXES: tuple[Axis, ...] = (
    Axis(COMPANION, "how sharp attention at the expected query is", _choices("tau", "1", "10", "0.5", "2", "5"), True),
    Axis(
        "relevance",
        "what a token's weight starts from",
        (
            Level({"relevance": "softmax"}, along={"tau": "1"}),
            Level({"relevance": "exp_cosine"}, along={"tau": "5"}, beside={"sensitivity": "none"}),
            Level({"relevance": "exp_dot"}, along={"tau": "1"}, beside={"sensitivity": "none"}),
            Level({"relevance": "ones"}, along={"tau": "1"}, beside={"sensitivity": "none"}),
        ),
        True,
    ),
    Axis(
        "sensitivity",
        "whether attention that cannot grow or shrink counts less",
        (
            Level({"sensitivity": "none"}),
            Level({"sensitivity": "saturating"}, beside={"relevance": "softmax", "tau": "1"}),
        ),
        True,
    ),
    Axis(
        "response", "how a token's logit spreads over queries", _choices("response", "none", "full", "diagonal"), True
    ),
    Axis(
        "competition",
        "whether shifts common to all logits cancel",
        _choices("competition", "centred", "diagonal"),
        True,
    ),
    Axis(
        "directions",
        "what a token adds to: values or outputs",
        _choices("directions", "outputs", "fisher", "values"),
        True,
    ),
    Axis("leverage", "whether redundant values count less", _choices("leverage", "false", "true"), True),
    Axis("ridge", "how much noise leverage is held against", _choices("ridge", "relative", "identity", "0.01"), True),
    Axis(
        "statistics",
        "which past queries stand for the future ones",
        _choices("statistics", "window:256", "ema:0.99", "prompt", "mixture:4", "rope_mean"),
        True,
    ),
    Axis(
        "selector",
        "tokens chosen at once, or one after the other",
        _choices("selector", "greedy", "two_pass", "one_shot"),
        True,
    ),
    Axis(
        "blend",
        "whether measured attention or damage joins the weights",
        (
            Level({"blend": "0.5", "floor": "history"}),
            Level({"blend": "0.5", "floor": "leave_one_out"}),
            Level({"blend": "1"}),
        ),
        True,
    ),
    Axis("group", "how query heads that share keys agree", _choices("group", "max", "mean")),
    Axis("group-stage", "whether they agree on scores or on weights", _choices("group_stage", "weight", "score")),
    Axis("first-queries", "first queries left out of the statistics", _choices("exclude_statistics", "0", "4")),
    Axis("first-tokens", "first tokens left out and protected", _choices("exclude_first", "4", "0")),
    Axis("weight-eps", "a constant added to the weights in the Gram matrix", _choices("weight_eps", "1e-6", "0")),
    Axis(
        "shift",
        "whether the largest exponent is subtracted",
        _choices("shift", "none", "max"),
        when={"relevance": ("exp_dot", "exp_cosine")},
    ),
    Axis(
        PROTECTION,
        "share of the tokens that no policy may evict",
        (Level(protected="5"), Level(protected="10"), Level(protected="0")),
        True,
    ),
)


def choose(names: str | None) -> tuple[Axis, ...]:
    """The axes that a comma-separated list names, in the order of AXES; None is all.

    Raises:
        KvtoolError: code `usage` listing the axes.
    """
    if names is None:
        return AXES
    known = {axis.name: axis for axis in AXES}
    words = [word.strip() for word in names.split(",") if word.strip()]
    if not words:
        raise KvtoolError("usage", f"--axes {names!r} names no axis", "known: " + ", ".join(known))
    for word in words:
        if word not in known:
            raise KvtoolError("usage", f"there is no axis {word!r}", did_you_mean(word, list(known)))
    return tuple(axis for axis in AXES if axis.name in words)
