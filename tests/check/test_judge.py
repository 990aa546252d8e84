"""The judge alone: every outcome of numbers and of decisions, and the kind of a cell, from a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvtool.check.cuts import packed
from kvtool.check.digits import steady, stored
from kvtool.check.judge import Tolerance, judge_job, judge_layer, judge_value
from kvtool.check.sentences import row_sentence

LOOSE = Tolerance(relative=0.1, absolute=0.01)


@pytest.mark.parametrize(
    ("old", "new", "direction", "outcome"),
    [
        (1.0, 1.0, "lower", "same"),
        (1.0, 1.0 + 1e-15, "lower", "same"),  # equal in the digits of a baseline
        (1.0, 1.05, "lower", "within"),
        (1.0, 1.109, "lower", "within"),  # absolute and relative add up
        (1.0, 1.12, "lower", "worse"),
        (1.0, 0.88, "lower", "better"),
        (1.0, 1.12, "higher", "better"),
        (1.0, 0.88, "higher", "worse"),
        (1.0, 0.88, "none", "moved"),
        (1.0, 1.12, "none", "moved"),
        (-1.0, -1.12, "lower", "better"),
        (0.0, 0.01, "lower", "within"),
        (0.0, 0.011, "lower", "worse"),
        (7, 7, "none", "same"),
        (7, 9, "none", "moved"),
        (None, None, "lower", "same"),
        (1.0, None, "lower", "missing"),
        (0.0, None, "lower", "missing"),
        (None, 0.0, "lower", "new"),
    ],
)
def test_every_outcome_of_a_number(old: Any, new: Any, direction: Any, outcome: str) -> None:
    assert judge_value(old, new, LOOSE, direction) == outcome


# Eight tokens, an event at step 6 that evicts two of the first six.
FIRST, SECOND, THIRD = ([6, 6, 8, 8, 8, 8, 8, 8], [6, 8, 6, 8, 8, 8, 8, 8], [8, 8, 8, 8, 6, 6, 8, 8])


def layer(*heads: str, digest: str = "d", cuts: dict[int, Any] | None = None) -> dict[str, Any]:
    """A layer whose heads kept six tokens each; cuts are KV head -> (evict steps, rows of near ties, exact ties)."""
    kept = {
        str(head): packed(np.array(steps), [6], [len(near)], [exact], near)
        for head, (steps, near, exact) in (cuts or {}).items()
    }
    return {"digest": digest, "error": 0.5, "heads": list(heads), "kept": [6] * len(heads), "cuts": kept}


OLD = layer("a", "b")
TIED = layer("a", "b", cuts={1: (FIRST, [1, 2], 0)})


@pytest.mark.parametrize(
    ("old", "new", "outcome", "kind", "heads"),
    [
        (OLD, OLD, "same", "identical", ()),
        (OLD, {**OLD, "error": 0.5 + 1e-9}, "same", "numerics", ()),
        (OLD, {**OLD, "error": None}, "same", "numerics", ()),
        (OLD, layer("a", "c", digest="e"), "moved", "behaviour", (1,)),
        (OLD, layer("x", "c", digest="e"), "moved", "behaviour", (0, 1)),
        (TIED, layer("a", "c", digest="e", cuts={1: (SECOND, [1, 2], 0)}), "tie", "numerics", (1,)),
        (TIED, layer("a", "c", digest="e", cuts={1: (SECOND, [1, 2], 2)}), "tie", "numerics", (1,)),  # exact by luck
        (
            TIED,
            layer("a", "c", digest="e", cuts={1: (THIRD, [1, 2], 0)}),
            "moved",
            "behaviour",
            (1,),
        ),  # more than the ties
        (TIED, layer("a", "c", digest="e", cuts={1: (SECOND, [0, 3], 0)}), "moved", "behaviour", (1,)),  # other tokens
        (TIED, layer("a", "c", digest="e"), "moved", "behaviour", (1,)),
        (OLD, layer("a", "c", digest="e", cuts={1: (SECOND, [1, 2], 0)}), "moved", "behaviour", (1,)),
        (TIED, layer("a", "c", digest="e", cuts={1: (SECOND[:7], [1, 2], 0)}), "moved", "behaviour", (1,)),
        (
            TIED,
            layer("x", "c", digest="e", cuts={1: (SECOND, [1, 2], 0)}),
            "moved",
            "behaviour",
            (0, 1),
        ),  # one is no tie
        (OLD, layer("a", "b", digest="e"), "moved", "behaviour", (0, 1)),  # short digests that met their like
        (TIED, layer("a", "b", digest="e", cuts={1: (FIRST, [1, 2], 0)}), "moved", "behaviour", (0, 1)),
        (OLD, layer("a", digest="e"), "moved", "behaviour", (0,)),
        (None, OLD, "new", "unknown", ()),
        (OLD, None, "missing", "unknown", ()),
    ],
)
def test_every_outcome_of_decisions(old: Any, new: Any, outcome: str, kind: str, heads: tuple[int, ...]) -> None:
    found = judge_layer(7, old, new)
    assert (found.layer, found.outcome, found.kind, found.kv_heads) == (7, outcome, kind, heads)


def job(
    cells: dict[str, Any], decisions: dict[str, Any] | None = None, versions: dict[str, int] | None = None
) -> dict[str, Any]:
    return {"cells": cells, "decisions": decisions or {}, "metrics": {"error": 1} if versions is None else versions}


def asked(**parameters: Any) -> dict[str, Any]:
    how = {"label": f"error:{parameters}", "parameters": parameters, "columns": ["error"]}
    return {**job({"c": {"error": 1.0}}), "asked": {"error": how}}


def undefined(values: int, **others: Any) -> dict[str, Any]:
    """The same mean of what is defined, and how much is not: written where there is any."""
    return job({"c": {"error": 1.0, **others, **({"error:undefined": values} if values else {})}})


def judged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    tight = Tolerance(0, 0)
    rows = judge_job(
        old,
        new,
        lambda metric: tight if ":" in metric else LOOSE,
        lambda metric: "none" if metric == "count" else "lower",
    )
    return {row.name: row for row in rows}


@pytest.mark.parametrize(
    ("old", "new", "outcome", "kind", "fails", "strict"),
    [
        (job({"c": {"error": 1.0}}), job({"c": {"error": 1.0}}), "same", "identical", False, False),
        (job({"c": {"error": 1.0}}), job({"c": {"error": 1.01}}), "within", "unknown", False, False),
        (
            job({"c": {"error": 1.0}}, {"c layer 3": OLD}),
            job({"c": {"error": 1.01}}, {"c layer 3": OLD}),
            "within",
            "numerics",
            False,
            False,
        ),
        (
            job({"c": {"error": 1.0}}, {"c layer 3": OLD}),
            job({"c": {"error": 2.0}}, {"c layer 3": OLD}),
            "worse",
            "numerics",
            True,
            True,
        ),
        (
            job({"c": {"error": 1.0}}, {"c layer 3": OLD}),
            job({"c": {"error": 0.5}}, {"c layer 3": layer("a", "c", digest="e")}),
            "moved",
            "behaviour",
            True,
            True,
        ),
        (
            job({"c": {"error": 1.0}}, {"c layer 3": TIED}),
            job({"c": {"error": 1.0}}, {"c layer 3": layer("a", "c", digest="e", cuts={1: (SECOND, [1, 2], 0)})}),
            "tie",
            "numerics",
            False,
            False,
        ),
        (job({"c": {"error": 1.0}}), job({"c": {"error": 0.5}}), "better", "unknown", False, False),
        (job({"c": {"count": 3}}), job({"c": {"count": 4}}), "moved", "unknown", True, True),
        (job({"c": {"error": 1.0}}), job({}), "missing", "unknown", True, True),
        (job({}), job({"c": {"error": 1.0}}), "new", "unknown", False, True),
        ({}, job({"c": {"error": 1.0}}), "new", "unknown", False, True),
        (job({"c": {"error": None}}), job({"c": {"error": 1.0}}), "new", "unknown", False, True),
        (job({"c": {"error": 1.0}}), job({"c": {"error": None}}), "missing", "unknown", True, True),
        (job({"c": {"error": 1.0}}), job({"c": {"error": 1.0}}, versions={"error": 2}), "moved", "unknown", True, True),
        (asked(limit=0.5), asked(limit=0.5), "same", "identical", False, False),
        (asked(limit=0.5), asked(limit=0.9), "moved", "unknown", True, True),
        (job({"c": {"error": 1.0}}), asked(limit=0.5), "moved", "unknown", True, True),
        (undefined(0), undefined(1), "worse", "unknown", True, True),
        (undefined(1), undefined(0), "better", "unknown", False, False),
        (undefined(1), undefined(1), "same", "identical", False, False),
        (job({}), undefined(1), "new", "unknown", False, True),
        (undefined(1), job({}), "missing", "unknown", True, True),
        (job({"c": {"count": 3}}), undefined(1, count=3), "new", "unknown", False, True),
    ],
)
def test_every_outcome_of_a_cell(old: Any, new: Any, outcome: str, kind: str, fails: bool, strict: bool) -> None:
    row = judged(old, new)["c"]
    assert (row.outcome, row.kind, row.fails(), row.fails(strict=True)) == (outcome, kind, fails, strict)


def test_a_cell_is_as_bad_as_its_worst_part() -> None:
    old = job({"c": {"error": 1.0, "count": 1}}, {"c layer 3": OLD, "c layer 10": OLD})
    new = job({"c": {"error": 0.1, "count": 1}}, {"c layer 3": OLD, "c layer 10": layer("a", "c", digest="e")})
    row = judged(old, new)["c"]
    assert row.outcome == "moved"
    assert [one.layer for one in row.layers] == [3, 10]  # as numbers, not as words
    assert {value.metric: value.outcome for value in row.values} == {"error": "better", "count": "same"}


def test_numbers_are_stored_in_twelve_digits_and_stay_where_rounding_alone_moved_them() -> None:
    assert stored(0.12345678901234567) == 0.123456789012
    assert stored(1234567890123456789) == 1234567890123456789
    assert stored(None) is None
    assert steady(0.123456789012, 0.123456789013) == 0.123456789012
    assert steady(0.123456789012, 0.1234567891) == 0.1234567891
    assert steady(None, 0.5) == 0.5
    assert steady(0.123456789012, 0.123456789013, Tolerance(0, 0).allows) == 0.123456789013
    assert steady(0.5, None) is None


def test_in_float32_against_float64_the_coarser_side_says_how_far_rounding_reaches() -> None:
    old = layer("a", "b", cuts={1: (FIRST, [1, 2], 0)})
    new = layer("a", "c", digest="e", cuts={1: (SECOND, [1], 1)})
    assert judge_layer(7, old, new).outcome == "moved"
    assert judge_layer(7, old, new, "a").outcome == "tie"
    jobs = [
        {**job({}, {"c layer 7": entry}), "settings": {"precision": precision}}
        for entry, precision in ((old, "float32"), (new, "float64"))
    ]
    assert judged(*jobs)["c"].outcome == "tie"
    assert judged(jobs[0], {**jobs[1], "settings": jobs[0]["settings"]})["c"].outcome == "moved"


def test_a_cell_that_is_gone_is_said_once() -> None:
    row = judged(job({"c": {"error": 1.0, "count": 2}}, {"c layer 3": OLD}), job({}))["c"]
    assert (row.gone, row.outcome) == (True, "missing")
    assert (
        row_sentence(row) == "unknown: the cell is gone: no policy, size, schedule and sequence of the suite makes it"
    )
    row = judged(job({"c": {"error": 1.0, "count": 2}}), job({"c": {"error": None}}))["c"]
    assert not row.gone
    assert "count is no longer there, was 2; error is null now, was 1" in row_sentence(row)
