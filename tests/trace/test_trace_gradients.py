"""Gradients in a trace: written and read bit by bit, one chunk a draw, refused where they do not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.layer import Geometry, Gradients, Layer
from kvtool.trace import TraceWriter, open_trace
from kvtool.trace.array import write_array
from kvtool.trace.commit import file_entry, seal
from kvtool.trace.metadata import list_files

TOKENS, DRAWS, HEADS, DIM = 9, 3, 4, 5
DRAWN = Gradients(draws=DRAWS, block=4, at="continuation", targets=(5, 8), steps=3, seed=7, probe="signs")


def write(path: Path, arrays: dict[int, Tensor], *, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    geometries = {layer: Geometry(layer, HEADS, 2, 6, DIM, 0.3) for layer in (3, 4)}
    with TraceWriter(path, model={"name": "toy"}, tokenizer=None, capture={"run_dtype": "float32"}, dtype=dtype) as w:
        sequence = w.sequence(geometries, prompt_length=5)
        for layer in geometries:
            sequence.append(layer, keys=torch.ones(2, TOKENS, 6), values=torch.ones(2, TOKENS, DIM))
            sequence.append(layer, queries=torch.ones(HEADS, TOKENS, 6), query_steps=torch.arange(TOKENS))
        given = {"gradients": DRAWN, "gradient_steps": torch.arange(5, TOKENS), "output_gradients": arrays, **options}
        sequence.finish(tokens=torch.arange(TOKENS), positions=torch.arange(TOKENS), **given)
    return path


def drawn(scale: float = 1.0) -> dict[int, Tensor]:
    random = torch.Generator().manual_seed(1)
    return {layer: scale * torch.randn(DRAWS, HEADS, 4, DIM, generator=random) for layer in (3, 4)}


def reseal(path: Path) -> None:
    (path / "COMMIT.json").write_bytes(seal({name: file_entry(path / name) for name in list_files(path)})[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_come_back_as_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    arrays = drawn()
    sequence = open_trace(write(tmp_path / "a.zarr", arrays, dtype=dtype)).sequences[0]
    assert sequence.gradients == DRAWN
    for layer, array in arrays.items():
        found = sequence.layer(layer, torch.float64)
        assert torch.equal(found.output_gradients, array.to(dtype).double())
        assert torch.equal(found.gradient_steps, torch.tensor([5, 6, 7, 8]))
        assert found.gradient_steps.dtype == torch.int64
        assert found.gradients == DRAWN


def test_one_chunk_holds_one_draw(tmp_path: Path) -> None:
    arrays = drawn()
    path = write(tmp_path / "a.zarr", arrays) / "sequences/0000/layers/04/output_gradients/c"
    assert sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()) == [
        f"{draw}/0/0/0" for draw in range(DRAWS)
    ]
    raw = torch.frombuffer(bytearray((path / "1/0/0/0").read_bytes()[:-4]), dtype=torch.float32)
    assert torch.equal(raw.view(HEADS, 4, DIM), arrays[4][1])


def test_only_the_layers_that_were_given_have_gradients(tmp_path: Path) -> None:
    sequence = open_trace(write(tmp_path / "a.zarr", {4: drawn()[4]})).sequences[0]
    without, having = sequence.layer(3), sequence.layer(4)
    assert (without.gradients, without.gradient_steps, without.output_gradients) == (None, None, None)
    assert having.gradients == DRAWN
    assert having.output_gradients is not None


def test_a_trace_without_gradients_says_none(make_trace: Callable[..., Path]) -> None:
    sequence = open_trace(make_trace(lengths=(8,))).sequences[0]
    assert sequence.gradients is None
    assert sequence.layer(3).gradients is None
    assert sequence.layer(3).gradient_steps is None
    assert sequence.layer(3).output_gradients is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gradient_steps": torch.tensor([5, 6, 6, 8])}, "do not ascend within 0 to 8"),
        ({"gradient_steps": torch.tensor([6, 7, 8, 9])}, "do not ascend within 0 to 8"),
        ({"gradient_steps": torch.tensor([6, 7, 8])}, r"\[3, 4, 4, 5\]"),
        ({"gradients": None}, "come together or not at all"),
        ({"output_gradients": {4: torch.zeros(DRAWS + 1, HEADS, 4, DIM)}}, r"\[4, 4, 4, 5\]"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KvtoolError, match=sentence):
        write(tmp_path / "a.zarr", drawn(), **options)
    assert not (tmp_path / "a.zarr").exists()


def test_too_large_or_too_small_for_the_stored_dtype(tmp_path: Path) -> None:
    large, small, broken = drawn(), drawn(1e-7), drawn()
    large[4][2, 1, 3, 0] = 70000.0
    broken[3][0, 0, 1, 2] = float("nan")
    with pytest.raises(KvtoolError, match="layer 4 in draw 2, head 1, step 8 is more than float16 can hold") as error:
        write(tmp_path / "a.zarr", large, dtype=torch.float16)
    assert error.value.code == "overflow"
    with pytest.raises(KvtoolError, match="layer 3 are too small for float16: draw 0 would lose") as error:
        write(tmp_path / "b.zarr", small, dtype=torch.float16)
    assert error.value.code == "overflow"
    with pytest.raises(KvtoolError, match="layer 3 in draw 0, head 0, step 6 is not finite"):
        write(tmp_path / "c.zarr", broken)
    found = open_trace(write(tmp_path / "d.zarr", small, dtype=torch.bfloat16)).sequences[0].layer(3)
    assert torch.equal(found.output_gradients, small[3].bfloat16().float())


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((path / "sequences/0000/zarr.json").read_text())
    change(document["attributes"]["kvtool"])
    (path / "sequences/0000/zarr.json").write_text(json.dumps(document))
    reseal(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("draws", 2),
        ("draws", 1 << 60),
        ("block", 0),
        ("at", "somewhere"),
        ("targets", [5, 10]),
        ("targets", [6, 6]),
        ("targets", [True, 8]),
        ("targets", "5:8"),
        ("steps", 0),
        ("seed", -1),
        ("probe", "words"),
        ("more", 1),
    ],
)
def test_attributes_that_lie(tmp_path: Path, name: str, value: Any) -> None:
    path = write(tmp_path / "a.zarr", drawn())
    _edit(path, lambda attributes: attributes["gradients"].update({name: value}))
    with pytest.raises(KvtoolError) as error:
        open_trace(path)
    assert error.value.code == "trace-unsafe"
    assert re.search(name, error.value.message)


@pytest.mark.parametrize("missing", [None, "probe"])
def test_gradients_that_name_no_probe_are_of_drawn_tokens(tmp_path: Path, missing: str | None) -> None:
    path = write(tmp_path / "a.zarr", drawn())
    _edit(path, lambda attributes: attributes["gradients"].pop("probe"))
    if missing is None:
        _edit(path, lambda attributes: attributes["gradients"].update({"probe": None}))
    assert open_trace(path).sequences[0].gradients == replace(DRAWN, probe="tokens")


def test_gradients_that_their_sequence_does_not_know(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", drawn())
    _edit(path, lambda attributes: attributes.pop("gradients"))
    with pytest.raises(KvtoolError, match="layer 3 of sequence 0 has gradients of 3 draws, its sequence says nothing"):
        open_trace(path)


def test_steps_without_gradients_are_refused(make_trace: Callable[..., Path]) -> None:
    path = make_trace(lengths=(8,))
    write_array(path, "sequences/0000/layers/03/gradient_steps", torch.tensor([5, 6, 7]))
    reseal(path)
    with pytest.raises(KvtoolError, match="one of output_gradients and gradient_steps"):
        open_trace(path)


def test_a_layer_in_memory_has_all_three_or_none() -> None:
    arrays = {"queries": torch.ones(4, 2, 6), "keys": torch.ones(2, 5, 6), "values": torch.ones(2, 5, 3)}
    given = {"output_gradients": torch.ones(2, 4, 2, 3), "gradient_steps": torch.tensor([3, 4], dtype=torch.int32)}
    layer = Layer.from_arrays(**arrays, prompt_length=3, scale=1.0, gradients=DRAWN, **given)
    assert layer.output_gradients.shape == (2, 4, 2, 3)
    assert layer.with_dtype(torch.float64).output_gradients.dtype == torch.float64
    assert layer.gradient_steps.dtype == torch.int64
    with pytest.raises(KvtoolError, match="come together"):
        Layer.from_arrays(**arrays, prompt_length=3, scale=1.0, **given)
    with pytest.raises(KvtoolError, match=r"gradient_steps has shape \[1\]"):
        Layer.from_arrays(
            **arrays, prompt_length=3, scale=1.0, gradients=DRAWN, **given | {"gradient_steps": torch.ones(1)}
        )
