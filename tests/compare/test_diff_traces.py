"""Two traces of the same tokens: what was planted in one of them is named, and rounding alone is not."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_traces import Arrays, geometries, write

from kvtool.compare.trace_rows import deviations
from kvtool.compare.traces import diff_traces
from kvtool.compare.traces_diff import TracesDiff, layer_bound
from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.report.terminal_traces import traces_tables
from kvtool.trace import Trace

torch.set_num_threads(1)


@pytest.fixture
def plain(tmp_path: Path) -> Trace:
    return write(tmp_path / "a.zarr")


def planted(sequence: int, layer: int, array: str, place: tuple[int, ...], value: float | torch.Tensor) -> Any:
    def plant(s: int, i: int, arrays: Arrays) -> None:
        if (s, i) == (sequence, layer):
            arrays[array][place] = value

    return plant


def check_sound(diff: TracesDiff) -> None:
    """Documents are JSON, and the table prints whatever was found."""
    from rich.console import Console

    json.dumps(diff.document(), allow_nan=False)
    console = Console(width=160, record=True, file=io.StringIO())
    for part in traces_tables(diff):
        console.print(part)
    printed = console.export_text()
    for sentence in diff.findings():
        assert sentence[:60] in printed.replace("\n", "")


@pytest.mark.parametrize(
    ("array", "place", "expected"),
    [
        ("keys", (1, 14, 2), {"token": 14, "kv_head": 1, "q_head": None}),
        ("values", (0, 3, 1), {"token": 3, "kv_head": 0, "q_head": None}),
        ("queries", (3, 9, 0), {"token": 9, "kv_head": 1, "q_head": 3}),
        ("output_sample", (2, 1, 1), {"token": 17, "kv_head": 1, "q_head": 2}),
    ],
)
def test_one_planted_number_is_named(
    plain: Trace, tmp_path: Path, array: str, place: tuple[int, ...], expected: dict[str, Any]
) -> None:
    b = write(tmp_path / "b.zarr", plant=planted(1, 5, array, place, 7.5))
    diff = diff_traces(plain, b)
    assert diff.parted
    assert diff.first is not None
    named = {"sequence": 1, "layer": 5, "array": array, **expected, "position": expected["token"] + 7}
    assert {name: diff.first[name] for name in named} == named
    assert diff.first["text"] == f"w{expected['token']}\n"
    x = plain.sequences[1].head(array, 5, place[0]).double()
    y = b.sequences[1].head(array, 5, place[0]).double()
    row = place[1]
    rms = math.sqrt(float(x.square().sum(1).mean()))
    assert diff.first["deviation"] == pytest.approx(
        float((x - y)[row].norm()) / max(float(x[row].norm()), rms), rel=1e-12
    )
    off = [line for line in diff.layers if line["heads_off"]]
    assert [(line["sequence"], line["layer"], line["array"]) for line in off] == [(1, 5, array)]
    assert (off[0]["heads_off"], off[0]["tokens_off"], off[0]["first_token_off"]) == (1, 1, expected["token"])
    assert off[0]["at"] == {name: expected[name] for name in ("token", "kv_head", "q_head")}
    assert off[0]["largest"] == diff.first["deviation"]
    assert sum(line["unequal"] for line in diff.layers) == 1
    (sentence, *_) = diff.findings()
    assert "sequence 1, layer 5, at row" in sentence
    assert "\\n'" in sentence
    assert "\n" not in sentence
    check_sound(diff)


def test_the_first_is_by_sequence_layer_token_head(plain: Trace, tmp_path: Path) -> None:
    def plant(s: int, i: int, arrays: Arrays) -> None:
        if s == 1 and i == 2:
            arrays["keys"][0, 0] += 9
        if s == 0 and i == 3:
            arrays["values"][1, 5] += 9
            arrays["queries"][1, 5] += 9  # KV head 0, the same token
            arrays["queries"][0, 6] += 9
            arrays["keys"][0, 8] += 9
        if s == 0 and i == 5:
            arrays["keys"][0, 0] += 9

    diff = diff_traces(plain, write(tmp_path / "b.zarr", plant=plant))
    named = {"sequence": 0, "layer": 3, "token": 5, "kv_head": 0, "q_head": 1, "array": "queries"}
    assert {name: diff.first[name] for name in named} == named
    queries = next(x for x in diff.layers if (x["sequence"], x["layer"], x["array"]) == (0, 3, "queries"))
    assert (queries["heads_off"], queries["tokens_off"], queries["heads"], queries["rows"]) == (2, 2, 4, 26)
    assert "3 of 4 layers part: 2-3,5" in diff.findings()


def test_an_earlier_token_of_a_later_head_comes_first(plain: Trace, tmp_path: Path) -> None:
    def plant(s: int, i: int, arrays: Arrays) -> None:
        if (s, i) == (0, 3):
            arrays["keys"][0, 8] += 9
            arrays["values"][1, 5] += 9
            arrays["queries"][2, 5] += 9  # KV head 1, the same token: computed together, named later

    diff = diff_traces(plain, write(tmp_path / "b.zarr", plant=plant))
    named = {"layer": 3, "token": 5, "kv_head": 1, "q_head": None, "array": "values"}
    assert {name: diff.first[name] for name in named} == named


def test_the_same_bytes_and_the_same_numbers(plain: Trace, tmp_path: Path) -> None:
    same = diff_traces(plain, plain)
    assert (same.identical, same.parted, same.layers) == (True, False, [])
    again = diff_traces(plain, write(tmp_path / "b.zarr", capture={"chunk": 512}))
    assert (again.identical, again.parted) == (False, False)
    assert again.settings == [{"name": "capture.chunk", "a": None, "b": 512}]
    assert again.findings() == ["every row that both hold is equal to the bit"]
    # keys and values of the layer that reads another's cache are compared there, once
    assert {line["array"] for line in again.layers if line["layer"] == 8} == {"queries", "output_sample"}
    assert len(again.layers) == 2 * (3 * 4 + 2)
    check_sound(same)
    check_sound(again)


@pytest.mark.parametrize("layer", [2, 5])
def test_the_bound_grows_with_the_layers_before(plain: Trace, tmp_path: Path, layer: int) -> None:
    allowed = layer_bound(1e-5, layer)
    assert allowed == 2e-5 * math.sqrt(1 + layer)
    for part, parts in ((0.98, False), (1.02, True)):
        # A row longer than the root mean square of its head is measured against its own norm.
        x = plain.sequences[0].head("keys", layer, 0).double()
        row = int(x.norm(dim=1).argmax())

        def plant(s: int, i: int, arrays: Arrays, row: int = row, part: float = part) -> None:
            if (s, i) == (0, layer):
                arrays["keys"][0, row] *= 1 + part * allowed

        diff = diff_traces(plain, write(tmp_path / f"{part}.zarr", plant=plant))
        assert diff.parted is parts
        assert max(line["largest"] for line in diff.layers) == pytest.approx(part * allowed, rel=0.01)
        assert diff_traces(plain, write(tmp_path / f"{part}-b.zarr", plant=plant), relative=1.0).parted is False
        assert diff_traces(plain, write(tmp_path / f"{part}-c.zarr", plant=plant), relative=1e-7).parted is True


@pytest.mark.parametrize("huge", ["both", "a", "b"])
def test_a_few_huge_rows_hide_nothing_of_the_others(huge: str) -> None:
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = x.clone()
    y[4] *= 0.5
    plain = float(deviations(x, y)[4])
    for side in (x, y):
        if huge == "both" or side is {"a": x, "b": y}[huge]:
            side[20] *= 1e7
    assert float(deviations(x, y)[4]) == pytest.approx(plain, rel=0.2)
    assert plain > 0.3


def test_a_row_that_nearly_cancels_is_measured_against_its_head() -> None:
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[7] *= 1e-9
    y = x + 1e-7
    found = deviations(x, y)
    rms = math.sqrt(float(x.square().sum(1).mean()))
    assert float(found[7]) == pytest.approx(1e-7 * math.sqrt(8) / rms, rel=1e-6)
    assert float(found.max()) < 2e-7
    assert float(deviations(torch.zeros(3, 4), torch.zeros(3, 4)).max()) == 0.0
    assert float(deviations(torch.zeros(3, 4), torch.ones(3, 4)).max()) == 1.0
    assert deviations(torch.zeros(0, 4), torch.zeros(0, 4)).shape == (0,)


def test_blocks_of_rows_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(1))
    whole = deviations(x, y)
    monkeypatch.setattr("kvtool.compare.trace_rows.BLOCK_ROWS", 7)
    assert torch.equal(deviations(x, y), whole)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sides", ["a", "b", "ab"])
def test_nan_and_infinity_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, sides: str) -> None:
    """kvtool refuses to write them; another writer may not."""
    monkeypatch.setattr("kvtool.trace.spool.Spool._refuse_not_finite", lambda self, block: None)
    plant = planted(0, 3, "values", (1, 4, 2), value)
    made = {
        side: write(tmp_path / f"{side}.zarr", plant=plant if side in sides else None, capture={"chunk": ord(side)})
        for side in "ab"
    }
    diff = diff_traces(made["a"], made["b"])
    assert diff.parted
    named = {"layer": 3, "array": "values", "token": 4, "kv_head": 1, "deviation": None}
    assert {name: diff.first[name] for name in named} == named
    assert [line["tokens_off"] for line in diff.layers if line["heads_off"]] == [1]
    assert "not a number" in diff.findings()[0]
    check_sound(diff)


@pytest.mark.parametrize(("stored", "wide"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_traces_stored_in_16_bits(plain: Trace, tmp_path: Path, stored: torch.dtype, wide: float) -> None:
    """Rounding on the way to the disk is within the bound of the wider dtype; ten times as much is not."""
    short = write(tmp_path / "b.zarr", dtype=stored)
    diff = diff_traces(plain, short)
    assert (diff.bound, diff.parted) == (wide, False)
    assert max(line["largest"] for line in diff.layers) > 1e-4
    # planted in 16 bits, both sides stored alike
    factor = 1 + 10 * layer_bound(wide, 3)

    def plant(s: int, i: int, arrays: Arrays) -> None:
        if (s, i) == (1, 3):
            arrays["queries"][2, 6] *= factor

    found = diff_traces(short, write(tmp_path / "c.zarr", dtype=stored, plant=plant))
    assert (found.first["layer"], found.first["token"], found.first["q_head"]) == (3, 6, 2)
    check_sound(diff)


def test_a_float32_pair_is_not_judged_by_the_bound_of_16_bits(plain: Trace, tmp_path: Path) -> None:
    plant = planted(0, 2, "values", (0, 3, 0), float(plain.sequences[0].head("values", 2, 0)[3, 0]) + 1e-3)
    assert diff_traces(plain, write(tmp_path / "b.zarr", plant=plant)).parted
    assert not diff_traces(plain, write(tmp_path / "c.zarr", plant=plant, run_dtype="bfloat16")).parted


def test_other_tokens_are_named_and_compared_up_to_there(plain: Trace, tmp_path: Path) -> None:
    def plant(s: int, i: int, arrays: Arrays) -> None:
        if (s, i) == (0, -1):
            arrays["tokens"][[11, 13]] = 5
        if (s, i) == (0, 2):
            arrays["keys"][:, 11:] += 1

    diff = diff_traces(plain, write(tmp_path / "b.zarr", plant=plant, text=False))
    assert diff.parted
    assert diff.first is None
    expected = {"sequence": 0, "what": "token", "row": 11, "differing": 2, "a": 11, "b": 5}
    (entry,) = diff.tokens
    assert entry == {**expected, "text_a": "w11\n", "text_b": None}
    assert {line["rows"] for line in diff.layers if line["sequence"] == 0} == {11, 0}  # no output that early
    assert {line["rows"] for line in diff.layers if line["sequence"] == 1} == {19, 3}
    assert "differ first at row 11, 11 'w11\\n' in A and 5 in B" in diff.findings()[0]
    check_sound(diff)


def test_positions_that_differ_are_named(plain: Trace, tmp_path: Path) -> None:
    def plant(s: int, i: int, arrays: Arrays) -> None:
        if (s, i) == (1, -1):
            arrays["positions"] += torch.arange(19) // 18

    diff = diff_traces(plain, write(tmp_path / "b.zarr", plant=plant))
    assert [(entry["what"], entry["row"], entry["a"], entry["b"]) for entry in diff.tokens] == [
        ("position", 18, 25, 26)
    ]
    assert diff.parted


def test_another_prompt_length_is_named(plain: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toy_traces.BEHIND", 7)
    diff = diff_traces(plain, write(tmp_path / "b.zarr"))
    assert [(entry["what"], entry["a"], entry["b"]) for entry in diff.tokens] == [
        ("prompt_length", 18, 19),
        ("prompt_length", 11, 12),
    ]
    assert diff.parted
    assert "sequence 0: the prompt has 18 tokens in A and 19 in B" in diff.findings()
    check_sound(diff)


def test_layers_and_sequences_that_one_lacks_are_no_pass(plain: Trace, tmp_path: Path) -> None:
    made = {index: geometry for index, geometry in geometries().items() if index != 5}
    fewer = write(tmp_path / "b.zarr", made=made, lengths=(26,))
    diff = diff_traces(plain, fewer)
    assert (diff.first, diff.parted) == (None, True)
    assert diff.only_a == [
        {"sequence": 0, "layer": 5, "array": None, "rows": None},
        {"sequence": 1, "layer": None, "array": None, "rows": None},
    ]
    assert diff.only_b == []
    assert {line["layer"] for line in diff.layers} == {2, 3, 8}
    back = diff_traces(fewer, plain)
    assert (back.only_a, back.only_b) == ([], diff.only_a)
    assert "only A holds layer 5 of sequence 0" in diff.findings()
    assert "only B holds sequence 1" in back.findings()
    check_sound(diff)


def test_queries_of_other_steps_compare_the_common_ones(plain: Trace, tmp_path: Path) -> None:
    def late(count: int) -> torch.Tensor:
        return torch.arange(count - 6, count)

    b = write(tmp_path / "b.zarr", query_steps=late, samples=False, plant=planted(0, 3, "queries", (2, 22, 1), 8.0))
    diff = diff_traces(plain, b)
    assert (diff.first["token"], diff.first["q_head"], diff.first["array"]) == (22, 2, "queries")
    assert {line["rows"] for line in diff.layers if line["array"] == "queries"} == {6}
    assert {"sequence": 0, "layer": 2, "array": "queries", "rows": 20} in diff.only_a
    assert {"sequence": 0, "layer": 2, "array": "output_sample", "rows": None} in diff.only_a
    assert diff.only_b == []
    assert any("queries of 20 steps of layers 2-3,5,8 of sequence 0" in sentence for sentence in diff.findings())
    check_sound(diff)


def test_geometry_that_differs_is_told_by_layer_and_name(plain: Trace, tmp_path: Path) -> None:
    made = geometries()
    sinks = made[3].sink_logits
    assert sinks is not None
    made[2] = replace(made[2], scale=0.61, softcap=None)
    made[3] = replace(made[3], window=10, sink_logits=sinks + torch.tensor([0.0, 0.0, 0.0, 1e-3]))
    made[8] = replace(made[8], sink_logits=None)
    diff = diff_traces(plain, write(tmp_path / "b.zarr", made=made))
    assert diff.parted
    told = {(entry["layer"], entry["name"]): (entry["a"], entry["b"]) for entry in diff.geometry}
    assert told == {
        (2, "scale"): (0.6, 0.61),
        (2, "softcap"): (3.0, None),
        (3, "window"): (9, 10),
        (3, "sink_logits"): (0.25, pytest.approx(0.251)),
        (8, "sink_logits"): ([4], None),
    }
    assert "and 1 more like these" in diff.findings()
    check_sound(diff)


def test_a_cache_of_ones_own_against_a_shared_one(plain: Trace, tmp_path: Path) -> None:
    made = geometries()
    made[8] = replace(made[8], kv_source=None)
    diff = diff_traces(plain, write(tmp_path / "b.zarr", made=made))
    assert {(entry["name"], entry["a"], entry["b"]) for entry in diff.geometry} == {("kv_source", 2, None)}
    assert {"sequence": 0, "layer": 8, "array": "keys", "rows": None} in diff.only_b
    assert diff.parted


def test_output_projections_are_weights_and_belong_to_no_token(plain: Trace, tmp_path: Path) -> None:
    diff = diff_traces(plain, write(tmp_path / "b.zarr", plant=planted(-1, 3, "output_projection", (2, 1, 4), 3.0)))
    assert (diff.first, diff.parted) == (None, True)
    off = [entry for entry in diff.projections if entry["heads_off"]]
    assert [(entry["layer"], entry["q_head"], entry["heads_off"], entry["heads"]) for entry in off] == [(3, 2, 1, 4)]
    assert "layer 3: the output projection is off by" in diff.findings()[0]
    check_sound(diff)


def test_gradients_are_listed_and_never_compared(plain: Trace, tmp_path: Path) -> None:
    diff = diff_traces(plain, write(tmp_path / "b.zarr", draws=2))
    assert not diff.parted
    named = {row["name"]: row for row in diff.settings}
    assert named["sequences[0].gradients"]["a"] is None
    assert named["sequences[0].gradients"]["b"]["draws"] == 2


def test_what_cannot_be_compared_is_said_in_one_sentence(plain: Trace, tmp_path: Path) -> None:
    longer = write(tmp_path / "longer.zarr", lengths=(26, 20))
    with pytest.raises(KvtoolError, match=r"sequence 1 has 19 tokens in .* and 20 in") as fault:
        diff_traces(plain, longer)
    assert fault.value.code == "shape"
    other = {2: Geometry(2, 4, 4, 4, 3, 0.6, softcap=3.0, rotation="none")}
    with pytest.raises(KvtoolError, match=r"layer 2 has kv_heads 2 in .* and 4 in .*: these are different models"):
        diff_traces(plain, write(tmp_path / "heads.zarr", made=other))
    elsewhere = {7: Geometry(7, 4, 2, 4, 3, 0.6, rotation="none")}
    with pytest.raises(KvtoolError, match="no layer of") as fault:
        diff_traces(plain, write(tmp_path / "elsewhere.zarr", made=elsewhere))
    assert fault.value.code == "usage"


def test_only_one_head_is_held_at_a_time(plain: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = write(tmp_path / "b.zarr", capture={"chunk": 1})
    from kvtool.trace.reader import Sequence

    whole, read = Sequence.array, []

    def array(
        self: Sequence,
        name: str,
        layer: int | None = None,
        head: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        read.append((name, head))
        return whole(self, name, layer, head, dtype)

    monkeypatch.setattr(Sequence, "array", array)
    diff_traces(plain, b)
    big = {(name, head is None) for name, head in read if name in ("queries", "keys", "values", "output_sample")}
    assert big == {(name, False) for name in ("queries", "keys", "values", "output_sample")}
