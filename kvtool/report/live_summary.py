"""Summary of a live run, as plain values that tests can read."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from kvtool.report.summary import CONTROLS
from kvtool.result import Result
from kvtool.words import asked


@dataclass(frozen=True)
class LiveSection:
    """All policies at one ratio or budget under one schedule, the least measured KL first; those without effect and
    `full` close the list.

    Attributes:
        alone: the run has no other schedule.
    """

    ratio: float | None
    budget: int | None
    schedule: str
    cells: list[dict[str, Any]]
    alone: bool = True

    @property
    def key(self) -> tuple[float | None, int | None, str]:
        return self.ratio, self.budget, self.schedule

    @property
    def asked(self) -> str:
        return asked(self.ratio, self.budget) + ("" if self.alone else f", {self.schedule}")


def live_sections(result: Result) -> list[LiveSection]:
    """One section per ratio or budget and schedule, in the order asked; means over sequences."""
    grouped: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for cell in result.entries("cells"):
        if cell["sequence"] is None:
            grouped[cell["ratio"], cell["budget"], cell["schedule"]].append(cell)
    alone = len({schedule for _, _, schedule in grouped}) == 1
    return [
        LiveSection(ratio, budget, schedule, sorted(cells, key=_place), alone)
        for (ratio, budget, schedule), cells in grouped.items()
    ]


def _place(cell: dict[str, Any]) -> tuple[bool, bool, bool, float]:
    """The whole cache last, before it what evicted nothing, before that what could not be measured."""
    kl = cell["measured_kl"]
    return cell["policy"] == "full", cell["no_effect"], kl is None, 0.0 if kl is None else kl


def live_verdicts(result: Result) -> list[str]:
    """One sentence per ratio: which policy changes the model's predictions least."""
    said = []
    for section in live_sections(result):
        known = [c for c in section.cells if c["measured_kl"] is not None and not c["no_effect"]]
        if all(c["no_effect"] or c["policy"] == "full" for c in section.cells):
            said.append(f"{section.asked}: no policy evicted anything, so there is nothing to compare")
            continue
        contenders = [c for c in known if not c["oracle"] and c["policy"] not in CONTROLS]
        random = next((c for c in known if c["policy"] == "random"), None)
        if not contenders:
            said.append(f"{section.asked}: no policy besides the controls and oracles was measured")
            continue
        best = contenders[0]
        if random is not None and best["measured_kl"] >= random["measured_kl"]:
            said.append(
                f"{section.asked}: no policy does better than random ({random['measured_kl']:.4g} nats); "
                f"{best['policy']} has {best['measured_kl']:.4g}"
            )
            continue
        text = (
            f"{section.asked}: {best['policy']} changes the model's predictions least, {best['measured_kl']:.4g} nats"
        )
        if random is not None and best["measured_kl"] > 0:
            text += f", {random['measured_kl'] / best['measured_kl']:.1f}x below random"
        if len(contenders) > 1:
            text += f"; next {contenders[1]['policy']} {contenders[1]['measured_kl']:.4g}"
        said.append(text)
    return said


@dataclass(frozen=True)
class Parting:
    """How far closed-loop errors of one layer are from the open-loop ones.

    Attributes:
        ratio: median over cells of closed / open error.
        deviation: largest |closed / open - 1| over cells.
    """

    layer: int
    open_error: float
    closed_error: float
    ratio: float
    deviation: float


def parting(result: Result) -> list[Parting]:
    """By layer, from the query heads' errors, over the cells that evict; empty without --layer-errors and
    --calibrate."""
    rows = result.entries("rows")
    if not rows or "output_error" not in rows[0]:
        return []
    pairs: dict[int, dict[tuple, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        known = row["output_error"] is not None and row["closed_output_error"] is not None
        if known and row["policy"] != "full":
            cell = row["sequence"], row["policy"], row["ratio"], row["budget"], row["schedule"]
            pairs[row["layer"]][cell].append((row["output_error"], row["closed_output_error"]))
    found = []
    for layer, cells in sorted(pairs.items()):
        sums = [(fmean(o for o, _ in heads), fmean(c for _, c in heads)) for heads in cells.values()]
        ratios = [closed / opened for opened, closed in sums if opened > 0]
        if ratios:
            found.append(
                Parting(
                    layer,
                    fmean(o for o, _ in sums),
                    fmean(c for _, c in sums),
                    median(ratios),
                    max(abs(ratio - 1) for ratio in ratios),
                )
            )
    return found
