"""Replay of a trace with gradients: predicted KL from files to tables, its shares, its labels, and what is printed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtool.cli.main import run
from kvtool.errors import KvtoolError
from kvtool.layer import Geometry, Gradients
from kvtool.manifest import canonical_json
from kvtool.replay import replay
from kvtool.replay.serving import serving
from kvtool.replay.unit import run_unit
from kvtool.report.summary import ordering_metric, prediction, sections, verdicts
from kvtool.report.terminal import replay_table
from kvtool.result import Result
from kvtool.trace import Sequence, TraceWriter, open_trace

TINY = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"
DRAWS, HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, PROMPT = 3, 4, 2, 8, 6, 30
LENGTHS = (67, 50)  # 37 evaluated steps, one full window of 32 and a short one, and 20
POLICIES = ["knorm", "keydiff", "h2o"]
torch.set_num_threads(1)


def geometries() -> dict[int, Geometry]:
    """A full layer, a sliding one with sink logits, and one that reads the first one's cache."""
    sizes = (HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, 0.4)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.25])
    return {
        0: Geometry(0, *sizes),
        1: Geometry(1, *sizes, kind="sliding", window=25, sink_logits=sinks),
        2: Geometry(2, *sizes, kv_source=0),
    }


def write(
    path: Path,
    *,
    first: int = PROMPT,
    model_layers: int | None = 3,
    blocks: tuple[int | None, int | None] = (None, None),
    without: tuple[int, ...] = (),
    targets: tuple[int, int] | None = None,
    queries: tuple[int, ...] | None = None,
    size: float = 1.0,
) -> Path:
    with TraceWriter(
        path,
        model={"name": "toy", "layers": model_layers},
        tokenizer=None,
        capture={"run_dtype": "float32"},
        dtype=torch.float32,
    ) as writer:
        for index, (count, block) in enumerate(zip(LENGTHS, blocks, strict=True)):
            g = torch.Generator().manual_seed(index)
            sequence = writer.sequence(geometries(), prompt_length=PROMPT)
            for number, geometry in geometries().items():
                if geometry.kv_source is None:
                    keys = torch.randn(KV_HEADS, count, KEY_DIM, generator=g)
                    sequence.append(number, keys=keys, values=torch.randn(KV_HEADS, count, VALUE_DIM, generator=g))
                vectors = torch.randn(HEADS, count, KEY_DIM, generator=g)
                asked = torch.arange(count) if queries is None else torch.tensor([q for q in queries if q < count])
                sequence.append(number, queries=vectors[:, asked], query_steps=asked)
            low, high = targets or (first, count)
            shape = (DRAWS, HEADS, count - first, VALUE_DIM)
            sequence.finish(
                tokens=torch.arange(count) + 100 * index,
                positions=torch.arange(count),
                gradients=Gradients(
                    DRAWS,
                    block or count - first,
                    "continuation" if first >= PROMPT else "all",
                    (low, high),
                    high - low,
                    0,
                ),
                gradient_steps=torch.arange(first, count),
                output_gradients={
                    number: size * torch.randn(shape, generator=g) for number in geometries() if number not in without
                },
            )
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gradients") / "run.zarr")


@pytest.fixture(scope="module")
def result(trace: Path) -> Result:
    return replay(
        trace, POLICIES, ratios=["0.5", "0.8"], sinks=1, window=2, precision="float64", kl_windows=[4, 1, 32, 4],
        token_shares=True,
    )  # fmt: skip


