"""Calibration: what replay predicted against what the model really did, over the cells of one run."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np

from kvtool.words import asked

# Columns of replay's cells, and what of its rows is averaged over layers and heads to stand beside them.
ERRORS = ("mean_layer_error", "mean_output_error")
AVERAGED = {"mean_cosine_distance": "cosine_distance", "mean_evicted_mass": "evicted_mass"}


def predictors(columns: Iterable[str], further: Iterable[str] = ()) -> list[str]:
    """The columns that foretell damage: predicted KL in every window, the relative errors, the other changes, and
    `further` ones that were asked for."""
    columns = list(columns)
    found = [c for c in columns if re.fullmatch(r"predicted_kl(_w\d+)?", c)]
    return [*found, *(c for c in (*ERRORS, *AVERAGED, *further) if c in columns)]


def calibrate(cells: Sequence[dict[str, Any]], further: Iterable[str] = ()) -> list[dict[str, Any]]:
    """One entry per sequence (null: the means over them), measured quantity and predictor.

    Args:
        cells: entries of the live result's `cells`, with the replay's columns beside the measured ones.
            `full` predicts and measures nothing and is left out, as are cells without effect or without either number.
        further: columns of metrics that were asked for, lower being better.
    """
    entries, further = [], list(further)
    indices = sorted({cell["sequence"] for cell in cells if cell["sequence"] is not None})
    for sequence in [None, *(indices if len(indices) > 1 else [])]:
        mine = [c for c in cells if c["sequence"] == sequence and c["policy"] != "full" and not c["no_effect"]]
        for measured in measures(mine) if mine else []:
            for predictor in predictors(mine[0], further):
                entries += _entry({"sequence": sequence}, mine, predictor, measured)
    return entries


def calibrate_spans(cells: Sequence[dict[str, Any]], timeline: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same from one event to the next, for predicted KL: one entry per sequence and span.

    Args:
        cells: those that `calibrate` is given.
        timeline: entries of that table, `predicted_kl` beside the measured ones.
    """
    counted = {_cell(c) for c in cells if c["policy"] != "full" and not c["no_effect"]}
    spans: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in timeline:
        if _cell(entry) in counted:
            spans.setdefault((entry["sequence"], entry["step_from"], entry["step_to"]), []).append(entry)
    several = len({sequence for sequence, _, _ in spans if sequence is not None}) > 1
    found = []
    for (sequence, start, stop), members in spans.items():
        if sequence is None or several:
            key = {"sequence": sequence, "step_from": start, "step_to": stop}
            (measured,) = measures([{**member, "answer_loss": None} for member in members])
            found += _entry(key, members, "predicted_kl", measured)
    return found


def _cell(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[name] for name in ("sequence", "policy", "ratio", "budget", "schedule"))


def _entry(key: dict[str, Any], cells: Sequence[dict[str, Any]], predictor: str, measured: str) -> list[dict[str, Any]]:
    known = [c for c in cells if _is_number(c[predictor]) and _is_number(c[measured])]
    return [{**key, **agreement(known, predictor, measured)}] if known else []


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def distinct(cells: Sequence[dict[str, Any]], decisions: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """`cells` without those that evict what an earlier one of the same sequence evicts: they agree in everything,
    and counting them twice would flatter any prediction.

    Args:
        decisions: entries of `evict_steps`, whose `digest` names what a layer keeps.
    """
    kept: dict[tuple[Any, ...], set[tuple[Any, ...]]] = {}
    for entry in decisions:
        place = entry["sequence"], entry["layer"], entry["kv_head"], entry["digest"]
        for sequence in (entry["sequence"], None):
            kept.setdefault(_cell({**entry, "sequence": sequence}), set()).add(place)
    seen: set[tuple[Any, ...]] = set()
    found = []
    for cell in cells:
        sets = frozenset(kept[_cell(cell)])
        if (cell["sequence"], sets) not in seen:
            seen.add((cell["sequence"], sets))
            found.append(cell)
    return found


def measures(cells: Sequence[dict[str, Any]]) -> list[str]:
    """What is predicted: KL over the drawn targets where the trace says which, else over all steps; the answer."""
    drawn = any(c["measured_kl_targets"] not in (None, c["measured_kl"]) for c in cells)
    kl = "measured_kl_targets" if drawn else "measured_kl"
    return [kl, *(["answer_loss"] if any(c["answer_loss"] is not None for c in cells) else [])]


def agreement(cells: Sequence[dict[str, Any]], predictor: str, measured: str) -> dict[str, Any]:
    """How well the column `predictor` foretells the column `measured`; ratios for predicted KL against KL only."""
    predicted, truth = ([float(cell[name]) for cell in cells] for name in (predictor, measured))
    positive = [(p, m) for p, m in zip(predicted, truth, strict=True) if p > 0 and m > 0]
    logs = [[math.log(value) for value in side] for side in zip(*positive, strict=True)] if positive else [[], []]
    alike = predictor.startswith("predicted_kl") and measured.startswith("measured_kl")
    ratios = [p / m for p, m in positive] if alike else []
    wrong, pairs = wrong_pairs(cells, predictor, measured)
    return {
        "measured": measured,
        "predictor": predictor,
        "cells": len(cells),
        "spearman": spearman(predicted, truth),
        "log_pearson": pearson(*logs),
        "ratio_median": median(ratios) if ratios else None,
        "ratio_low": min(ratios, default=None),
        "ratio_high": max(ratios, default=None),
        "pairs": pairs,
        "wrong_pairs": wrong,
    }


def pearson(x: Sequence[float], y: Sequence[float]) -> float | None:
    """The correlation of x and y; None below three points or where one of them is constant."""
    if len(x) < 3:
        return None
    a, b = (np.asarray(side, dtype=np.float64) - np.mean(side) for side in (x, y))
    if min(np.ptp(x), np.ptp(y)) == 0:
        return None
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """The correlation of ranks, equal values sharing the mean of theirs."""
    return pearson(ranks(x), ranks(y))


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal values get the mean of the ranks that they take up."""
    array = np.asarray(values, dtype=np.float64)
    return [float((array < v).sum() + ((array == v).sum() + 1) / 2) for v in array]


def wrong_pairs(cells: Sequence[dict[str, Any]], predictor: str, measured: str) -> tuple[list[str], int]:
    """(pairs of policies that the predictor puts the wrong way round, worst first; all pairs).

    Only policies at the same ratio or budget and under the same schedule are compared: which of two is better there is
    the question.
    """
    found, pairs = [], 0
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["ratio"], cell["budget"], cell["schedule"]), []).append(cell)
    several = len({schedule for _, _, schedule in groups}) > 1
    for (ratio, budget, schedule), members in groups.items():
        place = asked(ratio, budget) + (f", {schedule}" if several else "")
        for a, b in itertools.combinations(members, 2):
            pairs += 1
            good, bad = (a, b) if a[predictor] < b[predictor] else (b, a)
            gap = good[measured] - bad[measured]
            if good[predictor] < bad[predictor] and gap > 0:
                text = (
                    f"{place}: {good['policy']} before {bad['policy']}, measured "
                    f"{good[measured]:.4g} and {bad[measured]:.4g}"
                )
                found.append((gap / max(abs(good[measured]), abs(bad[measured])), text))
    return [text for _, text in sorted(found, key=lambda pair: -pair[0])], pairs
