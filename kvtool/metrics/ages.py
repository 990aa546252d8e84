"""Ages: how old the tokens were that an event found, and those that it left. Rows are the unit throughout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvtool.layer import Geometry
from kvtool.metrics.metric import Column
from kvtool.metrics.survival import Survival
from kvtool.retained import Event, RetainedSet

FROZEN_AFTER = 4
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
    found.append(Column("turnover", "kv_head", "share of pool_tokens", "none", "candidates that the event evicted"))
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
) -> list[dict[str, Any]]:
    """One entry per KV head and event, and per KV head one for the end of the sequence.

    Candidates are read from `evict_step`: rows before the event that are visible to its query and
    not yet evicted. Shares and `frozen` speak of the run's protection, the same for every policy;
    exposure (survival) of the protection in force at each event, which the policy may have widened.

    Args:
        sinks, window: the run's protected first and newest rows.

    Returns:
        Entries with `kv_head`, `event` (its step, None for the end) and the columns `AGE_COLUMNS`;
        what is undefined is None.
    """
    entries = []
    for head in range(retained.evict_step.shape[0]):
        evict = retained.evict_step[head].to(torch.int64)
        curves = {"prompt": Survival(retained.tokens), "decode": Survival(retained.tokens)}
        chosen: list[Tensor] = []  # kept flexible rows after each event
        for event in [*retained.events, None]:
            step = retained.tokens if event is None else event.step
            first = int(geometry.first_visible(torch.tensor(step)))
            pool = torch.arange(first, step)
            pool = pool[evict[pool] >= step]
            kept = pool if event is None else pool[evict[pool] > step]
            flexible = kept[(kept >= sinks) & (kept < step - window)]
            if event is not None:
                chosen.append(flexible)
                _expose(curves, pool, evict, event, prompt_length)
            recent = chosen[-frozen_after - 1 :]
            shares = _shares(kept, flexible, sinks)
            lives = _lifetimes(evict, geometry) if event is None else (None, None)
            entries.append(
                {
                    "kv_head": head,
                    "event": None if event is None else step,
                    **_statistics("pool", step - pool),
                    **_statistics("kept", step - kept),
                    **shares,
                    "turnover": (pool.numel() - kept.numel()) / pool.numel() if event and pool.numel() else None,
                    "frozen": len(recent) > frozen_after and all(torch.equal(s, recent[0]) for s in recent),
                    **{f"survival_{part}": curve.curve() for part, curve in curves.items()},
                    **{f"survival_{part}_at_risk": list(curve.at_risk) for part, curve in curves.items()},
                    "lifetime_evicted_histogram": lives[0],
                    "lifetime_censored_histogram": lives[1],
                }
            )
    return entries


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
    if not values.numel():
        return []
    powers = torch.tensor([2**b for b in range(int(values.max()).bit_length())])
    counts: list[int] = torch.bincount(torch.bucketize(values, powers, right=True) - 1).tolist()
    return counts


def _statistics(prefix: str, age: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {f"{prefix}_tokens": age.numel()}
    values: list[Any] = [None] * len(STATISTICS)
    if age.numel():
        exact = age.to(torch.float64)
        inner = torch.quantile(exact, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        values = [int(age.min()), *inner, int(age.max()), float(exact.mean())]
    found.update({f"{prefix}_age_{name}": value for name, value in zip(STATISTICS, values, strict=True)})
    found[f"{prefix}_age_histogram"] = histogram(age)
    return found


def _shares(kept: Tensor, flexible: Tensor, sinks: int) -> dict[str, float | None]:
    count = kept.numel()
    first = int((kept < sinks).sum())
    parts = {"sinks": first, "window": count - first - flexible.numel(), "flexible": flexible.numel()}
    return {f"kept_{name}_share": number / count if count else None for name, number in parts.items()}


def _expose(curves: dict[str, Survival], pool: Tensor, evict: Tensor, event: Event, prompt_length: int) -> None:
    """Tell the clocks. A token that left although it was protected (an overfull budget) was exposed too."""
    left = evict[pool] == event.step
    exposed = ((pool >= event.sinks) & (pool < event.step - event.window)) | left
    for part, mine in (("prompt", pool < prompt_length), ("decode", pool >= prompt_length)):
        chosen = exposed & mine
        curves[part].expose(pool[chosen], left[chosen])


def _lifetimes(evict: Tensor, geometry: Geometry) -> tuple[list[int], list[int]]:
    """Histograms of the number of queries that saw each token, ended by eviction and otherwise."""
    rows = torch.arange(evict.numel())
    leaves = torch.full_like(rows, evict.numel())
    if geometry.kind == "sliding" and geometry.window is not None:
        leaves = leaves.clamp_max(rows + geometry.window)
    elif geometry.kind == "chunked" and geometry.window is not None:
        leaves = torch.minimum(leaves, (rows // geometry.window + 1) * geometry.window)
    by_eviction = evict < leaves
    lifetime = torch.minimum(evict, leaves) - rows
    return histogram(lifetime[by_eviction]), histogram(lifetime[~by_eviction])
