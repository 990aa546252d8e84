"""Lost tokens, against attention that is really computed again without the token, one number at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from toy_traces import KV_HEADS, write

from kvtool.compare.kept import HeadSets
from kvtool.compare.lost_tokens import lost_tokens
from kvtool.errors import KvtoolError
from kvtool.layer import Geometry, Layer
from kvtool.trace import Trace

torch.set_num_threads(1)
GROUP, FIRST = 2, 12


def weights(layer: Layer, q_head: int, step: int, rows: list[int]) -> dict[int, float]:
    """Softmax over `rows`, the sink in the denominator and nowhere else."""
    g = layer.geometry
    query = layer.queries[q_head, int((layer.query_steps == step).nonzero())]
    logits = {}
    for row in rows:
        z = g.scale * float(query @ layer.keys[q_head // g.group, row])
        logits[row] = z if g.softcap is None else g.softcap * math.tanh(z / g.softcap)
    sink = [] if g.sink_logits is None else [float(g.sink_logits[q_head])]
    top = max([*logits.values(), *sink], default=0.0)
    total = math.fsum(math.exp(z - top) for z in [*logits.values(), *sink])
    return {row: math.exp(z - top) / total for row, z in logits.items()}


def output(layer: Layer, q_head: int, found: dict[int, float]) -> torch.Tensor:
    values = layer.values[q_head // layer.geometry.group]
    return sum((a * values[row] for row, a in found.items()), torch.zeros(values.shape[1], dtype=torch.float64))


def dumb(layer: Layer, head: HeadSets) -> dict[int, dict[str, float]]:
    """row -> damage of the head, mean attention mass, and per query head its damage."""
    g, T = layer.geometry, layer.tokens
    errors = {q: dict.fromkeys(range(T), 0.0) for q in range(g.query_heads)}
    mass, seen, outputs = (
        dict.fromkeys(range(T), 0.0),
        dict.fromkeys(range(T), 0),
        dict.fromkeys(range(g.query_heads), 0.0),
    )
    mine = range(head.kv_head * g.group, (head.kv_head + 1) * g.group)
    for step in layer.query_steps.tolist():
        if step < head.evaluated_from:
            continue
        visible = list(range(int(g.first_visible(torch.tensor(step))), step + 1))
        for q in mine:
            found = weights(layer, q, step, visible)
            f = output(layer, q, found)
            outputs[q] += float(f @ f)
            for row in visible:
                low, high = sorted((int(head.a[row]), int(head.b[row])))
                if low <= step < high:
                    without = output(layer, q, weights(layer, q, step, [r for r in visible if r != row]))
                    errors[q][row] += float((f - without) @ (f - without))
                    mass[row] += found[row]
                    seen[row] += 1
    total = sum(outputs[q] for q in mine)
    return {
        row: {
            "damage": math.sqrt(sum(errors[q][row] for q in mine) / total),
            "mass": mass[row] / seen[row] if seen[row] else math.nan,
            **{f"q{q}": math.sqrt(errors[q][row] / outputs[q]) for q in mine},
        }
        for row in range(T)
    }


def random_sides(tokens: int, seed: int, prompt: int, one_event: bool) -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    sides = []
    for _ in range(2):
        gone = torch.full((tokens,), tokens, dtype=torch.int32)
        for row in range(tokens - 1):
            if float(torch.rand(1, generator=stream)) < 0.5:
                low = max(row + 1, FIRST)
                step = prompt if one_event else low + int(torch.randint(0, 9, (1,), generator=stream))
                if row < step < tokens:
                    gone[row] = step
        sides.append(gone)
    return sides[0], sides[1]


def all_heads(trace: Trace, one_event: bool) -> list[HeadSets]:
    heads = []
    for run in trace.sequences:
        first = run.prompt_length if one_event else FIRST
        for layer in run.layer_ids:
            for kv_head in range(KV_HEADS):
                source = 2 if layer == 8 else layer  # a shared cache loses the same tokens
                sides = random_sides(run.length, 31 * source + kv_head + run.index, run.prompt_length, one_event)
                heads.append(HeadSets(run.index, layer, kv_head, *sides, run.prompt_length, first))
    return heads


@pytest.mark.parametrize("one_event", [True, False])
def test_every_number_against_the_dumb_loop(tmp_path: Path, one_event: bool) -> None:
    trace = write(tmp_path / "run.zarr")
    heads = all_heads(trace, one_event)
    found = lost_tokens(trace, heads, limit=1000)
    assert found["not_told"] is None
    layers = {(r.index, i): r.layer(i, dtype=torch.float64) for r in trace.sequences for i in r.layer_ids}
    told = {id(head): dumb(layers[head.sequence, head.layer], head) for head in heads}
    checked = 0
    for name, sign in (("lost", 1), ("gained", -1)):
        expected = {
            (head.sequence, row)
            for head in heads
            for row in range(head.tokens)
            if sign * int(head.a[row]) > sign * int(head.b[row])
        }
        assert {(one["sequence"], one["token"]) for one in found[name]} == expected
        for one in found[name]:
            row = one["token"]
            losing = [
                head
                for head in heads
                if head.sequence == one["sequence"] and sign * int(head.a[row]) > sign * int(head.b[row])
            ]
            each = [told[id(head)][row] for head in losing]
            assert one["heads"] == len(losing)
            assert one["of"] == 8
            assert one["layers"] == sorted({head.layer for head in losing})
            assert one["position"] == row + 7
            assert one["text"] == f"w{row}\n"
            damages = [numbers["damage"] for numbers in each]
            assert one["damage"] == pytest.approx(math.sqrt(sum(d * d for d in damages) / len(damages)), rel=1e-10)
            masses = [numbers["mass"] for numbers in each if not math.isnan(numbers["mass"])]
            if masses:
                assert one["attention_mass"] == pytest.approx(sum(masses) / len(masses), rel=1e-10)
            else:
                assert one["attention_mass"] is None
                assert one["damage"] == 0.0
            worst = max(value for numbers in each for key, value in numbers.items() if key.startswith("q"))
            assert one["worst"]["damage"] == pytest.approx(worst, rel=1e-10)
            place = next(h for h in losing if (h.layer, h.kv_head) == (one["worst"]["layer"], one["worst"]["kv_head"]))
            assert told[id(place)][row][f"q{one['worst']['q_head']}"] == pytest.approx(worst, rel=1e-10)
            checked += 1
    assert checked > 40
    json.dumps(found, allow_nan=False)


def test_order_limit_and_rows_alone(tmp_path: Path) -> None:
    trace = write(tmp_path / "run.zarr")
    heads = all_heads(trace, True)
    whole = lost_tokens(trace, heads, limit=1000)["lost"]
    for index in (0, 1):
        sums = [one["damage"] for one in whole if one["sequence"] == index and one["heads"] == one["of"]]
        assert sums == sorted(sums, reverse=True)
    few = lost_tokens(trace, heads, limit=2)["lost"]
    assert [one["sequence"] for one in few] == [0, 0, 1, 1]
    assert few[:2] == whole[:2]
    assert lost_tokens(trace, heads, limit=0)["lost"] == []
    bare = lost_tokens(None, heads, limit=1000)
    assert "--trace" in bare["not_told"]
    assert sorted(one["token"] for one in bare["lost"]) == sorted(one["token"] for one in whole)
    assert [one["heads"] for one in bare["lost"] if one["sequence"] == 0] == sorted(
        (one["heads"] for one in whole if one["sequence"] == 0), reverse=True
    )
    assert all(
        one[k] is None for one in bare["lost"] for k in ("text", "position", "damage", "attention_mass", "worst")
    )


def lone(tmp_path: Path, first_key: float, values: torch.Tensor, sinks: bool = False) -> Trace:
    """One layer, one group, 20 tokens; token 0's logit is about `first_key`, all others' are small."""

    def plant(sequence: int, layer: int, arrays: dict[str, torch.Tensor]) -> None:
        if layer == 0 and sequence == 0:
            arrays["queries"] = 0.01 * arrays["queries"]
            arrays["queries"][..., 0] = 1.0
            arrays["keys"][:, :, 0] = 0.0
            arrays["keys"][:, 0, 0] = first_key
            arrays["values"] = values

    geometry = Geometry(0, 2, 1, 4, 3, 1.0, rotation="none", sink_logits=torch.tensor([1.0, -1.0]) if sinks else None)
    return write(tmp_path / "lone.zarr", lengths=(20,), made={0: geometry}, plant=plant)


def sides(tokens: int, *rows: int, step: int) -> list[torch.Tensor]:
    kept = torch.full((tokens,), tokens, dtype=torch.int32)
    gone = kept.clone()
    gone[list(rows)] = step
    return [kept, gone]


@pytest.mark.parametrize("first_key", [0.5, 5.0, 20.0, 36.0, 60.0, 900.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_token_with_nearly_all_attention_is_computed_without_it(
    tmp_path: Path, first_key: float, sinks: bool
) -> None:
    """1 - a goes down to 0 in float64, where a/(1-a) (v - f) is nothing, infinite or noise."""
    values = torch.randn(1, 20, 3, generator=torch.Generator().manual_seed(5))
    values[:, 0] *= 1e-3  # an attention sink
    trace = lone(tmp_path, first_key, values, sinks)
    head = HeadSets(0, 0, 0, *sides(20, 0, 3, step=12), 12, 12)
    layer = trace.sequences[0].layer(0, dtype=torch.float64)
    expected = dumb(layer, head)
    found = {one["token"]: one for one in lost_tokens(trace, [head], limit=9)["lost"]}
    assert found[0]["damage"] == pytest.approx(expected[0]["damage"], rel=1e-9)
    assert found[3]["damage"] == pytest.approx(expected[3]["damage"], rel=1e-9)
    assert found[0]["attention_mass"] == pytest.approx(expected[0]["mass"], rel=1e-12)
    assert first_key < 5 or found[0]["damage"] > 10 * found[3]["damage"]


def test_losing_a_token_whose_value_is_everybodys_costs_nothing(tmp_path: Path) -> None:
    values = torch.full((1, 20, 3), 1234.5)
    trace = lone(tmp_path, 2.0, values)
    head = HeadSets(0, 0, 0, *sides(20, 0, 3, step=12), 12, 12)
    for one in lost_tokens(trace, [head], limit=9)["lost"]:
        assert one["damage"] < 1e-14
        assert one["attention_mass"] > 0


def test_the_only_visible_token_leaves_nothing_behind(tmp_path: Path) -> None:
    """An empty set gives the zero vector: losing all there is costs all there was."""
    geometry = Geometry(0, 2, 1, 4, 3, 1.0, kind="sliding", window=1, rotation="none")
    trace = write(tmp_path / "one.zarr", lengths=(20,), made={0: geometry})
    kept = torch.full((20,), 20, dtype=torch.int32)
    gone = kept.clone()
    gone[15] = 15
    (one,) = lost_tokens(trace, [HeadSets(0, 0, 0, kept, gone, 12, 12)], limit=9)["lost"]
    layer = trace.sequences[0].layer(0, dtype=torch.float64)
    squares = layer.values[0, 12:].square().sum(1)
    assert one["attention_mass"] == 1.0
    assert one["damage"] == pytest.approx(math.sqrt(float(squares[3] / squares.sum())), rel=1e-12)


def test_outputs_that_are_all_zero_have_no_relative_damage(tmp_path: Path) -> None:
    trace = lone(tmp_path, 2.0, torch.zeros(1, 20, 3))
    (one,) = lost_tokens(trace, [HeadSets(0, 0, 0, *sides(20, 4, step=12), 12, 12)], limit=9)["lost"]
    assert one["damage"] is None
    assert one["worst"] is None
    assert one["attention_mass"] > 0


def test_float32_is_near_and_blocks_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = write(tmp_path / "run.zarr")
    heads = all_heads(trace, False)
    exact = lost_tokens(trace, heads, limit=1000)
    near = lost_tokens(trace, heads, limit=1000, precision=torch.float32)
    rows = {(one["sequence"], one["token"]): one["damage"] for one in near["lost"]}
    for one in exact["lost"]:
        assert rows[one["sequence"], one["token"]] == pytest.approx(one["damage"], rel=1e-4, abs=1e-6)
    monkeypatch.setattr("kvtool.kernels.retained_attention.inputs.QUERY_ROWS", 6)  # three steps in a block
    again = lost_tokens(trace, heads, limit=1000)
    assert [one["token"] for one in again["lost"]] == [one["token"] for one in exact["lost"]]
    assert again["lost"][0]["damage"] == pytest.approx(exact["lost"][0]["damage"], rel=1e-12)


def test_queries_that_were_not_stored_cannot_miss_a_token(tmp_path: Path) -> None:
    trace = write(tmp_path / "few.zarr", lengths=(26,), query_steps=lambda count: torch.tensor([3, 19, 22, 25]))
    head = HeadSets(0, 2, 1, *sides(26, 1, 4, step=18), 18, 18)
    expected = dumb(trace.sequences[0].layer(2, dtype=torch.float64), head)
    for one in lost_tokens(trace, [head], limit=9)["lost"]:
        assert one["damage"] == pytest.approx(expected[one["token"]]["damage"], rel=1e-10)
        assert one["attention_mass"] == pytest.approx(expected[one["token"]]["mass"], rel=1e-10)


def test_nan_in_an_unseen_row_stays_there_and_in_a_seen_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtool.trace.spool.Spool._refuse_not_finite", lambda self, block: None)  # another writer

    def plant(sequence: int, layer: int, arrays: dict[str, torch.Tensor]) -> None:
        if layer == 3 and sequence == 0:
            arrays["values"][1, 2] = float("nan")  # out of the window of 9 from step 11 on

    trace = write(tmp_path / "nan.zarr", lengths=(26,), plant=plant)
    unseen = HeadSets(0, 3, 1, *sides(26, 2, 15, step=18), 18, 18)
    found = {one["token"]: one for one in lost_tokens(trace, [unseen], limit=9)["lost"]}
    assert found[15]["damage"] > 0
    assert found[2]["damage"] == 0.0
    assert found[2]["attention_mass"] is None
    seen = HeadSets(0, 3, 1, *sides(26, 2, 15, step=8), 8, 8)
    with pytest.raises(KvtoolError, match="layer 3, KV head 1") as fault:
        lost_tokens(trace, [seen], limit=9)
    assert fault.value.code == "not-finite"


def test_a_trace_of_another_run_is_refused(tmp_path: Path) -> None:
    trace = write(tmp_path / "run.zarr")
    for head, said in (
        (HeadSets(0, 2, 0, *sides(25, 1, step=12), 12, 12), "has 26"),
        (HeadSets(4, 2, 0, *sides(26, 1, step=12), 12, 12), "no such sequence"),
        (HeadSets(0, 2, 2, *sides(26, 1, step=12), 12, 12), "KV head 2 of layer 2"),
        (HeadSets(0, 4, 0, *sides(26, 1, step=12), 12, 12), "holds no layer 4"),
    ):
        with pytest.raises(KvtoolError, match=said):
            lost_tokens(trace, [head], limit=9)


def test_a_trace_without_text_tells_the_rest(tmp_path: Path) -> None:
    trace = write(tmp_path / "mute.zarr", text=False)
    (one,) = lost_tokens(trace, [HeadSets(0, 2, 0, *sides(26, 1, step=18), 18, 18)], limit=9)["lost"]
    assert one["text"] is None
    assert one["damage"] > 0
