"""Columns of a result's tables and their types in words: `int32`, `string`, `list of int32`, as Arrow calls them."""

from __future__ import annotations

# The columns that name an entry. They come first in every table, in this order.
KEY: dict[str, str] = {
    "sequence": "int32",
    "policy": "string",
    "ratio": "float64",
    "budget": "int32",
    "achieved": "float64",
    "schedule": "string",
    "evaluate": "string",
    "event": "int32",
}
PLACE: dict[str, dict[str, str]] = {
    "cells": {},
    "layers": {"layer": "int32"},
    "rows": {"layer": "int32", "kv_head": "int32", "q_head": "int32"},
    "ages": {"layer": "int32", "kv_head": "int32"},
    "evict_steps": {"layer": "int32", "kv_head": "int32"},
    "token_shares": {"layer": "int32", "kv_head": "int32"},
    "decomposition": {"layer": "int32", "kv_head": "int32", "q_head": "int32"},
    "ladder": {"layer": "int32", "kv_head": "int32"},
    "steps": {"step": "int32"},
    "landmarks": {"layer": "int32", "kv_head": "int32", "landmark": "string"},
    "spans": {"step_from": "int32", "step_to": "int32"},
    # These have all their columns here: there may be no event, and the columns stay.
    "timeline": {
        **dict.fromkeys(("layer", "step_from", "step_to"), "int32"),
        **dict.fromkeys(("layer_error", "mean_layer_error", "output_error", "evicted_mass"), "float64"),
        **dict.fromkeys(("mean_cache_tokens", "peak_cache_tokens", "predicted_kl"), "float64"),
        "predicted_kl_steps": "int64",
    },
    "events": {
        "layer": "int32",
        **{f"{noun}_{end}": "int64" for noun in ("candidates", "allowed", "achieved") for end in ("min", "max")},
        **dict.fromkeys(("evicted", "protected_tokens"), "int64"),
        "overfull": "bool",
        "ties": "int64",
        "margin": "float64",
        **dict.fromkeys(("factorisation_fallbacks", "deadline_fallbacks"), "int64"),
        **dict.fromkeys(("layer_error", "output_error"), "float64"),
        **dict.fromkeys(("cache_before", "cache_after"), "int64"),
        "attention_entropy": "float64",
        **dict.fromkeys(("page_tokens", "pages_freed", "pages_held"), "int64"),
        "fragmentation": "float64",
        "compaction_bytes": "int64",
    },
    "cache": {
        **dict.fromkeys(("layer", "kv_head"), "int32"),
        **dict.fromkeys(("steps", "cache_tokens"), "list of int32"),
    },
    "telemetry": {
        "layer": "int32",
        **{f"{stage}_ms": "float64" for stage in ("scoring", "factorisation", "selection", "compaction", "eviction")},
        "peak_temporary_bytes": "int64",
    },
}
# The tables whose entries speak of no single cell: all their columns.
OWN: dict[str, dict[str, str]] = {
    "calibration": {
        "sequence": "int32",
        **dict.fromkeys(("measured", "predictor"), "string"),
        **dict.fromkeys(("step_from", "step_to", "cells"), "int32"),
        **dict.fromkeys(("spearman", "log_pearson", "ratio_median", "ratio_low", "ratio_high"), "float64"),
        "pairs": "int32",
        "wrong_pairs": "list of string",
    },
    "effects": {
        "ratio": "float64",
        **dict.fromkeys(("metric", "kind", "axis", "level", "instead_of", "policy"), "string"),
        "rank": "int32",
        **dict.fromkeys(("effect", "low", "high"), "float64"),
        "paired_over": "string",
        "pairs": "int32",
        **dict.fromkeys(("without", "with", "at_reference", "with_companion", "factor"), "float64"),
        "contexts": "int32",
        "lowest": "float64",
        "lowest_with": "string",
        "highest": "float64",
        "highest_with": "string",
        **dict.fromkeys(("layers_agreeing", "layers"), "int32"),
    },
    "interactions": {
        "ratio": "float64",
        **dict.fromkeys(("metric", "axis_a", "level_a", "axis_b", "level_b", "policy"), "string"),
        "rank": "int32",
        **dict.fromkeys(("interaction", "low", "high"), "float64"),
        "paired_over": "string",
        "pairs": "int32",
        **dict.fromkeys(("a_alone", "a_with_b", "b_alone", "b_with_a", "together"), "float64"),
    },
}
# Columns that count something: whole numbers per entry; means of them over layers or sequences need not be.
COUNTS: tuple[str, ...] = ("achieved", "candidates", "ties", "undefined_heads", "undefined_layers", "undefined_steps")
COUNTS += ("evaluated_from", "events", "evicted", "fallbacks", "deadline_fallbacks")
# Columns whose kind is not to be read off their values, which may all be null.
KINDS: dict[str, str] = {
    "undefined_steps": "int64",
    "evaluated_steps": "int64",
    **dict.fromkeys(("predicted_kl_block", "predicted_kl_steps", "predicted_kl_draws"), "int64"),
    **dict.fromkeys(
        ("evict_step", "event_steps", "event_near_ties", "event_ties", "near_rows", "tokens"), "list of int32"
    ),
    "event_margins": "list of float64",
    "shares": "list of float64",
    **dict.fromkeys(("predicted_kl_partial", "protected", "synthetic"), "string"),
    **dict.fromkeys(("mean_cache_tokens", "peak_cache_tokens"), "float64"),
    **dict.fromkeys(("no_effect", "window_decided"), "bool"),
    "changes": "list of string",
    **dict.fromkeys(("oracle", "frozen", "capacity_mc_saturated_unit", "capacity_mc_saturated_scaled"), "bool"),
    **dict.fromkeys(("queries", "pool", "kept", "samples", "undefined_samples"), "int32"),
    **dict.fromkeys(("rows", "first_lost", "prompt_length", "oldest_row"), "int32"),
}


def _decomposed() -> tuple[str, ...]:
    """What the tables `decomposition` and `ladder` measure, beside what KINDS has of them."""
    terms = ("selection", "taylor", "diagonal")
    pairs = [f"cross_{one}_{other}" for index, one in enumerate(terms) for other in terms[index + 1 :]]
    found = ["center", "covariance", "tangent_signal", "identity_residual", "tangent_residual", "capacity_objective"]
    found += [f"e_{name}" for name in (*terms, "diagonal_unshared", "total")] + pairs
    found += [f"nats_{name}" for name in (*terms, "total", "signal", *pairs)]
    found += [f"diagonal_cov_error_{kind}" for kind in ("competition", "response", "centred")]
    capacities = ("full", "competition", "response", "centred", "gauss", "mc", "mc_se")
    for noise in ("unit", "scaled"):
        found += [f"capacity_{name}_{noise}" for name in capacities]
        found += [f"{name}_{noise}" for name in ("sigma2", "shape_gap", "taylor_capacity_gap")]
    means = ["output_energy", "ladder_total", "capacity_best"]
    means += [f"damage_{rung}" for rung in ("one", "diag", "full", "ren", "lin", "best")]
    steps = ("selection", "diagonal", "renormalisation", "information", "linearity")
    means += [f"ladder_{step}" for step in steps]
    selectors = ("one_shot", "two_pass", "greedy")
    means += [f"{what}_gap_{name}" for what in ("capacity", "damage") for name in selectors]
    means += [f"damage_gap_capacity_{name}" for name in ("two_pass", "greedy", "exhaustive")]
    return (*found, *(name + end for name in means for end in ("", "_low", "_high")))


DECOMPOSED: tuple[str, ...] = _decomposed()
