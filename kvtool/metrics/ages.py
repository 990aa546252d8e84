"""Ages: how old the tokens were that an event found, and those that it left. Rows are the unit throughout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.metrics.age_statistics import STATISTICS, Held, by_powers, lifetimes
from kvtool.metrics.cache_size import leaving_steps
from kvtool.metrics.metric import Column
from kvtool.metrics.survival import Rows, Survival
from kvtool.retained import RetainedSet

FROZEN_AFTER = 4
MOST_EVENTS = 64  # of a cell that get entries of their own
MOST_ROWS = 1 << 21  # of all caches that are looked at together
PARTS = ("prompt", "decode")


def _age_columns() -> tuple[Column, ...]:
    found = []
    for prefix, whose in (("pool", "candidates before the event"), ("kept", "candidates that the event kept")):
        found.append(Column(f"{prefix}_tokens", "kv_head", "tokens", "none", f"number of {whose}"))
        found += [
            Column(f"{prefix}_age_{s}", "kv_head", "rows", "none", f"age of the {whose}: {s}") for s in STATISTICS
        ]
        found.append(
            Column(f"{prefix}_age_histogram", "kv_head", "tokens", "none", f"{whose} by age; bin b: 2^b to 2^(b+1) - 1")
        )
    for part, words in (
        ("sinks", "the first rows of the sequence"),
        ("window", "the newest rows, sinks excepted"),
        ("flexible", "everything else: what the policy chose"),
    ):
        found.append(Column(f"kept_{part}_share", "kv_head", "share of kept_tokens", "none", words))
    found.append(
        Column("turnover", "kv_head", "share of candidates", "none", "evicted by the event; at the end by all events")
    )
    found.append(Column("turnover_candidates", "kv_head", "tokens", "none", "the candidates that this is a share of"))
    found.append(
        Column("frozen", "kv_head", "yes or no", "none", f"kept flexible set unchanged for {FROZEN_AFTER} events")
    )
    for part in PARTS:
        found.append(
            Column(f"survival_{part}", "kv_head", "share", "none", f"{part} tokens alive after 1, 2, … exposures")
        )
        found.append(Column(f"survival_{part}_at_risk", "kv_head", "tokens", "none", f"{part} tokens at that exposure"))
    for end, words in (("evicted", "that eviction ended"), ("censored", "that the window or the trace ended")):
        found.append(
            Column(f"lifetime_{end}_histogram", "kv_head", "tokens", "none", f"lifetimes {words}; bins as for ages")
        )
    return tuple(found)


AGE_COLUMNS: tuple[Column, ...] = _age_columns()


def ages(
    retained: RetainedSet,
    geometry: Geometry,
    *,
    prompt_length: int,
    sinks: int,
    window: int,
    frozen_after: int = FROZEN_AFTER,
    most_events: int = MOST_EVENTS,
) -> list[dict[str, Any]]:
    """One entry per KV head and event, and per KV head one for the end of the sequence.

    Candidates are read from `evict_step`: rows before the event that are visible to its query and
    not yet evicted. Shares and `frozen` speak of the run's protection, the same for every policy;
    exposure (survival) of the protection in force at each event, which the policy may have widened.

    Args:
        sinks, window: the run's protected first and newest rows.
        most_events: of more events that many get entries, evenly spaced, the first and the last among them;
            survival and `frozen` go by all of them.

    Returns:
        Entries with `kv_head`, `event` (its step, None for the end) and the columns `AGE_COLUMNS`;
        what is undefined is None.
    """
    protection = {"prompt_length": prompt_length, "sinks": sinks, "window": window}
    return ages_of_cells([retained], geometry, **protection, frozen_after=frozen_after, most_events=most_events)[0]


def ages_of_cells(
    cells: Sequence[RetainedSet],
    geometry: Geometry,
    *,
    prompt_length: int,
    sinks: int,
    window: int,
    frozen_after: int = FROZEN_AFTER,
    most_events: int = MOST_EVENTS,
) -> list[list[dict[str, Any]]]:
    """`ages` of several cells of one layer; those with events at the same steps are looked at together."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, cell in enumerate(cells):
        alike.setdefault(tuple(event.step for event in cell.events), []).append(place)
    found: list[list[dict[str, Any]]] = [[] for _ in cells]
    for places in alike.values():
        most = max(1, MOST_ROWS // max(cells[places[0]].evict_step.numel(), 1))
        for start in range(0, len(places), most):
            some = places[start : start + most]
            told = _Together([cells[place] for place in some], geometry, prompt_length, sinks, window)
            for place, entries in zip(some, told.entries(frozen_after, most_events), strict=True):
                found[place] = entries
    return found


class _Together:
    """Cells whose events are due at the same steps: R caches, one of every KV head of every cell."""

    def __init__(
        self, cells: Sequence[RetainedSet], geometry: Geometry, prompt_length: int, sinks: int, window: int
    ) -> None:
        self._cells, self._geometry, self._tokens = cells, geometry, cells[0].tokens
        self._prompt, self._sinks, self._window = prompt_length, sinks, window
        self._evict = torch.cat([cell.evict_step for cell in cells]).numpy()  # [R, T] int32
        self._heads = cells[0].evict_step.shape[0]
        self._steps = [event.step for event in cells[0].events]

    def entries(self, frozen_after: int, most_events: int) -> list[list[dict[str, Any]]]:
        """Per cell."""
        caches, tokens, steps = len(self._evict), self._tokens, self._steps
        shown = {*evenly(steps, most_events)}
        oldest = self._geometry.first_visible(torch.tensor([*steps, tokens])).tolist()
        curves = [Survival(caches, tokens, max(len(steps), 1)) for _ in PARTS]
        unchanged = np.zeros(caches, dtype=np.int64)  # events since the kept flexible set was another one
        before: Rows | None = None
        found, left = np.zeros(caches, dtype=np.int64), np.zeros(caches, dtype=np.int64)  # of all events
        by_moment = []
        for number, (first, step) in enumerate(zip(oldest, steps, strict=False)):
            seen = self._evict[:, first:step]
            pool, kept = seen >= step, seen > step
            if len(steps) > 1:
                flexible = np.zeros(self._evict.shape, dtype=np.bool_)
                flexible[:, first:step] = kept
                flexible[:, : self._sinks] = flexible[:, max(step - self._window, 0) :] = False
                same = False if before is None else (before == flexible).all(1)
                unchanged, before = np.where(same, unchanged + 1, 0), flexible
            self._expose(curves, number, first, pool, pool & ~kept)
            candidates, stayed = pool.sum(1), kept.sum(1)
            found, left = found + candidates, left + candidates - stayed
            if step in shown:
                turnover = (candidates, candidates - stayed)
                by_moment.append(self._moment(step, first, pool, kept, turnover, unchanged >= frozen_after, curves))
        kept = self._evict[:, oldest[-1] :] >= tokens
        by_moment.append(self._moment(None, oldest[-1], kept, kept, (found, left), unchanged >= frozen_after, curves))
        return [
            [each[cache] for cache in range(start, start + self._heads) for each in by_moment]
            for start in range(0, caches, self._heads)
        ]

    def _moment(
        self,
        step: int | None,
        first: int,
        pool: Rows,
        kept: Rows,
        turnover: tuple[Rows, Rows],
        frozen: Rows,
        curves: list[Survival],
    ) -> list[dict[str, Any]]:
        """One entry per cache; `step` is None at the end."""
        there = Held(kept, first)
        before = Held(pool, first) if step is not None else there
        columns = [before.statistics("pool"), there.statistics("kept"), self._shares(there, step or self._tokens)]
        lives: list[Any] = [(None, None)] * len(pool)
        if step is None:
            lives = lifetimes(self._evict, leaving_steps(self._geometry, self._tokens).numpy())
        survived = [curve.curves() for curve in curves]
        candidates, evicted = (counts.tolist() for counts in turnover)
        return [
            {
                "kv_head": cache % self._heads,
                "event": step,
                **columns[0][cache],
                **columns[1][cache],
                **columns[2][cache],
                "turnover": evicted[cache] / candidates[cache] if candidates[cache] else None,
                "turnover_candidates": candidates[cache],
                "frozen": is_frozen,
                **{f"survival_{part}": each[cache][0] for part, each in zip(PARTS, survived, strict=True)},
                **{f"survival_{part}_at_risk": each[cache][1] for part, each in zip(PARTS, survived, strict=True)},
                "lifetime_evicted_histogram": lives[cache][0],
                "lifetime_censored_histogram": lives[cache][1],
            }
            for cache, is_frozen in enumerate(frozen.tolist())
        ]

    def _shares(self, kept: Held, step: int) -> list[dict[str, float | None]]:
        """Per cache the shares of what was kept."""
        first = kept.before(self._sinks)
        flexible = np.maximum(kept.before(step - self._window) - first, 0)
        counts = {"sinks": first, "window": kept.sizes - first - flexible, "flexible": flexible}
        each = {f"kept_{name}_share": numbers.tolist() for name, numbers in counts.items()}
        return [
            {name: numbers[cache] / count if count else None for name, numbers in each.items()}
            for cache, count in enumerate(kept.sizes.tolist())
        ]

    def _expose(self, curves: list[Survival], number: int, first: int, pool: Rows, left: Rows) -> None:
        """Tell the clocks. A token that left although it was protected (an overfull budget) was exposed too."""
        exposed = left.copy()
        for index, cell in enumerate(self._cells):
            event, mine = cell.events[number], slice(index * self._heads, (index + 1) * self._heads)
            low, high = max(event.sinks - first, 0), max(event.step - event.window - first, 0)
            exposed[mine, low:high] |= pool[mine, low:high]
        middle = min(max(self._prompt - first, 0), pool.shape[1])
        for curve, part in zip(curves, (slice(0, middle), slice(middle, None)), strict=True):
            curve.expose(first + part.start, exposed[:, part], left[:, part])


def evenly(values: Sequence[Any], most: int) -> Sequence[Any]:
    """`values`, or `most` >= 2 of them at even distances, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


def mean_over_heads(entries: Sequence[dict[str, Any]], column: str) -> float | None:
    """The mean of a `pool_…` or `kept_…` column over KV heads, each weighted by its tokens.

    Heads may keep unequal numbers of tokens, and the mean age of all tokens is what is asked for.
    """
    weight = column.split("_")[0] + "_tokens"
    known = [(entry[column], entry[weight]) for entry in entries if entry[column] is not None]
    total = sum(tokens for _, tokens in known)
    return sum(value * tokens for value, tokens in known) / total if total else None


def histogram(values: Tensor) -> list[int]:
    """Counts of integers >= 1 by powers of two: bin b holds 2^b .. 2^(b+1) - 1; no empty bin at the end."""
    return by_powers(values.numpy())
