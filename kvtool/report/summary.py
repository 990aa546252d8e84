"""Summary: what the terminal says about a replay, as plain values that tests can read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from kvtool.result import Result
from kvtool.words import asked

CONTROLS = ("full", "random")


@dataclass(frozen=True)
class Line:
    """One policy at one ratio or budget, averaged over sequences.

    Attributes:
        rank: the ordering metric, or None where it is undefined.
        kl, kl_se, kl_w32: predicted KL in nats per step, its standard error over draws, and with windows of 32
            steps; None where there are no gradients.
        error: `mean_layer_error`, or `mean_output_error` without output projections.
        low, high: smallest and largest error of a layer (the spread).
        worst: (layer, query head, output_error) of the worst head, or None.
        no_effect: eviction was asked for and none happened: the line is never ranked.
        window_decided: every event fell back to the sliding window: the numbers are that window's, and not ranked.
        asked: cell columns of the metrics that were asked for.
    """

    policy: str
    oracle: bool
    rank: float | None
    kl: float | None
    kl_se: float | None
    kl_w32: float | None
    error: float | None
    low: float | None
    high: float | None
    worst: tuple[int, int, float] | None
    evicted_mass: float | None
    mass_regret: float | None
    achieved: float | None
    candidates: float | None
    ties: float
    schedule: str = "prompt-end"
    events: float | None = None
    fallbacks: float | None = None
    mean_cache_tokens: float | None = None
    peak_cache_tokens: float | None = None
    peak_cache_bytes: float | None = None
    no_effect: bool = False
    window_decided: bool = False
    asked: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """All policies at one ratio or budget, best first; `full` closes the list."""

    ratio: float | None
    budget: int | None
    lines: list[Line]
    schedules: tuple[str, ...] = ()  # in the order asked

    @property
    def asked(self) -> str:
        return asked(self.ratio, self.budget)

    @property
    def best(self) -> Line | None:
        """The best policy that reads no future and is no control; None where none is measured."""
        return next((ln for ln in self.contenders if ln.rank is not None), None)

    @property
    def contenders(self) -> list[Line]:
        """Policies that could be deployed: no oracle, no control."""
        return [ln for ln in self.lines if not ln.oracle and ln.policy not in CONTROLS]

    @property
    def winner(self) -> Line | None:
        """The best contender, if it does better than random."""
        best = self.best
        random = None if best is None else self.line("random", best.schedule)
        if best is None or best.rank is None or (random and random.rank is not None and best.rank >= random.rank):
            return None
        return best

    def line(self, policy: str, schedule: str | None = None) -> Line | None:
        """The best line of that policy, under that schedule where one is named."""
        mine = (ln for ln in self.lines if ln.policy == policy and schedule in (None, ln.schedule))
        return next(mine, None)


def ordering_metric(result: Result) -> str:
    """`predicted_kl` where the trace has gradients, else the error metric."""
    known = any(
        c["predicted_kl"] is not None for c in result.entries("cells") if c["sequence"] is None and c["event"] is None
    )
    return "predicted_kl" if known else error_metric(result)


def error_metric(result: Result) -> str:
    """`mean_layer_error` where the trace has output projections, else `mean_output_error`."""
    cells = result.entries("cells")
    return "mean_layer_error" if any(c["mean_layer_error"] is not None for c in cells) else "mean_output_error"


def prediction(result: Result) -> str | None:
    """Why there is no predicted KL, or what it leaves out; None where it speaks of the whole."""
    found = next((c for c in result.entries("cells") if c["sequence"] is None and c["event"] is None), None)
    if found is None or found.get("predicted_kl_partial") is None:
        return None
    missing = found.get("predicted_kl") is None
    return f"{'No predicted KL' if missing else 'predicted_kl is partial'}: {found['predicted_kl_partial']}."


def asked_columns(result: Result) -> list[dict[str, Any]]:
    """The cell columns of the metrics that were asked for, as the manifest describes them."""
    asked = result.manifest["replay"].get("metrics", [])
    return [column for metric in asked for column in metric["columns"] if column["level"] == "cell"]


def sections(result: Result) -> list[Section]:
    """One section per ratio or budget, in the order asked."""
    order, metric = ordering_metric(result), error_metric(result)
    further = [column["name"] for column in asked_columns(result)]
    rows: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for row in result.entries("rows"):
        if row["event"] is None:
            rows[_cell_of(row)].append(row)
    layer_errors: dict[tuple, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    if metric == "mean_layer_error":
        for entry in result.entries("layers"):
            if entry["event"] is None and entry["layer_error"] is not None:
                layer_errors[_cell_of(entry)][entry["layer"]].append(entry["layer_error"])
    else:
        for key, members in rows.items():
            for row in members:
                if row["output_error"] is not None:
                    layer_errors[key][row["layer"]].append(row["output_error"])
    grouped: dict[tuple, list[Line]] = {}
    for cell in result.entries("cells"):
        if cell["sequence"] is not None or cell["event"] is not None:
            continue
        key = _cell_of(cell)
        spread = [fmean(errors) for errors in layer_errors[key].values()]
        members = rows[key]
        known = [r for r in members if r["output_error"] is not None]
        worst = max(known, key=lambda r: r["output_error"], default=None)
        line = Line(
            policy=cell["policy"],
            oracle=bool(cell["oracle"]),
            rank=None if cell["no_effect"] or cell["window_decided"] else cell[order],
            kl=cell["predicted_kl"],
            kl_se=cell["predicted_kl_se"],
            kl_w32=cell["predicted_kl_w32"],
            error=cell[metric],
            low=min(spread, default=None),
            high=max(spread, default=None),
            worst=(worst["layer"], worst["q_head"], worst["output_error"]) if worst else None,
            evicted_mass=_mean(members, "evicted_mass"),
            mass_regret=_mean(members, "mass_regret"),
            achieved=cell["achieved"],
            candidates=cell["candidates"],
            ties=cell["ties"],
            asked={name: cell[name] for name in further},
            **{
                name: cell[name] for name in ("schedule", "events", "fallbacks", "no_effect", "window_decided", *_CACHE)
            },
        )
        grouped.setdefault((cell["ratio"], cell["budget"]), []).append(line)
    return [
        Section(
            ratio,
            budget,
            sorted(lines, key=lambda ln: (ln.policy == "full", ln.rank is None, ln.rank or 0.0)),
            tuple(dict.fromkeys(ln.schedule for ln in lines)),
        )
        for (ratio, budget), lines in grouped.items()
    ]


_CACHE = ("mean_cache_tokens", "peak_cache_tokens", "peak_cache_bytes")


def repeats(result: Result) -> bool:
    """Whether some cell may have several events."""
    return "timeline" in result.tables


def _cell_of(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["policy"], entry["schedule"], entry["ratio"], entry["budget"]


def _mean(rows: list[dict[str, Any]], column: str) -> float | None:
    values = [row[column] for row in rows if row.get(column) is not None]
    return fmean(values) if values else None


def named(line: Line, several: bool) -> str:
    """The policy, and its schedule where there are several."""
    return f"{line.policy} under {line.schedule}" if several else line.policy


def _noise(line: Line, other: Line | None) -> str:
    """Words for two predicted KLs that are closer than twice the standard error of their difference.

    The draws are the same for both, so the difference is known better than this says: it errs on the careful side.
    """
    if other is None or line.kl is None or other.kl is None or line.kl_se is None or other.kl_se is None:
        return ""
    close = abs(line.kl - other.kl) < 2 * math.hypot(line.kl_se, other.kl_se)
    return " (within the noise of the draws)" if close else ""


def verdicts(result: Result) -> list[str]:
    """One sentence per ratio: which policy wins, and by how much over the runner-up and over random."""
    kl = ordering_metric(result) == "predicted_kl"
    wins = "changes predictions least, predicted KL" if kl else "keeps attention's output best, error"

    def said_of(value: float) -> str:
        return f"{value:#.3g}" if kl else f"{value:.4f}"

    said = []
    for section in sections(result):
        best = section.best
        if best is None and section.contenders and all(ln.no_effect for ln in section.contenders):
            said.append(f"{section.asked}: no policy had an effect, so nothing is ranked")
            continue
        if best is None and any(ln.window_decided for ln in section.contenders):
            said.append(f"{section.asked}: the sliding window decided every event, so no policy is ranked")
            continue
        if best is None or best.rank is None:
            said.append(f"{section.asked}: no policy besides the controls and oracles was measured")
            continue
        random = section.line("random", best.schedule)
        chance = random.rank if random else None
        several = len({ln.schedule for ln in section.lines}) > 1
        if chance is not None and section.winner is None:
            said.append(
                f"{section.asked}: no policy does better than random ({said_of(chance)}); "
                f"{named(best, several)} has {said_of(best.rank)}"
            )
            continue
        text = f"{section.asked}: {named(best, several)} {wins} {said_of(best.rank)}{' nats per step' if kl else ''}"
        if chance is not None and best.rank > 0:
            times = chance / best.rank
            text += f", {times:.1f}x below random" if times >= 1.05 else ", hardly better than random"
            text += _noise(best, random)
        others = [ln for ln in section.contenders if ln.policy != best.policy and ln.rank is not None]
        if others and others[0].rank is not None:
            text += f"; next {named(others[0], several)} {said_of(others[0].rank)}{_noise(best, others[0])}"
        said.append(text)
    return said
