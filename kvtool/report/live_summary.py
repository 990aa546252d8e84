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
    """All policies at one ratio or budget, the least measured KL first; `full` closes the list."""

    ratio: float | None
    budget: int | None
    cells: list[dict[str, Any]]

    @property
    def asked(self) -> str:
        return asked(self.ratio, self.budget)


def live_sections(result: Result) -> list[LiveSection]:
    """One section per ratio or budget, in the order asked; means over sequences."""
    grouped: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for cell in result.entries("cells"):
        if cell["sequence"] is None:
            grouped[cell["ratio"], cell["budget"]].append(cell)
    return [LiveSection(ratio, budget, sorted(cells, key=_place)) for (ratio, budget), cells in grouped.items()]


def _place(cell: dict[str, Any]) -> tuple[bool, bool, float]:
    """The whole cache last, what could not be measured before it."""
    kl = cell["measured_kl"]
    return cell["policy"] == "full", kl is None, 0.0 if kl is None else kl


def live_verdicts(result: Result) -> list[str]:
    """One sentence per ratio: which policy changes the model's predictions least."""
    said = []
    for section in live_sections(result):
        known = [c for c in section.cells if c["measured_kl"] is not None]
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
            cell = row["sequence"], row["policy"], row["ratio"], row["budget"]
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
