"""Goldens of the sample traces: `make goldens` rewrites them, and the difference is read in review.

They guard against change and prove nothing: what is right is held against plain loops elsewhere.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvtool.replay import replay

ROOT = Path(__file__).resolve().parents[2]
SUITES: dict[str, dict[str, Any]] = {
    "tiny-gqa": {"ratios": ["0.5", "0.75"], "sinks": 1, "window": 8},
    "smollm2": {"ratios": ["0.5", "0.9"]},
    "smollm2-gradients": {"ratios": ["0.75"]},
}
METRICS = ("mean_layer_error", "mean_output_error", "predicted_kl", "predicted_kl_w32")


def observe(name: str) -> dict[str, Any]:
    """Decisions and errors of every built-in policy on one sample trace, in float64."""
    result = replay(ROOT / "sample_traces" / f"{name}.zarr", ["all"], precision="float64", **SUITES[name])
    decisions: dict[str, dict[str, Any]] = {}
    for entry in result.entries("evict_steps"):
        key = f"{entry['policy']} {entry['ratio']} sequence {entry['sequence']} layer {entry['layer']}"
        found = decisions.setdefault(key, {"digest": entry["digest"][:20], "kept": [], "margin": None})
        found["kept"].append(entry["achieved"])
        margins = [m for m in (found["margin"], entry["margin"]) if m is not None]
        found["margin"] = min(margins, default=None)
    cells = {
        f"{cell['policy']} {cell['ratio']} sequence {cell['sequence']}": {
            m: cell[m] for m in METRICS if cell[m] is not None
        }
        for cell in result.entries("cells")
        if cell["sequence"] is not None
    }
    return {"trace": result.manifest["trace"]["digest"], "decisions": decisions, "cells": cells}


def path_of(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.json")


def main() -> None:
    for name in sys.argv[1:] or SUITES:
        path_of(name).write_text(json.dumps(observe(name), indent=1, sort_keys=True) + "\n")
        print(f"recorded {path_of(name).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
