"""Attention recomputed from the arrays agrees with the model's, and stops agreeing when anything is off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvtool.layer import Geometry
from kvtool.trace import TraceWriter, open_trace
from kvtool.trace.commit import file_entry, seal
from kvtool.trace.metadata import list_files
from kvtool.trace.recompute import accuracy_error, dtypes, error_bound, recompute


def edit_layer(path: Path, layer: int, **change: object) -> None:
    file = path / f"sequences/0000/layers/{layer:02d}/zarr.json"
    document = json.loads(file.read_text())
    document["attributes"]["kvtool"].update(change)
    file.write_text(json.dumps(document))
    (path / "COMMIT.json").write_bytes(seal({name: file_entry(path / name) for name in list_files(path)})[0])


@pytest.mark.parametrize(
    ("run", "stored", "bound"),
    [
        ("float32", "float32", 1e-5),
        ("float32", "float16", 2e-3),
        ("float16", "float16", 2e-3),
        ("float16", "float32", 2e-3),
        ("bfloat16", "bfloat16", 1e-2),
        ("bfloat16", "float32", 1e-2),
        ("float32", "bfloat16", 1e-2),
        ("bfloat16", "float16", 1e-2),
    ],
)
def test_bounds(run: str, stored: str, bound: float) -> None:
    assert error_bound(run, stored) == bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("archive", [False, True])
def test_a_sound_trace_is_within_its_bound(make_trace: Callable[..., Path], dtype: torch.dtype, archive: bool) -> None:
    trace = open_trace(make_trace(dtype=dtype, archive=archive))
    results = list(recompute(trace))
    assert [(r.sequence, r.layer, r.steps) for r in results] == [(0, 3, 3), (0, 11, 3), (1, 3, 3), (1, 11, 3)]
    assert accuracy_error(trace, results) is None
    assert dtypes(trace) == ("float32", str(dtype).removeprefix("torch."))
    for result in results:
        assert result.ok
        assert result.error is not None
        assert 0 < result.error <= result.bound


@pytest.mark.parametrize(
    ("layer", "change"),
    [
        (3, {"scale": 0.31}),
        (3, {"softcap": None}),
        (3, {"softcap": 2.0}),
        (3, {"kind": "sliding", "window": 30}),
        (11, {"window": 8}),
        (11, {"window": 10}),
        (11, {"kind": "chunked"}),
        (11, {"kind": "full", "window": None}),
        (11, {"scale": 0.41}),
    ],
)
def test_a_wrong_attribute_is_noticed(make_trace: Callable[..., Path], layer: int, change: dict[str, object]) -> None:
    path = make_trace()
    edit_layer(path, layer, **change)
    trace = open_trace(path)
    results = list(recompute(trace))
    assert [(r.sequence, r.layer) for r in results if not r.ok] == [(0, layer)]
    error = accuracy_error(trace, results)
    assert error is not None
    assert error.code == "trace-inaccurate"
    assert f"sequence 0, layer {layer} (bound 1e-05 for a float32 run stored as float32; 1 beyond it)" in error.message


def test_sink_logits_and_chunks_count(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(3)
    keys, values = torch.randn(1, 20, 4, generator=random), torch.randn(1, 20, 4, generator=random)
    queries, sinks = torch.randn(2, 20, 4, generator=random), torch.tensor([1.0, -2.0])
    logits = torch.einsum("htd,nd->htn", queries.double(), keys[0].double()) * 0.5
    steps, rows = torch.arange(20)[:, None], torch.arange(20)[None, :]
    logits = logits.masked_fill((rows > steps) | (rows // 7 != steps // 7), float("-inf"))
    logits = torch.cat([logits, sinks.double()[:, None, None].expand(2, 20, 1)], dim=-1)
    output = (logits.softmax(-1)[..., :20] @ values[0].double()).float()
    errors = []
    for number, sink_logits in enumerate((sinks, sinks + 0.1, None)):
        geometry = Geometry(0, 2, 1, 4, 4, 0.5, kind="chunked", window=7, sink_logits=sink_logits)
        with TraceWriter(tmp_path / str(number), model={}, tokenizer=None, capture={}, dtype=torch.float32) as writer:
            sequence = writer.sequence({0: geometry}, prompt_length=10)
            sequence.append(0, keys=keys, values=values, queries=queries, query_steps=torch.arange(20))
            sequence.finish(tokens=torch.zeros(20), positions=torch.arange(20), output_samples={0: output[:, -9:]})
        (result,) = recompute(open_trace(tmp_path / str(number)))
        assert result.steps == 9
        errors.append(result.error)
    assert errors[0] < 1e-6
    assert errors[1] > 1e-3
    assert errors[2] > 1e-2


def test_an_absent_sample_is_no_fault_and_no_success(make_trace: Callable[..., Path]) -> None:
    trace = open_trace(make_trace(samples=False))
    results = list(recompute(trace))
    assert [(r.error, r.steps, r.ok) for r in results] == [(None, 0, True)] * 4
    assert accuracy_error(trace, results) is None
