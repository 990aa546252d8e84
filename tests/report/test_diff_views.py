"""What a reader of a comparison sees, on terminals of every width and in a pull request."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kvtool.report.diff_names import group_name
from kvtool.report.diff_words import interval, number, quoted, times, verdict
from kvtool.report.markdown_diff import markdown_diff
from kvtool.report.markdown_page import code, escaped
from kvtool.report.terminal_diff import diff_parts

sys.path.append(str(Path(__file__).parent))
from diff_document import document, group, metric, numerics

WIDTHS = (80, 100, 140)


def printed(found: dict, width: int | None) -> str:
    console = Console(width=width or 300, record=True, file=io.StringIO(), highlight=False)
    for part in diff_parts(found, width):
        console.print(part)
    return console.export_text()


def flat(text: str) -> str:
    """Without the line breaks of a narrow terminal."""
    return " ".join(text.split())


def many() -> list[dict]:
    policies = ("snapkv", "jacap:tau=1,ridge=relative,leverage=false")
    return [*(group(policy, ratio) for policy in policies for ratio in (0.5, 0.75, 0.9)), numerics()]


def test_what_is_said_comes_in_the_order_of_the_questions():
    text = flat(printed(document(), 300))
    order = [
        "A: old_results",
        "B: new*results (snapkv@0.75)",
        "4 sequences compared",
        "replay.window",
        "decides nothing: environment.torch 2.3.0 → 2.4.1.",
        "Behaviour: B keeps other tokens than A in 82 of 180 kept sets, layers 0, 7; "
        "2 of these only where rounding decides.",
        "B is worse: mean_layer_error 0.08120 → 0.1023, 1.26x, "
        "95 % interval of the difference +0.0123 … +0.0307 (Student's t +0.00512 … +0.0400) over 4 sequences.",
        "mean_output_error ↓",
        "layers by layer_error",
        "A is better in 180, B in 75, even (within the tolerance) 15; at p <= 0.05 after Holm over 270 heads: "
        "3 worse (7.7, and 2 not among the 2 most worsened), 1 better.",
        "7.7",
        "Kept sets: 82 of 180 differ; Jaccard 0.843 on average, least 0.412 at layer 7, KV head 2 (sequence 1)",
        "tokens that A keeps and B loses",
        "' harbour'",
        "tokens that B keeps and A loses",
        "Only in B: h2o, ratio 0.9, every:64 (sequences 0-1: cells 2, rows 540).",
        "12 further comparisons without any difference.",
        "Tolerance: |B - A| <= absolute + relative·|A|, relative 0.001, absolute 1e-09; predicted_kl: relative 0.05.",
        "Interval: 95 %, bootstrap over sequences, percentile, 9999 resamples, seed 0.",
        "Over 4 sequences such an interval held the truth 68 to 81 times in 100.",
    ]
    places = [text.find(sentence) for sentence in order]
    assert -1 not in places, order[places.index(-1)]
    assert places == sorted(places)


def test_a_policy_that_one_side_lacks_is_one_setting():
    name = "replay.policies[knorm:scale=2]"
    lacking = [(f"{name}.class", "absent", "KNorm"), (f"{name}.parameters.scale", "absent", 2)]
    kept = [("replay.policies[snapkv].parameters.window", 64, 16)]
    settings = [{"name": n, "a": a, "b": b, "decides": True} for n, a, b in lacking + kept]
    page = markdown_diff(document(settings=settings))
    assert f"| `{name}` | `absent` | `KNorm` |" in page
    assert "parameters.scale" not in page
    assert "| `replay.policies[snapkv].parameters.window` | `64` | `16` |" in page


def test_many_settings_that_decide_nothing_are_counted():
    versions = [{"name": f"environment.v{i}", "a": i, "b": i + 1, "decides": False} for i in range(9)]
    other = [{"name": "trace.path", "a": "x", "b": "y", "decides": False}]
    text = flat(printed(document(settings=versions + other), 140))
    assert "Differ too, but decide nothing: environment (9 settings), trace.path x → y." in text


def test_the_first_token_is_first_by_sequence_layer_and_head():
    places = ("sequence 1, layer 0, KV head 0", "sequence 0, layer 15, KV head 1", "sequence 0, layer 7, KV head 2")
    groups = [group(ratio=0.5 + 0.1 * i, first=f"{place} loses token 9 'a'") for i, place in enumerate(places)]
    assert "; first: sequence 0, layer 7, KV head 2 loses token 9 'a'" in flat(printed(document(groups), 140))


def test_equal_results_take_one_line():
    same = document([], settings=[], only_b=[], kind="identical")
    assert printed(same, 140).splitlines() == [
        "no difference: 12 comparisons over 4 sequences hold the same numbers and tokens"
    ]
    assert markdown_diff(same).splitlines()[0] == "### kvtool diff: passed, identical"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("groups", [[group()], many(), [numerics()]], ids=["one", "many", "numerics"])
def test_no_width_cuts_a_number(width: int, groups: list[dict]):
    found = document(groups)
    text = printed(found, width)
    assert max(len(line) for line in text.splitlines()) <= width
    for line in text.splitlines():
        if line.startswith("│"):  # the only ellipses are between the ends of an interval and behind digests
            bare = re.sub(r"[-+0-9.e]+ … [-+0-9.e]+|ab…", "", line)
            assert "…" not in bare, line
    for entry in groups[0]["metrics"]:
        if entry["verdict"] != "undefined" and entry["level"] == "cell":
            assert number(entry["a"]) in text
            assert number(entry["b"]) in text
    if groups[0]["kind"] == "behaviour":
        assert interval(groups[0]["metrics"][0]) in text


def test_many_comparisons_get_one_line_each_and_only_the_worst_are_told_whole():
    text = printed(document(many()), 140)
    assert text.count("│ ↑ worse") >= 6
    assert text.count("layers by layer_error") == 3
    assert "the 3 that matter most of 7; --json has all." in text
    assert "6 of 7 comparisons are worse." in text
    assert text.index("snapkv, ratio 0.5") < text.index("knorm, ratio 0.5")


def test_numerics_are_called_so():
    text = flat(printed(document([numerics()], ties=0), 140))
    assert "Numerics only: B keeps the same tokens as A, and only numbers moved." in text
    assert "neither better nor worse: every metric stays within the tolerance (relative 0.001, absolute 1e-09" in text
    assert "Kept sets: the same in all 180 (one per sequence, layer and KV head)." in text


def test_a_higher_better_metric_that_falls_is_worse_and_leads():
    falls = metric("mass_retained", 0.9, 0.8, "worse", level="head", direction="higher")
    one = group(metrics=[metric("mean_layer_error", 0.1, 0.1, "same"), falls])
    text = flat(printed(document([one]), 140))
    assert (
        "B is worse: mass_retained 0.9000 → 0.8000, 0.89x over 4 sequences; but "
        "mean_layer_error 0.1000 → 0.1000, 1.00x, is the same."
    ) in text
    assert "mass_retained ↑" in text
    assert "↓ worse" in text


def test_one_sequence_has_no_interval_and_says_so():
    alone = group(metrics=[metric("mean_layer_error", 0.08, 0.1, "worse")], worst_heads=[])
    text = flat(printed(document([alone], sequences=1, interval=None), 140))
    assert "over 1 sequence, so without an interval." in text
    assert "No interval: one sequence says nothing about another text" in text
    assert "95 % interval" not in text


def test_rows_that_are_missing_are_no_pass():
    missing = [{"policy": "knorm", "ratio": 0.5, "budget": None, "schedule": "prompt-end", "event": None}]
    missing = [{**missing[0], "sequence": 0, "table": "rows", "rows": 45}]
    found = document([], only_a=missing, only_b=[], worse=True, kind="identical")
    text = flat(printed(found, 140))
    assert "Not passed: 45 rows of A missing in B." in text
    assert "Identical in what both sides hold: same tokens, same numbers." in text
    assert "Only in A: knorm, ratio 0.5 (sequence 0: rows 45). (a comparison with holes is no pass)" in text
    assert markdown_diff(found).startswith("### kvtool diff: rows are missing in B\n")


def test_other_traces_are_said_first():
    found = document()
    found["b"] = found["b"] | {"trace_digest": "12" * 32}
    text = flat(printed(found, 140))
    assert text.index("The traces differ (A f8f8f8f8f8f8…, B 121212121212…)") < text.index("replay.window")


def test_tokens_cannot_command_the_terminal():
    text = printed(document(), 140)
    assert "\x1b" not in text
    assert r"'\x1b[31m the'" in text
    assert r"'|\n`<b>`@all'" in text


def test_markdown_tables_keep_their_shape_whatever_tokens_hold():
    text = markdown_diff(document())
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("| ")]
    assert len(tables) == 6
    for table in tables:
        pipes = {len(re.findall(r"(?<!\\)\|", line)) for line in table}
        assert len(pipes) == 1, table
    outside = re.sub(r"(`+).*?\1", "", text)
    tags = set(re.findall(r"<[^>]*>", outside))
    assert tags == {"<details>", "<summary>", "</summary>", "</details>", "<!-- -->"}
    assert text.count("<details>") == text.count("</details>") == 1
    assert "@all" not in outside


def test_markdown_says_what_the_terminal_says():
    terminal, page = flat(printed(document(), 300)), markdown_diff(document())
    plain = re.sub(r"\\([\\`*_{}\[\]|~#])", r"\1", page.replace("<!-- -->", ""))
    plain = plain.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    for sentence in re.findall(r"(?:Behaviour|B is worse|Kept sets|Only in B|Tolerance|Interval): [^.]+\.", terminal):
        assert sentence in flat(plain)
    for cell in ("+0.0123 … +0.0307", "7 / 2 / 9", "< 0.0001", "0.4125 at 7.7", "41 of 90", "↓ better, unsure"):
        assert cell in terminal
        assert cell in plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a|b", r"a\|b"),
        ("*x*_y_", r"\*x\*\_y\_"),
        ("<img src=x>", "&lt;img src=x&gt;"),
        ("a & b", "a &amp; b"),
        ("snapkv@0.5", "snapkv@<!-- -->0.5"),
        ("see #12", r"see \#<!-- -->12"),
        ("https://a.b", "https://<!-- -->a.b"),
        ("- no list", r"\- no list"),
        ("[x](y)", r"\[x\](y)"),
        ("two\nlines", "two lines"),
    ],
)
def test_escapes(text: str, shown: str):
    assert escaped(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x", "`x`"),
        ("a|b", r"`a\|b`"),
        ("a`b", "`` a`b ``"),
        ("``", "``` `` ```"),
        (" x ", "`  x  `"),
        ("-", "-"),
        ("", ""),
    ],
)
def test_code_spans(text: str, shown: str):
    assert code(text) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.1, "0.1000"),
        (1234.5, "1234.5"),
        (512.0, "512.0"),
        (2048.0, "2048"),
        (1e-9, "1.000e-09"),
    ],
)
def test_numbers(value: float | None, shown: str):
    assert number(value) == shown


def test_small_words():
    assert times(None) == "-"
    assert times(1.26) == "1.26x"
    assert times(1.0000001) == "1.0000x"
    assert times(12345.0) == "1.23e+04x"
    assert verdict({"verdict": "within", "difference": 1e-9}) == "≈ within"
    assert verdict({"verdict": "moved", "difference": -1.0, "sure": None}) == "↓ moved"
    assert quoted(None) == "-"
    assert quoted("\u202e") == r"'\u202e'"
    assert quoted("x" * 99) == f"'{'x' * 24}…'"


def test_names_say_what_differs_between_the_sides():
    assert group_name({"policy_a": "snapkv", "policy_b": "h2o", "ratio": 0.75}) == "snapkv → h2o, ratio 0.75"
    one = {"policy": "snapkv", "ratio": 0.5, "ratio_b": 0.9, "schedule": "every:64", "evaluate": "pool", "layer": 7}
    assert group_name(one) == "snapkv, ratio 0.5 → ratio 0.9, every:64, pool, layer 7"
    assert group_name({"policy": "full", "ratio": None, "budget": None}) == "full, the whole cache"


def test_names_cannot_command_the_terminal():
    found = document([group("mine\x1b[2J.py:Mine")])
    found["a"] = found["a"] | {"path": "old\x1b]0;x\x07"}
    found["settings"] = [{"name": "replay.window", "a": "\x1b[31m", "b": 31, "decides": True}]
    text = printed(found, 140)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert r"mine\x1b[2J.py:Mine, ratio 0.75" in text


def test_a_table_of_many_shows_both_sides_on_80_columns():
    text = printed(document(many()), 80)
    line = next(line for line in text.splitlines() if line.startswith("│ snapkv, ratio 0.5"))
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "snapkv, ratio 0.5",
        "0.08120",
        "0.1023",
        "+0.0123 … +0.0307",
        "↑ worse",
    ]


def test_details_that_are_worse_are_named_and_decide_nothing():
    gain = metric("mean_layer_error", 0.1, 0.08, "better")
    detail = metric("output_error_p99", 0.2, 0.3, "worse", level="head", decides=False)
    one = document([group(metrics=[detail, gain])]) | {"worse": False}
    text = flat(printed(one, 140))
    assert "B is better: mean_layer_error" in text
    assert "Details that are worse, and decide nothing: output_error_p99." in text
    assert "output_error_p99 explains, and decides nothing." in text
    within = document([group(metrics=[detail, metric("mean_layer_error", 0.1, 0.1, "same")])]) | {"worse": False}
    assert "what decides stays within the tolerance" in flat(printed(within, 140))


def test_what_cannot_be_held_against_each_other_is_no_pass() -> None:
    one = document([], worse=True, kind="identical") | {"refused": ["layer_error is version 1 in A and 2 in B", "x"]}
    text = flat(printed(one, 140))
    assert "Identical in what both sides hold" in text
    assert "Not passed: layer_error is version 1 in A and 2 in B; and 1 more." in text


def test_the_headline_speaks_of_whole_runs_whatever_groups_are_told_apart_by() -> None:
    whole = group(metrics=[metric("mean_layer_error", 0.1, 0.2, "worse")])
    layer_3 = group(metrics=[metric("layer_error", 0.3, 0.1, "better", level="layer")], layer=3)
    text = flat(printed(document([layer_3]) | {"whole": [whole], "by": ["layer"]}, 140))
    assert "B is worse: mean_layer_error 0.1000 → 0.2000" in text
