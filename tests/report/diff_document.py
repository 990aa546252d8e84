"""A comparison written by hand: what the two views of it are tested on."""

from __future__ import annotations

from typing import Any


def metric(name: str, a: float | None, b: float | None, verdict: str, **other: Any) -> dict[str, Any]:
    known = a is not None and b is not None
    found = {
        "metric": name,
        "level": "cell",
        "unit": "relative L2",
        "direction": "lower",
        "a": a,
        "b": b,
        "difference": b - a if known else None,
        "ratio": b / a if known and a else None,
        "low": None,
        "high": None,
        "t_low": None,
        "t_high": None,
        "sure": None,
        "verdict": verdict,
        "undefined": 0,
        "decides": True,
    }
    return found | other


def layer(index: int, a: float, b: float, verdict: str, kind: str = "behaviour") -> dict[str, Any]:
    entry = {"layer": index, "kind": kind, "metric": "layer_error", "a": a, "b": b, "difference": b - a}
    return entry | {"verdict": verdict, "wins_a": 7, "wins_b": 2, "even": 9}


def head(index: int, q_head: int, a: float, b: float, p: float) -> dict[str, Any]:
    entry = {"layer": index, "q_head": q_head, "kv_head": q_head // 3, "a": a, "b": b, "difference": b - a}
    return entry | {"ratio": b / a, "low": (b - a) / 2, "high": (b - a) * 2, "p": p, "p_holm": p, "verdict": "worse"}


def token(row: int, text: str, **other: Any) -> dict[str, Any]:
    worst = {"layer": 7, "kv_head": 2, "q_head": 7, "damage": 0.4125}
    entry = {"sequence": 0, "token": row, "position": row, "text": text, "heads": 41, "of": 90, "layers": [0, 7]}
    return entry | {"attention_mass": 0.01234, "damage": 0.2345, "worst": worst} | other


def group(policy: str = "snapkv", ratio: float = 0.75, **other: Any) -> dict[str, Any]:
    """One comparison that changed its behaviour for the worse."""
    interval = {"low": 0.01234, "high": 0.03071, "t_low": 0.00512, "t_high": 0.04, "sure": True}
    found: dict[str, Any] = {
        "policy": policy,
        "ratio": ratio,
        "budget": None,
        "schedule": "prompt-end",
        "evaluate": "live",
        "event": None,
        "kind": "behaviour",
        "rows": 540,
        "metrics": [
            metric("mean_layer_error", 0.0812, 0.1023, "worse", **interval),
            metric("mean_output_error", 0.1534, 0.1534 + 1e-9, "within"),
            metric("predicted_kl", None, None, "undefined", undefined=4),
            metric("evicted_mass", 0.0774, 0.0613, "better", level="head", low=-0.02, high=0.001, sure=False),
            metric("turnover", 0.31, 0.42, "moved", level="head", direction="none"),
            metric("mass_retained", 0.9226, 0.9387, "within", level="head", direction="higher"),
        ],
        "layers": [layer(0, 0.0178, 0.0179, "within"), layer(7, 0.3587, 0.4148, "worse")],
        "wins": {"metric": "output_error", "a": 180, "b": 75, "even": 15, "by_layer": []},
        "worst_heads": [head(7, 7, 0.569, 0.671, 0.00001), head(0, 2, 0.111, 0.123, 0.2)],
        "significant_heads": {"worse": 3, "better": 1, "tested": 270, "alpha": 0.05},
        "kept": {
            "jaccard": 0.8431,
            "jaccard_min": 0.4123,
            "worst": {"sequence": 1, "layer": 7, "kv_head": 2, "jaccard": 0.4123},
            "kept_a": 256.0,
            "kept_b": 255.5,
            "by_layer": [
                {"layer": 0, "jaccard": 0.97, "jaccard_min": 0.91, "moved_tokens": 12},
                {"layer": 7, "jaccard": 0.66, "jaccard_min": 0.4123, "moved_tokens": 345},
            ],
            "heads": 180,
            "heads_moved": 82,
        },
        "tokens": {
            "lost": [token(17, " harbour"), token(3, "|\n`<b>`@all", sequence=1, position=5)],
            "gained": [token(900, "\x1b[31m the", damage=None, attention_mass=None, worst=None)],
            "not_told": None,
        },
    }
    return found | other


def numerics(policy: str = "knorm", ratio: float = 0.5) -> dict[str, Any]:
    """One comparison in which only numbers moved."""
    return group(
        policy,
        ratio,
        kind="numerics",
        metrics=[metric("mean_layer_error", 0.0812345678, 0.0812345679, "within")],
        layers=[layer(3, 0.1, 0.1 + 1e-9, "within", "numerics")],
        worst_heads=[],
        significant_heads={"worse": 0, "better": 0, "tested": 270, "alpha": 0.05},
        kept=group()["kept"] | {"jaccard": 1.0, "jaccard_min": 1.0, "heads_moved": 0},
        tokens=None,
    )


def document(groups: list[dict[str, Any]] | None = None, **other: Any) -> dict[str, Any]:
    """`kvtool.diff/1` with those comparisons."""
    groups = [group()] if groups is None else groups
    worse = any(entry["verdict"] == "worse" for one in groups for entry in one["metrics"])
    kinds = [one["kind"] for one in groups]
    side = {"selector": None, "label": "old", "schema": "kvtool.replay/1", "trace_digest": "f8" * 32}
    found: dict[str, Any] = {
        "schema": "kvtool.diff/1",
        "a": side | {"path": "old_results"},
        "b": side | {"path": "new*results", "selector": "snapkv@0.75"},
        "settings": [
            {"name": "replay.window", "a": 32, "b": 31, "decides": True},
            {"name": "replay.policies[mine.py:Mine].source", "a": "ab" * 32, "b": None, "decides": True},
            {"name": "environment.torch", "a": "2.3.0", "b": "2.4.1", "decides": False},
        ],
        "kind": "behaviour" if "behaviour" in kinds else kinds[0] if kinds else "identical",
        "ties": 2,
        "kept_sets": {"moved": 82, "of": 180},
        "tolerance": {"relative": 1e-3, "absolute": 1e-9, "by_metric": {"predicted_kl": {"relative": 0.05}}},
        "sequences": 4,
        "interval": {
            "level": 0.95,
            "method": "bootstrap over sequences, percentile",
            "resamples": 9999,
            "seed": 0,
            "coverage": 0.68,
            "note": "over 4 sequences such an interval held the truth 68 to 81 times in 100",
        },
        "groups": groups,
        "identical_groups": 12,
        "only_a": [],
        "only_b": [
            {"policy": "h2o", "ratio": 0.9, "budget": None, "schedule": "every:64", "event": None, "sequence": index}
            | {"table": table, "rows": 1 if table == "cells" else 270}
            for index in (0, 1)
            for table in ("cells", "rows")
        ],
        "worse": worse,
        "findings": [],
        "warnings": [],
    }
    return found | other
