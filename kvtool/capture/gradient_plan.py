"""Gradient plan: which steps get gradients, whose next tokens are drawn, and where the blocks lie."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from kvtool.capture.cotangents import PROBES, Probe
from kvtool.errors import KvtoolError
from kvtool.layer import Gradients

At = Literal["continuation", "prompt", "all"]
AT: tuple[At, ...] = ("continuation", "prompt", "all")


def parse_at(text: str | None) -> At:
    """`continuation` (also for None), `prompt` or `all`."""
    known: dict[str | None, At] = {None: "continuation", **{word: word for word in AT}}
    if text in known:
        return known[text]
    raise KvtoolError("usage", f"--gradients-at {text} is not continuation, prompt or all")


def parse_probe(text: str | None) -> Probe:
    """`signs` (also for None) or `tokens`."""
    known: dict[str | None, Probe] = {None: "signs", **{word: word for word in PROBES}}
    if text in known:
        return known[text]
    raise KvtoolError("usage", f"--gradient-probe {text} is not signs or tokens")


def parse_targets(text: str) -> tuple[int, int]:
    """`LO:HI`, half open."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise KvtoolError(
            "usage", f"--gradient-targets {text} is not LO:HI with LO below HI", "512:520 draws behind steps 512 to 519"
        )
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class GradientPlan:
    """What was asked for.

    Attributes:
        draws: S.
        at: which steps are evaluated.
        targets: half-open range of steps whose next token is drawn; None for all evaluated ones.
        block: evaluated steps per block; None for one block.
        seed: of the draws.
        probe: what is drawn at the logits.
    """

    draws: int
    at: At = "continuation"
    targets: tuple[int, int] | None = None
    block: int | None = None
    seed: int = 0
    probe: Probe = "signs"

    def evaluated(self, prompt_length: int, tokens: int) -> range:
        """The steps that get gradients, of a sequence of `tokens` rows."""
        first = prompt_length if self.at == "continuation" else 0
        return range(first, prompt_length if self.at == "prompt" else tokens)

    def differentiated(self, prompt_length: int) -> tuple[int, int | None]:
        """First step of the first block with targets, and the step behind the last target; None for a run's end."""
        start = self.evaluated(prompt_length, prompt_length).start
        if self.targets is None:
            return start, prompt_length if self.at == "prompt" else None
        low, high = self.targets
        return (start if self.block is None else low - (low - start) % self.block), high

    def work(self, prompt_length: int, tokens: int) -> int:
        """Tokens that go backward, all draws together."""
        return self.draws * len(self.evaluated(prompt_length, tokens))

    def drawn(self, prompt_length: int, tokens: int) -> Gradients:
        """The plan for one sequence.

        Raises:
            KvtoolError: code `usage` for targets outside its evaluated steps.
        """
        steps = self.evaluated(prompt_length, tokens)
        low, high = self.targets or (steps.start, steps.stop)
        if not steps.start <= low < high <= steps.stop:
            raise KvtoolError(
                "usage",
                f"--gradient-targets {low}:{high} reaches beyond the evaluated steps, {steps.start}:{steps.stop}",
                "choose targets inside them, or other steps with --gradients-at",
            )
        block = len(steps) if self.block is None else min(self.block, len(steps))
        return Gradients(self.draws, block, self.at, (low, high), high - low, self.seed, self.probe)
