"""What a comparison says of single groups, sequences, events, doubts and names, and what it leaves unsaid."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvtool.report.diff_names import group_name, told_apart
from kvtool.report.diff_next import next_command
from kvtool.report.diff_order import worsening
from kvtool.report.diff_words import verdict
from kvtool.report.markdown_diff import markdown_diff

sys.path.append(str(Path(__file__).parent))
from diff_document import document, group, head, metric, numerics, token
from test_diff_views import WIDTHS, flat, printed


def rows_of(text: str, start: str = "│") -> list[list[str]]:
    """The cells of printed tables."""
    lines = [line for line in text.splitlines() if line.startswith(start)]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def next_of(**other: Any) -> str:
    return next_command(document([group(**other)], by=[]))


@pytest.mark.parametrize(
    ("fields", "a", "b"),
    [
        ({}, "snapkv@0.75@prompt-end", "snapkv@0.75@prompt-end"),
        ({"schedule_b": "every:16"}, "snapkv@0.75@prompt-end", "snapkv@0.75@every:16"),
        ({"schedule": "every:16", "schedule_b": "prompt-end"}, "snapkv@0.75@every:16", "snapkv@0.75@prompt-end"),
        ({"ratio": None, "budget": 128, "budget_b": 256}, "snapkv@128@prompt-end", "snapkv@256@prompt-end"),
        ({"ratio": 0.5, "ratio_b": None, "budget_b": 64}, "snapkv@0.5@prompt-end", "snapkv@64@prompt-end"),
        ({"ratio": 0.123456789012}, "snapkv@0.123456789012@prompt-end", "snapkv@0.123456789012@prompt-end"),
        ({"policy": "full", "ratio": None}, "full@@prompt-end", "full@@prompt-end"),
    ],
)
def test_the_next_command_pins_what_the_group_compares(fields: dict[str, Any], a: str, b: str):
    said = next_of(**fields)
    assert said.startswith(f"kvtool diff old_results::{a} 'new*results::{b}' --by layer ")


def test_the_next_command_of_two_policies_names_both_and_keeps_the_places():
    pair = group() | {"policy_a": "snapkv", "policy_b": "h2o"}
    del pair["policy"]
    assert "::snapkv@0.75@prompt-end 'new*results::h2o@0.75@prompt-end'" in next_command(document([pair], by=[]))
    assert "--by sequence,layer --markdown" in next_command(document(by=["sequence", "layer"]))


def untold(event: int | None, why: str) -> dict[str, Any]:
    return group(event=event, tokens={"lost": [], "gained": [], "not_told": why})


def test_events_do_not_claim_that_no_tokens_were_asked_for():
    nothing = "no tokens were asked for"
    asked = document([group(), *(untold(event, nothing) for event in (512, 528))])
    text = flat(printed(asked, 140))
    assert nothing not in text
    assert "Tokens: which are kept and lost is told of the whole run only, not event by event." in text
    text = flat(printed(document([untold(None, nothing), untold(512, nothing)]), 140))
    assert f"Tokens: {nothing}." in text
    assert "event by event" not in text


def test_an_event_shows_no_kept_sets_of_the_whole_run():
    text = printed(document([group(event=512)]), 140)
    assert "Kept sets" not in text
    assert "Jaccard" not in text
    assert "Jaccard" in printed(document([group()]), 140)


def test_numerics_name_the_metrics_that_moved():
    same = metric("mean_layer_error", 0.1, 0.1, "same")
    small = {f"m{i}": 10.0**-i for i in range(4, 9)}
    moved = [metric(name, 1.0, 1 + by, "within", level="head", decides=False) for name, by in small.items()]
    holes = [metric(name, None, 1.0, "undefined", undefined=1, level="head", decides=False) for name in ("u1", "u2")]
    still = [metric("s1", 1.0, 1.0, "same", level="head"), metric("s2", 1.0, 1.0, "same", level="head")]
    only = numerics() | {"metrics": [same, *reversed(moved), *holes, *still], "layers": []}
    text = printed(document([only]), 140)
    assert [row[0] for row in rows_of(text) if "within" in row[-1]] == ["m4 ↓", "m5 ↓", "m6 ↓"]
    assert "Not shown: 2 within the tolerance: m7 (+1e-05 %), m8 (+1e-06 %); 2 undefined: u1, u2; 2 the same." in flat(
        text
    )
    worse = [metric("mean_layer_error", 0.1, 0.2, "worse"), *moved]
    text = flat(printed(document([group(metrics=worse)]), 140))
    assert "Not shown: 5 within the tolerance: m4 (+0.01 %), m5 (+0.001 %), m6 (+0.0001 %) and 2 more." in text


def test_a_mean_that_hides_what_its_parts_did_does_not_stand_for_them():
    mean = metric("mean_layer_error", 0.1, 0.1, "same")
    part = metric("layer_error", 0.1, 0.1 + 1e-9, "within", level="layer")
    assert "layer_error ↓" in [row[0] for row in rows_of(printed(document([group(metrics=[mean, part])]), 140))]
    alike = part | {"verdict": "same"}
    assert "layer_error ↓" not in printed(document([group(metrics=[mean, alike])]), 140).replace("mean_layer_error", "")


def test_tokens_say_what_they_are_sorted_by():
    text = flat(printed(document(), 140))
    assert "tokens that A keeps and B loses (2 tokens, largest sum of damages first, sequence by sequence)" in text
    assert "root mean square over the heads that lose it; the order is that of the sum over these heads." in text
    unmeasured = {"damage": None, "attention_mass": None, "worst": None}
    alone = group(tokens={"lost": [token(1, "a", **unmeasured)], "gained": [], "not_told": "no trace"})
    text = flat(printed(document([alone], sequences=1, interval=None), 140))
    assert "(1 token, most KV heads first)" in text
    assert "Tokens: no trace." in text


def test_even_is_explained_where_wins_are_counted():
    text = flat(printed(document(), 140))
    assert "even (within the tolerance) 15" in text
    assert "with the smaller output error; even: within the tolerance." in text


@pytest.mark.parametrize("width", WIDTHS)
def test_the_reason_of_a_doubt_shows_at_every_width(width: int):
    doubt = {"low": 0.01, "high": 0.03, "t_low": -0.01, "t_high": 0.05, "sure": False}
    one = group(metrics=[metric("mean_layer_error", 0.08, 0.1, "worse", **doubt)])
    text = printed(document([one]), width)
    assert "↑ worse, unsure (t)" in flat(" ".join(row[-1] for row in rows_of(text)))
    assert "unsure (t): 0 lies inside Student's t interval alone." in flat(text)
    text = printed(document([group(policy, metrics=one["metrics"]) for policy in "abcd"]), width)
    verdicts = [cell for row in rows_of(text) for cell in row if "worse" in cell or cell == "(t)"]
    assert "↑ worse? (t)" in " ".join(verdicts)
    assert "A verdict with ? is unsure: 0 lies inside an interval, with (t) inside Student's t alone." in flat(text)


def test_doubts_tell_which_interval():
    moved = {"verdict": "worse", "difference": 1.0}
    assert verdict(moved | {"sure": False, "low": -1.0, "high": 2.0}) == "↑ worse, unsure"
    assert verdict(moved | {"sure": False, "low": 0.5, "high": 2.0}) == "↑ worse, unsure (t)"
    assert verdict(moved | {"sure": False, "low": 0.0, "high": 2.0}) == "↑ worse, unsure"
    assert verdict(moved | {"sure": True, "low": 0.5, "high": 2.0}) == "↑ worse"


def test_no_doubt_needs_no_explanation():
    sure = [group(policy) for policy in "abcd"]
    for one in sure:
        one["metrics"] = one["metrics"][:1]
    text = printed(document(sure), 140)
    assert "with ?" not in text
    assert "(t)" not in text


def test_significant_heads_are_named_and_stand_first():
    worst = [head(7, index, 0.5, 0.6 - index / 100, 0.3) for index in range(7)]
    worst += [head(9, 1, 0.5, 0.51, 0.001), head(9, 2, 0.5, 0.505, 0.05)]
    found = {"worse": 2, "better": 0, "tested": 270, "alpha": 0.05}
    text = printed(document([group(worst_heads=worst, significant_heads=found)]), 140)
    assert "2 worse (9.1, 9.2), 0 better." in flat(text)
    table = text[text.index("query heads, ") :]
    assert [row[0] for row in rows_of(table)[:5]] == ["9.1", "9.2", "7.0", "7.1", "7.2"]
    assert "query heads, those beyond chance first, then the most worsened first" in text
    hidden = {"worse": 1, "better": 0, "tested": 270, "alpha": 0.05}
    text = flat(printed(document([group(worst_heads=worst[:7], significant_heads=hidden)]), 140))
    assert "1 worse, not among the 7 most worsened, 0 better." in text


def test_rows_of_groups_show_what_tells_them_apart():
    pair = {"policy_a": "snapkv", "policy_b": "snapkv:window=16"}
    groups = [group() | pair | {"layer": index} for index in range(5)]
    for one in groups:
        del one["policy"]
    for width in WIDTHS:
        text = printed(document(groups), width)
        assert "snapkv → snapkv:window=16, ratio 0.75: mean_layer_error, lower is better" in flat(text)
        names = [row[0] for row in rows_of(text)]
        assert [name for name in names if name.startswith("layer ")] == [f"layer {i}" for i in range(5)]
        assert not [name for name in names if name.startswith("snapkv →")]


def test_the_whole_run_is_labelled_beside_events():
    groups = [group(event=event, schedule="every:16") for event in (None, 512, 528, 544)]
    text = printed(document(groups), 140)
    assert {row[0] for row in rows_of(text)} >= {"whole run", "event 512", "event 528", "event 544"}
    assert "snapkv, ratio 0.75, every:16: mean_layer_error" in text
    text = printed(document(groups[:2]), 140)
    assert "snapkv, ratio 0.75, every:16, whole run: behaviour" in text
    assert group_name(groups[0]) == "snapkv, ratio 0.75, every:16"


def test_what_groups_share_and_what_not():
    common, apart = told_apart([group(ratio=0.5), group(ratio=0.9), group("h2o", 0.5, schedule="every:8")])
    assert common == ""
    assert apart == [
        "snapkv, ratio 0.5, prompt-end",
        "snapkv, ratio 0.9, prompt-end",
        "h2o, ratio 0.5, every:8",
    ]
    assert told_apart([group(layer=1), group(layer=2)]) == ("snapkv, ratio 0.75", ["layer 1", "layer 2"])


def test_a_group_of_one_sequence_says_so():
    plain = [metric("mean_layer_error", 0.08, 0.1, "worse")]
    groups = [group(sequence=index, metrics=plain, sequences=1) for index in (0, 2)]
    for found in (groups, [{k: v for k, v in one.items() if k != "sequences"} for one in groups]):
        text = flat(printed(document(found), 140))
        assert "over 1 sequence (snapkv, ratio 0.75, sequence 0)" in text
        assert "over 4 sequences" not in text.lower()
        assert "Interval: " not in text
        assert "No interval: one sequence says nothing about another text" in text
    text = flat(printed(document([group(sequences=3)]), 140))
    assert "over 3 sequences." in text


def test_kept_sets_are_counted_once_however_many_groups_share_them():
    groups = [group(layer=7, kv_head=0, q_head=index) for index in range(3)]
    text = flat(printed(document(groups, kept_sets={"moved": 1, "of": 1}), 140))
    assert "B keeps other tokens than A in 1 of 1 kept set, layers" in text
    assert "246 of" not in text


def better(policy: str, b: float, **other: Any) -> dict[str, Any]:
    return group(policy, metrics=[metric("mean_layer_error", 0.1, b, "better")], **other)


def test_oracles_and_controls_stand_behind_policies():
    mean = [metric("mean_layer_error", 0.1, 0.9, "worse")]
    groups = [group(name, metrics=mean) for name in ("random", "oracle-mass", "mine")]
    groups[2]["oracle"] = True
    groups.append(group("snapkv", metrics=[metric("mean_layer_error", 0.1, 0.11, "worse")]))
    assert [one["policy"] for one in sorted(groups, key=worsening)] == ["snapkv", "oracle-mass", "mine", "random"]
    assert "B is worse: mean_layer_error 0.1000 → 0.1100, 1.10x over 4 sequences (snapkv" in flat(
        printed(document(groups), 140)
    )
    gains = [better("oracle-mass", 0.01), better("random", 0.02), better("h2o", 0.09)]
    text = flat(printed(document(gains, worse=False), 140))
    assert "B is better: mean_layer_error 0.1000 → 0.09000, 0.90x over 4 sequences (h2o, ratio 0.75)" in text
    told = better("oracle-mass", 0.01, oracle=False)
    assert "(oracle-mass, ratio 0.75)" in flat(printed(document([told, gains[2]], worse=False), 140))


def test_a_long_table_of_groups_is_cut_and_says_so():
    groups = [group(layer=index) for index in range(42)]
    text = printed(document(groups), 140)
    assert sum(row[0].startswith("layer ") and row[0][6:].isdigit() for row in rows_of(text)) == 30
    assert "and 12 more, which --json lists." in text
    assert "more, which --json lists" not in printed(document(groups[:30]), 140).replace("Only in", "")


def test_one_of_a_kind_is_singular():
    same = document([], settings=[], only_b=[], kind="identical", sequences=1, identical_groups=1)
    assert printed(same, 140).strip() == "no difference: 1 comparison over 1 sequence holds the same numbers and tokens"
    other = document(sequences=1, interval=None)
    other["b"] = other["b"] | {"trace_digest": "12" * 32}
    text = flat(printed(other, 140))
    assert "1 sequence of equal prompt and length is compared" in text
    kept = group()["kept"] | {"heads": 1, "heads_moved": 1}
    layers = group()["layers"][1:]
    text = flat(printed(document([group(kept=kept, layers=layers), better("h2o", 0.05)]), 140))
    assert "1 of 2 comparisons is worse." in text
    assert "Layer that differs: 7 (1 worse)." in text
    assert "Kept sets: 1 of 1 differs;" in text


def test_settings_that_decide_nothing_open_no_table():
    idle = [{"name": "environment.argv", "a": ["kvtool"] * 9, "b": ["x"] * 20, "decides": False}]
    page = markdown_diff(document(settings=idle))
    assert "settings that differ" not in page
    assert "Settings that decide results: all the same." in page
    assert "Differs too, but decides nothing: environment.argv." in page
