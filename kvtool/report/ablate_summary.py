"""Summary of a study: what the terminal says about it, as plain values that tests can read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvtool.result import Result

SHOWN_INTERACTIONS = 8


@dataclass(frozen=True, eq=False)
class Block:
    """A study at one ratio, in the metric that orders it.

    Attributes:
        effects: levels that keep other tokens than the reference, largest effect first; each with `overlap`.
        idle: levels that keep exactly the reference's tokens.
        steps: the path from CapKV to JaCap.
        interactions: largest first.
        cells: means over sequences of the reference, variants, path and policies beside.
    """

    ratio: float
    metric: str
    effects: list[dict[str, Any]]
    idle: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    interactions: list[dict[str, Any]]
    cells: list[dict[str, Any]]

    @property
    def reference(self) -> dict[str, Any]:
        return next(cell for cell in self.cells if cell["kind"] == "reference")

    @property
    def digits(self) -> int:
        """Decimals that show three digits of the reference's number, at least 4."""
        size = self.reference[self.metric]
        return max(4, 2 - math.floor(math.log10(size))) if size > 0 else 4

    @property
    def best(self) -> dict[str, Any]:
        """The variant with the least error under the run's own protection; of equals the least changed."""
        tried = [c for c in self.cells if c["kind"] in ("reference", "single", "pair") and c["protected"] is None]
        return min(tried, key=lambda cell: cell[self.metric])

    @property
    def beside(self) -> list[dict[str, Any]]:
        """Known policies, the reference and the best variant, least error first; each policy once."""
        named = [self.reference, self.best, *(cell for cell in self.cells if cell["kind"] == "beside")]
        once = {cell["policy"]: cell for cell in named}
        return sorted(once.values(), key=lambda cell: cell[self.metric])


def blocks(result: Result) -> list[Block]:
    """One block per ratio, in the order asked."""
    metric = result.manifest["ablate"]["metric"]
    cells = [cell for cell in result.entries("cells") if cell["sequence"] is None]
    effects, pairs = result.entries("effects"), result.entries("interactions")
    found = []
    for ratio in dict.fromkeys(cell["ratio"] for cell in cells):
        here = [cell for cell in cells if cell["ratio"] == ratio]
        overlap = {cell["changes"][0]: cell["overlap"] for cell in here if cell["kind"] == "single"}
        mine = [e for e in effects if e["ratio"] == ratio and e["metric"] == metric]
        levels = [{**e, "overlap": overlap[e["level"]]} for e in mine if e["kind"] == "level"]
        found.append(
            Block(
                ratio,
                metric,
                [e for e in levels if e["effect"] or e["overlap"] < 1],
                [e for e in levels if not e["effect"] and e["overlap"] == 1],
                [e for e in mine if e["kind"] == "step"],
                [p for p in pairs if p["ratio"] == ratio and p["metric"] == metric],
                here,
            )
        )
    return found


def number(value: float | None, digits: int, sign: bool = False) -> str:
    """With `digits` decimals; never a negative zero."""
    if value is None:
        return "-"
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        return text.lstrip("-")
    return f"+{text}" if sign and value > 0 else text


def sure(entry: dict[str, Any]) -> bool:
    """Whether the interval leaves out 0."""
    return entry["low"] is not None and (entry["low"] > 0 or entry["high"] < 0)


def verdicts(block: Block) -> list[str]:
    """What the study found, most important first; the first sentence names the axis with the largest effect."""
    metric, digits = block.metric, block.digits
    if not block.effects:
        return [f"ratio {block.ratio:g}: no axis changes which tokens stay"]
    first = block.effects[0]
    said = [f"ratio {block.ratio:g}: {first['axis']} changes most: {_effect(first, metric, digits)}"]
    own = next((e for e in block.effects if e["axis"] != "protection"), None)
    if own is not None and own is not first:
        said.append(f"of the policy's own choices {own['axis']} changes most: {_effect(own, metric, digits)}")
    best, reference = block.best, block.reference
    if best["kind"] != "reference":
        others = [c for c in block.cells if c["kind"] == "beside" and c["policy"] == "snapkv"]
        beside = "".join(f"; {c['policy']} {number(c[metric], digits)}" for c in others)
        said.append(
            f"best tried: {best['policy']} {number(best[metric], digits)}, "
            f"the reference {reference['policy']} {number(reference[metric], digits)}{beside}"
        )
    else:
        said.append(f"no change tried beats the reference {best['policy']} ({number(best[metric], digits)})")
    if block.interactions and block.interactions[0]["interaction"]:
        pair = block.interactions[0]
        said.append(
            f"strongest interaction: {pair['level_b']} does {number(pair['b_alone'], digits, True)} alone and "
            f"{number(pair['b_with_a'], digits, True)} with {pair['level_a']}"
        )
    return said


def _effect(entry: dict[str, Any], metric: str, digits: int) -> str:
    verb = "lowers" if entry["effect"] < 0 else "raises"
    unit = " nats per step" if metric == "predicted_kl" else ""
    mean = f" (mean of {entry['contexts']} contexts)" if entry["contexts"] > 1 else ""
    doubt = "; its interval holds 0" if entry["low"] is not None and not sure(entry) else ""
    return (
        f"{entry['level']} instead of {entry['instead_of']} {verb} {metric} by {number(abs(entry['effect']), digits)}"
        f"{unit}{mean}, at the reference from {number(entry['without'], digits)} to "
        f"{number(entry['with'], digits)}{doubt}"
    )


def caveats(result: Result) -> list[str]:
    """What the intervals are, and what the numbers leave out."""
    study = result.manifest["ablate"]
    count = result.manifest["sequences"]["count"]
    if study["paired_over"] == "layers":
        layers = len(result.manifest["layers"]["ids"])
        said = [
            f"One sequence: 95 % intervals pair its {layers} layers. They say how alike the layers are, "
            "not what another text would give."
        ]
    else:
        said = [f"95 % intervals pair the {count} sequences (Student t)."]
        if count < 5:
            said[0] += " So few make them wide: capture more texts to narrow them."
    cell = next(c for c in result.entries("cells") if c["sequence"] is None)
    partial = cell.get("predicted_kl_partial")
    if study["metric"] == "predicted_kl" and partial:
        said.append(f"predicted_kl is partial: {partial}.")
    elif partial and "predicted_kl" not in study["metrics"]:
        said.append(f"Ordered by {study['metric']}, which weighs all layers alike; no predicted KL: {partial}.")
    said.append("Open loop: queries come from the full-cache run, so errors do not reach later layers or steps.")
    return said


def best_variant(result: Result) -> str | None:
    """The best variant of the first ratio as it may be typed; None where it is the reference."""
    best = blocks(result)[0].best
    return None if best["kind"] == "reference" else str(best["policy"])
