"""What a selector picks, how two sides find each other, and which settings differ then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from planted import TINY, tiny

from kvtool.compare import diff
from kvtool.compare.settings import differing_settings
from kvtool.compare.sides import matched, side_of
from kvtool.errors import KvtoolError
from kvtool.result import ABLATE, Result

LABEL = "snapkv:window=8"


@pytest.mark.parametrize(
    ("selector", "pins"),
    [
        ("", {}),
        ("h2o", {"policy": "h2o"}),
        ("snapkv", {"policy": LABEL}),
        (LABEL, {"policy": LABEL}),
        ("snapkv@0.75", {"policy": LABEL, "asked": (0.75, None)}),
        (f"{LABEL}@3/4", {"policy": LABEL, "asked": (0.75, None)}),
        ("@0.5", {"asked": (0.5, None)}),
        ("@@prompt-end", {"schedule": "prompt-end"}),
        ("h2o@0.5@prompt-end", {"policy": "h2o", "asked": (0.5, None), "schedule": "prompt-end"}),
    ],
)
def test_selectors(selector: str, pins: dict[str, Any], tmp_path: Path) -> None:
    result = tiny()
    assert side_of((result, selector), "A").pins == pins
    result.save(tmp_path / "r")
    spelled = f"{tmp_path / 'r'}::{selector}" if selector else str(tmp_path / "r")
    assert side_of(spelled, "A").pins == pins


@pytest.mark.parametrize("selector", ["", "@", "@@", " "])
def test_a_selector_without_content_is_refused(selector: str, tmp_path: Path) -> None:
    result = tiny()
    result.save(tmp_path / "r")
    with pytest.raises(KvtoolError, match="the selector of B selects nothing") as caught:
        side_of(f"{tmp_path / 'r'}::{selector}", "B")
    assert caught.value.code == "usage"
    assert "or RESULT alone" in str(caught.value.hint)
    if selector:
        with pytest.raises(KvtoolError, match="the selector of A selects nothing"):
            side_of((result, selector), "A")


@pytest.mark.parametrize("given", ["::h2o", "", " ::@0.5", "::"])
def test_an_empty_path_is_refused(given: str) -> None:
    with pytest.raises(KvtoolError, match="A names no result: ") as caught:
        side_of(given, "A")
    assert caught.value.code == "usage"


def test_a_trace_in_place_of_a_result_points_to_the_option() -> None:
    with pytest.raises(KvtoolError, match=r"tiny-gqa\.zarr\) is a trace, no result") as caught:
        diff(TINY, TINY)
    assert (caught.value.code, caught.value.hint) == ("usage", "--traces compares two traces")


def test_budgets_and_schedules_are_selected() -> None:
    result = tiny(schedules=("every:8", "prompt-end"))
    side = side_of((result, "h2o@40@every:8"), "B")
    assert side.pins == {"policy": "h2o", "asked": (None, 40), "schedule": "every:8"}
    found = diff((result, "h2o@40@every:8"), (result, "h2o@40@prompt-end"), tokens=0)
    assert [(g["schedule"], g["schedule_b"], g["event"]) for g in found.groups] == [("every:8", "prompt-end", None)]
    assert found.document()["only_a"]  # events that the other schedule has not
    assert not found.worse or any(m["verdict"] == "worse" for g in found.groups for m in g["metrics"])


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        ("tova", "holds no policy 'tova'"),
        ("h2o@0.6", "was not asked for 0.6"),
        ("h2o@1.5", "no ratio below 1 and no whole budget"),
        ("h2o@many", "is no ratio and no budget"),
        ("h2o@1/0", "is no ratio and no budget"),
        ("h2o@256", "was not asked for 256"),
        ("h2o@0.5@every:8", "holds no schedule 'every:8'"),
    ],
)
def test_selectors_that_fit_nothing_say_what_there_is(selector: str, words: str) -> None:
    with pytest.raises(KvtoolError, match=words) as caught:
        side_of((tiny(), selector), "A")
    assert caught.value.code == "usage"
    assert caught.value.hint


def test_a_name_that_several_labels_share_is_refused() -> None:
    result = tiny()
    column = [LABEL if p != "h2o" else "snapkv:window=4" for p in result.tables["cells"].column("policy").to_pylist()]
    table = result.tables["cells"]
    result.tables["cells"] = table.set_column(table.column_names.index("policy"), "policy", [column])
    with pytest.raises(KvtoolError, match="A holds several snapkv"):
        side_of((result, "snapkv"), "A")


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvtoolError, match="holds no finished result"):
        diff(tmp_path, tmp_path)
    result = tiny()
    with pytest.raises(KvtoolError, match=r"kvtool\.ablate/1, which has no rows to compare"):
        diff(Result(result.manifest, result.tables, [], ABLATE), result)


def test_two_policies_of_one_result_are_paired() -> None:
    result = tiny()
    found = diff((result, "snapkv@0.75"), (result, "h2o@0.75"), tokens=0)
    (group,) = found.groups
    assert (group["policy_a"], group["policy_b"], group["ratio"]) == (LABEL, "h2o", 0.75)
    assert "policy" not in group
    assert found.document()["only_a"] == found.document()["only_b"] == []
    names = [one["name"] for one in found.settings]
    assert names[:3] == ["policy", "policy.class", "policy.source"]
    assert "policy.parameters.window" not in names  # only one of them has it
    assert not [name for name in names if name.startswith(("replay", "environment"))]


def test_two_ratios_of_one_policy_are_paired() -> None:
    result = tiny()
    found = diff((result, "h2o@0.5"), (result, "h2o@0.75"), tokens=0)
    (group,) = found.groups
    assert (group["policy"], group["ratio"], group["ratio_b"]) == ("h2o", 0.5, 0.75)
    assert found.settings == [{"name": "ratio", "a": 0.5, "b": 0.75, "decides": True}]
    assert found.kind == "behaviour"


def test_every_ratio_of_two_policies_is_paired() -> None:
    result = tiny()
    found = diff((result, "snapkv"), (result, "h2o"), tokens=0)
    assert [(g["policy_a"], g["policy_b"], g["ratio"]) for g in found.groups] == [
        (LABEL, "h2o", 0.5),
        (LABEL, "h2o", 0.75),
    ]


def test_what_one_side_selects_is_looked_up_in_the_other(tmp_path: Path) -> None:
    result = tiny()
    again = Result(dict(result.manifest), result.tables, [], result.schema)
    a, b, said = matched(side_of((result, "h2o@0.5"), "A"), side_of(again, "B"))
    assert a.pins == b.pins
    assert said == [
        "of B only policy h2o is compared, since that is what the other side selects",
        "of B only ratio 0.5 is compared, since that is what the other side selects",
    ]
    found = diff((result, "h2o@0.5"), again)
    assert (found.kind, found.groups, found.warnings) == ("identical", [], said)
    for selectors in (("h2o@0.5", ""), ("h2o", "h2o@0.5"), ("", "h2o"), ("h2o@0.5", "h2o@0.5@prompt-end")):
        with pytest.raises(KvtoolError, match="come down to the same cells"):
            diff((result, selectors[0]), (result, selectors[1]))
    assert diff((result, "h2o@0.5"), (result, "h2o@0.5")).empty
    result.save(tmp_path / "r")
    with pytest.raises(KvtoolError, match="come down to the same cells"):
        diff(f"{tmp_path}/r::h2o", f"{tmp_path}/../{tmp_path.name}/r::h2o@0.5")
    other = Result(result.manifest, {name: _only(t, "h2o") for name, t in result.tables.items()}, [], result.schema)
    with pytest.raises(KvtoolError, match="only one side selects policy h2o, and B has none"):
        diff((result, "h2o"), Result(result.manifest, {n: _without(t, "h2o") for n, t in several(result).items()}, []))
    assert diff((result, "snapkv@0.5"), other, tokens=0).groups[0]["policy_b"] == "h2o"


def several(result: Result) -> dict[str, Any]:
    """The tables with a second policy beside h2o and snapkv."""
    tables = {}
    for name, table in result.tables.items():
        renamed = ["knorm" if p == "random" else p for p in table.column("policy").to_pylist()]
        tables[name] = table.set_column(table.column_names.index("policy"), "policy", [renamed])
    return tables


def _only(table: Any, policy: str) -> Any:
    return table.take([i for i, p in enumerate(table.column("policy").to_pylist()) if p in (policy, "full", "random")])


def _without(table: Any, policy: str) -> Any:
    return table.take([i for i, p in enumerate(table.column("policy").to_pylist()) if p != policy])


def test_settings_are_told_field_by_field_what_decides_first() -> None:
    a, b = tiny(), tiny()
    policies = b.manifest["replay"]["policies"]
    policies[0]["parameters"]["kernel"] = 7
    policies[1]["source"] = "f" * 64
    policies[1]["package"] = {"name": "mine", "version": "1.0"}
    policies[2]["package"]["version"] = "another"  # of kvtool: environment.versions says it once
    b.manifest["replay"]["precision"] = "float32"
    b.manifest["replay"]["sinks"] = 2
    b.manifest["environment"]["versions"]["torch"] = "0.1"
    b.manifest["trace"]["digest"] = "1" * 64
    b.manifest["metrics"]["layer_error"] = 9
    found = differing_settings(side_of(a, "A"), side_of(b, "B"))
    assert [(one["name"], one["decides"]) for one in found] == [
        ("trace.digest", True),
        (f"replay.policies[{LABEL}].parameters.kernel", True),
        ("replay.policies[h2o].source", True),
        ("replay.policies[h2o].package", True),
        ("replay.sinks", True),
        ("replay.precision", True),
        ("metrics.layer_error", True),
        ("environment.versions.torch", False),
    ]
    assert (found[1]["a"], found[1]["b"]) == (5, 7)
    assert (found[3]["a"], found[3]["b"]) == (None, "mine 1.0")


def test_a_policy_of_one_side_only_is_a_setting_and_its_rows_are_listed() -> None:
    a = tiny()
    b = Result(a.manifest, {name: _without(table, "h2o") for name, table in a.tables.items()}, [], a.schema)
    b.manifest = {**a.manifest, "replay": {**a.manifest["replay"]}}
    b.manifest["replay"]["policies"] = [p for p in a.manifest["replay"]["policies"] if p["label"] != "h2o"]
    found = diff(a, b)
    assert found.worse
    assert {entry["policy"] for entry in found.document()["only_a"]} == {"h2o"}
    assert {entry["table"] for entry in found.document()["only_a"]} == {"cells", "layers", "rows", "evict_steps"}
    assert {"name": "replay.policies[h2o].class", "a": "H2O", "b": "absent", "decides": True} in found.settings
    assert diff(a, a, metrics="output_error").settings == []