def of(entries: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [e for e in entries if all(e[key] == value for key, value in wanted.items())]


def dots(sequence: Sequence, evict: dict[int, torch.Tensor]) -> torch.Tensor:
    """g·(f_R - f_V) [layer, S, H, n] at the steps from the prompt's end, token by token."""
    found = torch.zeros(3, DRAWS, HEADS, sequence.length - PROMPT, dtype=torch.float64)
    for number in range(3):
        layer = sequence.layer(number, torch.float64)
        geometry = layer.geometry
        for step in range(PROMPT, sequence.length):
            for head in range(HEADS):
                outputs = []
                for only_retained in (True, False):
                    total = 0.0 if geometry.sink_logits is None else math.exp(float(geometry.sink_logits[head]))
                    summed = torch.zeros(VALUE_DIM, dtype=torch.float64)
                    for token in range(step + 1):
                        if geometry.window is not None and step - token >= geometry.window:
                            continue
                        if only_retained and step >= int(evict[number][head // 2, token]):
                            continue
                        key = layer.keys[head // 2, token]
                        weight = math.exp(geometry.scale * float(layer.queries[head, step] @ key))
                        total += weight
                        summed += weight * layer.values[head // 2, token]
                    outputs.append(summed / total)
                at = step - PROMPT
                found[number, :, head, at] = layer.output_gradients[:, head, at] @ (outputs[0] - outputs[1])  # type: ignore[index]
    return found


def test_cells_equal_a_loop_over_everything(trace: Path, result: Result) -> None:
    where = {"policy": "knorm", "ratio": 0.8}
    totals = []
    for sequence in open_trace(trace).sequences:
        evict = {}
        for number in range(3):
            arrays = of(result.entries("evict_steps"), sequence=sequence.index, layer=number, **where)
            evict[number] = torch.tensor([e["evict_step"] for e in sorted(arrays, key=lambda e: e["kv_head"])])
        assert torch.equal(evict[0], evict[2])  # one cache
        dot, steps = dots(sequence, evict), sequence.length - PROMPT
        (cell,) = of(result.entries("cells"), sequence=sequence.index, **where)
        whole = dot.sum((0, 2))  # [S, n]
        for window, column in ((1, "predicted_kl"), (32, "predicted_kl_w32"), (4, "predicted_kl_w4")):
            values = []
            for draw in range(DRAWS):
                parts = [math.fsum(whole[draw, at : at + window].tolist()) for at in range(0, steps, window)]
                values.append(math.fsum(p * p for p in parts) / (2 * steps))
            assert cell[column] == pytest.approx(math.fsum(values) / DRAWS, rel=1e-11), column
            if window == 1:
                mean = math.fsum(values) / DRAWS
                error = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (DRAWS - 1) / DRAWS)
                assert cell["predicted_kl_se"] == pytest.approx(error, rel=1e-9)
                assert cell["predicted_kl_high"] == pytest.approx(mean + 4.302652729911275 * error, rel=1e-9)
        assert (cell["predicted_kl_steps"], cell["predicted_kl_draws"], cell["predicted_kl_block"]) == (
            steps,
            DRAWS,
            steps,
        )
        assert cell["predicted_kl_partial"] is None
        for number in range(3):
            for head in range(HEADS):
                share = float((dot[number, :, head] * whole).sum()) / (2 * steps * DRAWS)
                (row,) = of(result.entries("rows"), sequence=sequence.index, layer=number, q_head=head, **where)
                assert row["predicted_kl_share"] == pytest.approx(share, rel=1e-9, abs=1e-14)
                assert row["predicted_kl_block"] == steps
        totals.append(cell["predicted_kl"])
    (mean,) = of(result.entries("cells"), sequence=None, **where)
    assert mean["predicted_kl"] == pytest.approx(sum(totals) / 2, rel=1e-12)
    assert (mean["predicted_kl_steps"], mean["predicted_kl_draws"]) == (37 + 20, DRAWS)
    assert mean["predicted_kl_block"] is None  # one block each, of different lengths
    assert mean["predicted_kl_partial"] is None


def test_shares_add_up_from_tokens_to_heads_to_layers_to_the_cell(result: Result) -> None:
    cells = [c for c in result.entries("cells") if c["sequence"] is not None]
    layers, rows, tokens = (result.entries(name) for name in ("layers", "rows", "token_shares"))
    for cell in cells:
        key = {name: cell[name] for name in ("sequence", "policy", "ratio")}
        mine = of(layers, **key)
        assert len(mine) == 3
        assert math.fsum(e["predicted_kl_share"] for e in mine) == pytest.approx(cell["predicted_kl"], rel=1e-10)
        for layer in mine:
            heads = [e["predicted_kl_share"] for e in of(rows, layer=layer["layer"], **key)]
            assert math.fsum(heads) == pytest.approx(layer["predicted_kl_share"], rel=1e-10, abs=1e-15)
            for kv_head in range(KV_HEADS):
                lost = of(tokens, layer=layer["layer"], kv_head=kv_head, **key)
                total = math.fsum(share for entry in lost for share in entry["shares"])
                group = math.fsum(heads[2 * kv_head : 2 * kv_head + 2])
                assert total == pytest.approx(group, rel=1e-8, abs=1e-12)
                assert bool(lost) == (cell["policy"] != "full")
    evicted = of(result.entries("evict_steps"), policy="h2o", ratio=0.5, sequence=1, layer=1, kv_head=1)[0]
    (entry,) = of(tokens, policy="h2o", ratio=0.5, sequence=1, layer=1, kv_head=1)
    assert entry["tokens"] == [i for i, step in enumerate(evicted["evict_step"]) if step < LENGTHS[1]]
    assert (entry["event"], len(entry["shares"])) == (PROMPT, len(entry["tokens"]))
    assert any(share < 0 for share in entry["shares"])


def test_full_predicts_exactly_nothing(result: Result) -> None:
    for cell in of(result.entries("cells"), policy="full"):
        assert cell["predicted_kl"] == cell["predicted_kl_se"] == cell["predicted_kl_w32"] == 0.0


def test_json_has_no_nan_and_files_give_back_everything(result: Result, tmp_path: Path) -> None:
    text = json.dumps(result.document(), allow_nan=False)
    assert len(json.loads(text)["token_shares"]) == len(result.entries("token_shares")) > 0
    result.save(tmp_path / "r")
    again = Result.load(tmp_path / "r")
    assert canonical_json(again.document()) == canonical_json(result.document())


def test_a_stopped_run_resumes_with_shares(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"ratios": ["0.5"], "sinks": 1, "window": 2, "token_shares": True, "kl_windows": [5]}
    whole = replay(trace, POLICIES, **options)

    class Stop(Exception):
        pass

    def stop(done: int, total: int, what: str) -> None:
        if done == 4:
            raise Stop

    with pytest.raises(Stop):
        replay(trace, POLICIES, output=tmp_path / "r", progress=stop, **options)
    computed: list[tuple[int, int]] = []

    def counted(sequence: Any, layer_id: int, *rest: Any) -> Any:
        computed.append((sequence.index, layer_id))
        return run_unit(sequence, layer_id, *rest)

    monkeypatch.setattr("kvtool.replay.run.run_unit", counted)
    resumed = replay(trace, POLICIES, output=tmp_path / "r", **options)
    assert computed == [(1, 1), (1, 2)]
    for name in ("cells", "layers", "rows", "token_shares"):
        assert canonical_json(resumed.entries(name)) == canonical_json(whole.entries(name)), name


def labels(result: Result) -> list[str | None]:
    assert len({(c["sequence"], c["predicted_kl_partial"]) for c in result.entries("cells")}) == 3
    return [c["predicted_kl_partial"] for c in result.entries("cells")[:3]]  # of either sequence and of their mean


@pytest.mark.parametrize(
    ("written", "options", "said"),
    [
        ({}, {"evict_at": 20}, "gradients start at step 30, after the event at step 20"),
        ({}, {"layers": [0, 2]}, "layers 0,2 of 3"),
        ({"model_layers": 7}, {}, "layers 0-2 of 7"),
        ({"model_layers": None}, {}, "layers 0-2 of an unknown number"),
        ({"without": (1,)}, {}, "layers 0,2 of 3"),
        ({"blocks": (8, 8)}, {}, "gradients in blocks of 8 steps leave out later targets"),
    ],
)
def test_what_is_left_out_is_said(written: dict[str, Any], options: dict[str, Any], said: str, tmp_path: Path) -> None:
    result = replay(write(tmp_path / "a.zarr", **written), ["knorm"], ratios=["0.5"], sinks=1, window=2, **options)
    assert labels(result) == [said] * 3
    assert all(c["predicted_kl"] is not None for c in result.entries("cells"))
    assert prediction(result) == f"predicted_kl is partial: {said}."
    block = written.get("blocks", (None,))[0]
    expected = {block} if block else {37, 20}
    assert {e["predicted_kl_block"] for e in result.entries("rows") if e["predicted_kl_block"]} == expected
    if "without" in written:
        assert {e["predicted_kl_share"] is None for e in of(result.entries("layers"), layer=1)} == {True}
        assert {e["predicted_kl_share"] is None for e in of(result.entries("layers"), layer=2)} == {False}


@pytest.mark.parametrize(
    ("written", "options", "said"),
    [
        ({}, {"evaluate": "pool"}, "gradients speak of the live set"),
        (
            {"first": 20, "targets": (20, 28)},
            {},
            "nothing was drawn at or after the event at step 30; what was drawn starts at step 20",
        ),
        (
            {"targets": (41, 45), "queries": tuple(range(46, 67))},
            {},
            "nothing was drawn at or after step 46, the first step with both a gradient and a query, after the event",
        ),
        (
            {"first": 40, "targets": (41, 45), "queries": (33, 34, *range(45, 67))},
            {},
            "nothing was drawn at or after step 45, the first step with both a gradient and a query, after the event",
        ),
        (
            {"first": 40, "queries": (31, 39)},
            {},
            "no step at or after the event at step 30 has both a gradient and a query",
        ),
    ],
)
def test_null_has_a_reason(written: dict[str, Any], options: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", **written)
    result = replay(path, ["knorm"], ratios=["0.5"], sinks=1, window=2, kl_windows=[8], **options)
    assert all(label is not None and said in label for label in labels(result))
    for cell in result.entries("cells"):
        names = ("predicted_kl", "predicted_kl_se", "predicted_kl_low", "predicted_kl_w32", "predicted_kl_w8")
        assert {cell[name] for name in names} == {None}
        assert cell["predicted_kl_block"] is None
    assert {e["predicted_kl_share"] for e in result.entries("rows")} == {None}
    assert ordering_metric(result) == "mean_output_error"
    with pytest.raises(KvtoolError, match=said):
        replay(path, ["knorm"], ratios=["0.5"], token_shares=True, **options)


@pytest.mark.parametrize(
    ("block", "at", "targets", "cut"),
    [(8, 30, (30, 38), False), (8, 30, (30, 39), True), (8, 37, (30, 38), False), (4, 33, (30, 34), False)],
)
def test_blocks_are_named_only_where_they_cut_a_target_off(
    block: int, at: int, targets: tuple[int, int], cut: bool, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.zarr", first=30, targets=targets, blocks=(block, block))
    result = replay(path, ["knorm"], ratios=["0.5"], sinks=1, window=2, evict_at=at, sequences=[0])
    said = {cell["predicted_kl_partial"] for cell in result.entries("cells")}
    assert {"blocks" in (label or "") for label in said} == {cut}


def test_steps_without_a_query_are_said(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", targets=(41, 45), queries=tuple(range(44, 67)))
    result = replay(path, ["knorm"], ratios=["0.5"], sinks=1, window=2)
    assert labels(result) == ["14 steps have a gradient but no query"] * 3
    assert {c["predicted_kl_steps"] for c in result.entries("cells") if c["sequence"] is not None} == {1}


def test_numbers_that_overflow_are_an_error_and_not_null(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", size=8e37)
    with pytest.raises(KvtoolError, match=r"gradients of layer \d times errors of attention") as error:
        replay(path, ["knorm"], ratios=["0.5"], sinks=1, window=2)
    assert error.value.code == "not-finite"
    double = replay(path, ["knorm"], ratios=["0.5"], sinks=1, window=2, precision="float64")
    assert all(cell["predicted_kl"] is not None for cell in double.entries("cells"))


def test_a_huge_window_is_the_whole_text(trace: Path) -> None:
    options: dict[str, Any] = {"ratios": ["0.5"], "sinks": 1, "window": 2}
    cells = replay(trace, ["knorm"], kl_windows=[10**12, 37], **options).entries("cells")
    assert [c["predicted_kl_w1000000000000"] for c in cells] == [c["predicted_kl_w37"] for c in cells]


def test_an_empty_table_of_shares_has_its_columns(trace: Path, result: Result, tmp_path: Path) -> None:
    empty = replay(trace, ["knorm"], budgets=[60], sinks=1, window=2, token_shares=True, output=tmp_path / "r")
    for found in (empty, Result.load(tmp_path / "r")):
        assert found.tables["token_shares"].num_rows == 0
        assert found.tables["token_shares"].schema.equals(result.tables["token_shares"].schema)


def test_blocks_that_differ_are_not_averaged(tmp_path: Path) -> None:
    result = replay(write(tmp_path / "a.zarr", blocks=(8, 5)), ["knorm"], ratios=["0.5"])
    for cell in result.entries("cells"):
        assert (cell["predicted_kl"] is None) == (cell["sequence"] is None)
        assert (cell["predicted_kl_se"] is None) == (cell["sequence"] is None)
        assert cell["mean_output_error"] is not None
    assert "no common mean" in str(labels(result)[2])


def lines_of(result: Result) -> list[str]:
    return [str(part) for part in replay_table(result)[1:]]


def test_the_table_leads_with_predicted_kl_and_is_ordered_by_it(result: Result) -> None:
    assert ordering_metric(result) == "predicted_kl"
    table = replay_table(result)[0]
    assert [column.header for column in table.columns][:4] == ["policy", "predicted KL", "w32", "error"]
    other = False
    for section in sections(result):
        assert section.lines[-1].policy == "full"
        measured = [line.kl for line in section.lines[:-1]]
        assert measured == sorted(measured)  # type: ignore[type-var]
        errors = [line.error for line in section.lines[:-1]]
        other |= errors != sorted(errors)  # type: ignore[type-var]
    assert other  # the order is not that of the errors
    assert all("predicted KL" in verdict or "no policy does better" in verdict for verdict in verdicts(result))
    assert "No predicted KL" not in " ".join(lines_of(result))


def test_without_gradients_the_last_line_says_how_to_get_it() -> None:
    result = replay(TINY, ["knorm"], ratios=["0.5"], window=8)
    assert {c["predicted_kl"] for c in result.entries("cells")} == {None}
    assert lines_of(result)[-1] == "No predicted KL: the trace has no gradients; capture with --gradients 4."
    assert [column.header for column in replay_table(result)[0].columns][:2] == ["policy", "error"]


def test_the_command_takes_windows_and_shares(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = ["replay", str(trace), "-p", "knorm", "-r", "0.5", "--sinks", "1", "--window", "2"]
    assert run([*plain, "--kl-window", "4", "--kl-window", "9", "--token-shares", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"predicted_kl_w4", "predicted_kl_w9", "predicted_kl_w32"} <= set(document["cells"][0])
    assert document["manifest"]["replay"]["kl_windows"] == [1, 32, 4, 9]
    assert document["token_shares"]
    assert run(plain) == 0
    assert "predicted KL" in capsys.readouterr().out
    assert run([*plain, "--kl-window", "0"]) == 2
    assert "--kl-window 0" in capsys.readouterr().err
    assert run(["replay", str(TINY), "-p", "knorm", "--token-shares"]) == 2
    assert "capture with --gradients" in capsys.readouterr().err


def test_a_trace_says_whether_it_serves_predicted_kl(trace: Path) -> None:
    def named(path: Path) -> Callable[[str], Any]:
        rows = {row.name: row for row in serving(open_trace(path))}
        return rows.__getitem__

    assert named(trace)("predicted_kl").ok
    assert named(trace)("predicted_kl_share").ok
    assert not named(TINY)("predicted_kl").ok
    assert "captured without --gradients" in named(TINY)("predicted_kl_w32").reason
    assert named(TINY)("mean_layer_error").ok
