"""What the terminal says about a decomposition, from tables made by hand."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from kvtool.report.decomposition_summary import error_sections, error_verdicts, ladder_verdicts, ladders
from kvtool.report.terminal_decomposition import decomposition_tables
from kvtool.result import Result, table_of

ASKED = {"center": "rope_mean", "samples": 4, "pool": 10, "keep": 5}


def row(policy: str, layer: int, head: int, terms: tuple[float, float, float], **more: Any) -> dict[str, Any]:
    found = {f"e_{name}": value for name, value in zip(("selection", "taylor", "diagonal"), terms, strict=True)}
    key = {"sequence": 0, "policy": policy, "ratio": 0.75, "budget": None, "layer": layer, "kv_head": 0, "q_head": head}
    rest = {"e_total": sum(terms), "tangent_signal": 0.5, "nats_total": None, "e_diagonal_unshared": 0.01}
    return {**key, **found, **rest, **more}


def step(policy: str, total: float, steps: tuple[float, ...] | None) -> dict[str, Any]:
    names = ("selection", "diagonal", "renormalisation", "information", "linearity")
    parts = {
        f"ladder_{name}": None if steps is None else value for name, value in zip(names, steps or [0] * 5, strict=True)
    }
    return {
        "sequence": 0,
        "policy": policy,
        "budget": 5,
        "layer": 0,
        "kv_head": 0,
        "ladder_total": total,
        "output_energy": 2.0,
        **parts,
    }


def result_of(rows: list[dict[str, Any]], steps: list[dict[str, Any]] | None = None) -> Result:
    tables = {"decomposition": table_of("decomposition", rows)}
    if steps is not None:
        tables["ladder"] = table_of("ladder", steps)
    policies = [{"label": "one", "oracle": False}, {"label": "two", "oracle": True}]
    return Result({"replay": {"decompose": ASKED, "policies": policies}}, tables)


@pytest.fixture
def mixed() -> Result:
    """Policy `one` loses by the diagonal term in layers 0 and 1, by selection in 2; `two` by selection throughout."""
    rows = [row("one", layer, head, (0.1, 0.2, 1.15)) for layer in (0, 1) for head in (0, 1)]
    rows += [row("one", 2, head, (0.4, 0.2, 0.1)) for head in (0, 1)]
    rows += [row("two", layer, head, (0.8, 0.2, 0.3)) for layer in (0, 1, 2) for head in (0, 1)]
    rows += [row("full", layer, head, (0.0, 0.2, 0.3)) for layer in (0, 1, 2) for head in (0, 1)]
    return result_of(rows)


def test_the_dominating_term_is_told_with_its_place_and_size(mixed: Result) -> None:
    assert error_verdicts(mixed) == [
        "ratio 0.75: selection is the largest error of two, 1.6x the tangent signal in every layer",
        "ratio 0.75: the diagonal term is the largest error of one, 2.3x the tangent signal in layers 0-1; "
        "selection leads in layer 2, 0.8x the tangent signal",
        "selection: tokens left that the queries needed, which only another choice of tokens mends",
        "the diagonal term: common shifts of all logits, which centred competition removes",
    ]


def test_lines_hold_medians_and_the_share_of_heads(mixed: Result) -> None:
    (section,) = error_sections(mixed)
    assert [line.policy for line in section.lines] == ["one", "two", "full"]
    one = section.lines[0]
    assert one.terms == {"selection": 0.1, "taylor": 0.2, "diagonal": 1.15}
    assert (one.largest, one.share) == ("diagonal", pytest.approx(4 / 6))
    assert one.layers == {"selection": [2], "taylor": [], "diagonal": [0, 1]}
    assert one.worst == (0, 0, pytest.approx(1.45))
    assert one.nats is None


def test_weight_in_few_hands_is_not_called_a_common_shift() -> None:
    rows = [row("one", 0, head, (0.1, 0.2, 1.0), e_diagonal_unshared=0.9) for head in range(3)]
    assert error_verdicts(result_of(rows))[-1] == (
        "the diagonal term: few tokens hold most of the weight and compete for it, which centred competition keeps"
    )


def test_controls_are_shown_and_not_judged(mixed: Result) -> None:
    assert all("full" not in sentence for sentence in error_verdicts(mixed))


def test_every_policy_is_named_and_one_without_errors_has_no_largest() -> None:
    rows = [row(f"p{n}", 0, 0, (0.1, 0.9, 0.2)) for n in range(7)] + [row("exact", 0, 0, (0.0, 0.0, 0.0))]
    found = result_of(rows)
    assert "of p0, p1, p2, p3, p4, p5 and p6, " in error_verdicts(found)[0]
    assert not any("exact" in sentence for sentence in error_verdicts(found))
    assert error_sections(found)[0].lines[-1].largest is None


def test_the_verdict_goes_by_the_medians_that_the_table_shows() -> None:
    """Selection leads narrowly in three heads, Taylor in two by far; a median is not a vote."""
    heads = [(0.5, 0.49, 0.1), (0.5, 0.49, 0.1), (0.9, 0.8, 0.1), (0.4, 4.0, 0.1), (0.4, 5.0, 0.1)]
    found = result_of([row("one", 0, head, terms) for head, terms in enumerate(heads)])
    (line,) = error_sections(found)[0].lines
    assert (line.terms["selection"], line.terms["taylor"]) == (0.5, 0.8)
    assert (line.largest, line.share) == ("taylor", pytest.approx(2 / 5))
    assert "the Taylor term is the largest error of one" in error_verdicts(found)[0]


def test_ladders_are_shares_of_the_energy_and_name_the_dearest_step() -> None:
    found = result_of([], [step("one", 0.4, (0.1, 0.5, -0.3, 0.1, 0.0)), step("two", 0.2, None)])
    assert [(line.policy, line.total) for line in ladders(found)] == [("two", 0.1), ("one", 0.2)]
    assert ladders(found)[0].steps is None
    assert ladder_verdicts(found) == [
        "keeping 5 of 10 tokens: one damages the output by 0.2 of its energy more than the best set; the dearest "
        "step is diagonal, +0.25"
    ]


@pytest.mark.parametrize("width", [80, 120, 160])
def test_tables_fit_the_terminal_and_say_what_they_left_out(mixed: Result, width: int) -> None:
    nats = {"nats_total": 1e-3, "nats_selection": 1e-4, "nats_taylor": 2e-4, "nats_diagonal": 3e-4}
    rows = [{**entry, **nats} for entry in mixed.entries("decomposition")]
    console = Console(width=width, highlight=False, record=True, file=io.StringIO())
    parts = decomposition_tables(result_of(rows), width)
    for part in parts:
        console.print(part)
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= width
    for always in ("policy", "selection", "Taylor", "diagonal", "total"):
        assert always in text
    for column in ("signal", "in layers", "worst head", "nats: sel. / Tay. / diag."):
        head = next(line for line in text.splitlines() if "policy" in line and "selection" in line)
        said = " ".join(text.split())
        left_out = "Left out" in said and column in said[said.index("Left out") :]
        assert (column in head) != left_out
    assert ("Left out" in text) == (width < 160)
