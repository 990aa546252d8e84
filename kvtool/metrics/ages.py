"""Ages: how old the tokens were that an event found, and those that it left. Rows are the unit throughout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.metrics.cache_size import leaving_steps
from kvtool.metrics.metric import Column
from kvtool.metrics.survival import Rows, Survival
from kvtool.retained import Event, RetainedSet

FROZEN_AFTER = 4
MOST_EVENTS = 64  # of a cell that get entries of their own
STATISTICS = ("min", "p10", "p50", "p90", "max", "mean")


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
    for part in ("prompt", "decode"):
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
    shown = {event.step for event in evenly(retained.events, most_events)}
    oldest = geometry.first_visible(
        torch.tensor([*(event.step for event in retained.events), retained.tokens])
    ).tolist()
    leaves = leaving_steps(geometry, retained.tokens).numpy()
    entries = []
    for head, evict in enumerate(retained.evict_step.to(torch.int64).numpy()):
        curves = {"prompt": Survival(retained.tokens), "decode": Survival(retained.tokens)}
        unchanged, before = 0, None  # events since the kept flexible set was another one
        found = left = 0  # candidates and evicted tokens of all events
        for first, event in zip(oldest, [*retained.events, None], strict=True):
            step = retained.tokens if event is None else event.step
            pool = first + np.flatnonzero(evict[first:step] >= step)
            kept = pool if event is None else pool[evict[pool] > step]
            first_rows = int(np.searchsorted(kept, sinks))  # kept rows ascend
            flexible = kept[first_rows : max(first_rows, int(np.searchsorted(kept, step - window)))]
            if event is not None:
                found, left = found + pool.size, left + pool.size - kept.size
                unchanged = unchanged + 1 if before is not None and np.array_equal(before, flexible) else 0
                before = flexible
                _expose(curves, pool, evict, event, prompt_length)
                if step not in shown:
                    continue
            found_ages = _statistics(step - pool)
            kept_ages = found_ages if kept is pool else _statistics(step - kept)
            lives = _lifetimes(evict, leaves) if event is None else (None, None)
            entries.append(
                {
                    "kv_head": head,
                    "event": None if event is None else step,
                    **_prefixed("pool", found_ages),
                    **_prefixed("kept", kept_ages),
                    **_shares(kept.size, first_rows, flexible.size),
                    **(_turnover(pool.size, pool.size - kept.size) if event else _turnover(found, left)),
                    "frozen": unchanged >= frozen_after,
                    **{f"survival_{part}": curve.curve() for part, curve in curves.items()},
                    **{f"survival_{part}_at_risk": curve.at_risk for part, curve in curves.items()},
                    "lifetime_evicted_histogram": lives[0],
                    "lifetime_censored_histogram": lives[1],
                }
            )
    return entries


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
    return _by_powers(values.numpy())


def _by_powers(values: Rows) -> list[int]:
    if not values.size:
        return []
    each = np.bincount(values)
    counts: list[int] = np.add.reduceat(each, [1 << bit for bit in range((each.size - 1).bit_length())]).tolist()
    return counts


def _histogram(ascending: Rows) -> list[int]:
    if not ascending.size:
        return []
    powers = [1 << bit for bit in range(int(ascending[-1]).bit_length() + 1)]
    counts: list[int] = np.diff(np.searchsorted(ascending, powers)).tolist()
    return counts


def _statistics(descending: Rows) -> dict[str, Any]:
    """Of ages that descend, as those of ascending rows do. A pool without gaps is known by its ends."""
    size = descending.size
    if size and int(descending[0]) - int(descending[-1]) == size - 1:
        return dict(_of_run(int(descending[-1]), size))
    return _of_ages(descending[::-1])


@lru_cache(maxsize=1024)
def _of_run(youngest: int, size: int) -> Mapping[str, Any]:
    """Of `size` tokens one after another: what every cell finds at the same first event."""
    return MappingProxyType(_of_ages(np.arange(youngest, youngest + size)))


def _of_ages(age: Rows) -> dict[str, Any]:
    """Number, statistics and histogram of ascending ages."""
    values: list[Any] = [None] * len(STATISTICS)
    if age.size:
        places = [share * (age.size - 1) for share in (0.1, 0.5, 0.9)]
        mean = int(age.sum()) / age.size
        values = [int(age[0]), *(_between(age, place) for place in places), int(age[-1]), mean]
    found = {f"age_{name}": value for name, value in zip(STATISTICS, values, strict=True)}
    return {"tokens": age.size, **found, "age_histogram": _histogram(age)}


def _prefixed(prefix: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in found.items()}


def _between(ascending: Rows, place: float) -> float:
    """Linear interpolation between neighbours."""
    low = min(int(place), ascending.size - 1)
    high = min(low + 1, ascending.size - 1)
    return float(ascending[low]) + (place - low) * float(ascending[high] - ascending[low])


def _shares(count: int, first: int, flexible: int) -> dict[str, float | None]:
    parts = {"sinks": first, "window": count - first - flexible, "flexible": flexible}
    return {f"kept_{name}_share": number / count if count else None for name, number in parts.items()}


def _turnover(candidates: int, evicted: int) -> dict[str, Any]:
    return {"turnover": evicted / candidates if candidates else None, "turnover_candidates": candidates}


def _expose(curves: dict[str, Survival], pool: Rows, evict: Rows, event: Event, prompt_length: int) -> None:
    """Tell the clocks. A token that left although it was protected (an overfull budget) was exposed too."""
    left = evict[pool] == event.step
    if event.sinks or event.window:
        exposed = ((pool >= event.sinks) & (pool < event.step - event.window)) | left
        pool, left = pool[exposed], left[exposed]
    rows, gone = pool, left
    border = int(np.searchsorted(rows, prompt_length))  # rows ascend
    curves["prompt"].expose(rows[:border], gone[:border])
    curves["decode"].expose(rows[border:], gone[border:])


def _lifetimes(evict: Rows, leaves: Rows) -> tuple[list[int], list[int]]:
    """Histograms of the number of queries that saw each token, ended by eviction and otherwise."""
    by_eviction = evict < leaves
    lifetime = np.minimum(evict, leaves) - np.arange(evict.size)
    return _by_powers(lifetime[by_eviction]), _by_powers(lifetime[~by_eviction])
