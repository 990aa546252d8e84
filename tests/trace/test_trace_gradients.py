"""Gradients in a trace: written and read bit by bit, one chunk a draw, refused where they do not fit."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtool.cli.main import run
from kvtool.errors import KvtoolError
from kvtool.layer import Geometry, Gradients, Layer
from kvtool.trace import TraceWriter, open_trace
from kvtool.trace.array import write_array
from kvtool.trace.commit import file_entry, seal
from kvtool.trace.metadata import list_files
from kvtool.trace.numbers import numbers_fault

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
        sequence.finish(**{"tokens": torch.arange(TOKENS), "positions": torch.arange(TOKENS), **given})
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
        ({"gradient_steps": torch.tensor([5, 6, 6, 8])}, "not consecutive within 5:9"),
        ({"gradient_steps": torch.tensor([6, 7, 8, 9])}, "not consecutive within 5:9"),
        ({"gradient_steps": torch.tensor([4, 5, 6, 7])}, "not consecutive within 5:9"),
        ({"gradient_steps": torch.tensor([5, 6, 7, 9])}, "not consecutive within 5:9"),
        ({"gradient_steps": torch.tensor([6, 7, 8])}, r"\[3, 4, 4, 5\]"),
        ({"gradients": None}, "come together or not at all"),
        ({"output_gradients": {4: torch.zeros(DRAWS + 1, HEADS, 4, DIM)}}, r"\[4, 4, 4, 5\]"),
        ({"gradients": replace(DRAWN, steps=2)}, "steps 2, but the targets 5:8"),
        ({"gradients": replace(DRAWN, block=5)}, "4 steps, which are no blocks of 5"),
        ({"gradients": replace(DRAWN, at="prompt")}, "targets 5:8 outside 0:5, the steps at prompt"),
        ({"gradients": replace(DRAWN, targets=(4, 7))}, "targets 4:7 outside 5:9, the steps at continuation"),
        (
            {"gradients": replace(DRAWN, at="all", targets=(4, 7)), "gradient_steps": torch.arange(5, 9)},
            "gradients of the steps 5:9, but the targets 4:7",
        ),
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
        ("draws", 65537),
        ("block", 0),
        ("block", 5),
        ("at", "somewhere"),
        ("targets", [5, 10]),
        ("targets", [6, 6]),
        ("targets", [True, 8]),
        ("targets", "5:8"),
        ("targets", [4, 7]),
        ("targets", [5, 7]),
        ("at", "prompt"),
        ("steps", 0),
        ("steps", 2),
        ("steps", 9),
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


def _overwrite(path: Path, name: str, array: Tensor) -> Path:
    shutil.rmtree(path / name)
    write_array(path, name, array)
    reseal(path)
    return path


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([8, 7, 6, 5], "layer 4 of sequence 0 has gradient steps that are not consecutive within 5:9"),
        ([5, 6, 6, 7], "layer 4 of sequence 0 has gradient steps that are not consecutive"),
        ([4, 5, 6, 7], "layer 4 of sequence 0 has gradient steps that are not consecutive"),
        ([6, 7, 8, 9], "layer 4 of sequence 0 has gradient steps that are not consecutive"),
    ],
)
def test_steps_that_lie(tmp_path: Path, steps: list[int], sentence: str) -> None:
    """Whichever layer is read: what one layer says of the steps is believed of all."""
    path = write(tmp_path / "a.zarr", drawn())
    trace = open_trace(_overwrite(path, "sequences/0000/layers/04/gradient_steps", torch.tensor(steps)))
    for layer in (3, 4):
        with pytest.raises(KvtoolError, match=sentence) as error:
            trace.sequences[0].layer(layer)
        assert error.value.code == "trace-unsafe"


def test_layers_whose_steps_differ(tmp_path: Path) -> None:
    """Either range would do alone."""
    how = replace(DRAWN, at="all", targets=(5, 7), steps=2)
    path = write(tmp_path / "a.zarr", drawn(), gradients=how)
    trace = open_trace(_overwrite(path, "sequences/0000/layers/04/gradient_steps", torch.arange(4, 8)))
    with pytest.raises(KvtoolError, match="layer 4 of sequence 0 has gradient steps that differ") as error:
        trace.sequences[0].layer(3)
    assert error.value.code == "trace-unsafe"


def test_targets_without_a_gradient(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", drawn(), gradients=replace(DRAWN, at="all"))
    _edit(path, lambda attributes: attributes["gradients"].update(targets=[4, 7]))
    with pytest.raises(KvtoolError, match=r"layer 3 .* gradients of the steps 5:9, but the targets 4:7") as error:
        open_trace(path).sequences[0].layer(4)
    assert error.value.code == "trace-unsafe"


def test_an_attribute_without_arrays(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", {4: drawn()[4]})
    for name in ("gradient_steps", "output_gradients"):
        shutil.rmtree(path / f"sequences/0000/layers/04/{name}")
    reseal(path)
    with pytest.raises(KvtoolError, match="sequence 0 says how gradients were drawn, but no layer has any") as error:
        open_trace(path)
    assert error.value.code == "trace-unsafe"


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", ["output_gradients", "values"])
def test_verify_finds_numbers_that_are_none(
    tmp_path: Path, number: float, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, where = write(tmp_path / "a.zarr", drawn()), f"sequences/0000/layers/04/{name}"
    assert numbers_fault(open_trace(path)) is None
    array = open_trace(path).sequences[0].array(name, 4)
    array.view(-1)[-1] = number
    fault = numbers_fault(open_trace(_overwrite(path, where, array)))
    assert fault is not None
    assert (fault.code, fault.message) == ("not-finite", f"{name} of sequence 0, layer 4 hold NaN or infinity")
    assert run(["inspect", str(path), "--verify"]) == 2
    assert f"{name} of sequence 0, layer 4 hold NaN" in " ".join(capsys.readouterr().err.split())


def test_negative_tokens_are_refused_by_writer_and_reader(tmp_path: Path) -> None:
    with pytest.raises(KvtoolError, match="sequence 0 has the token -1") as error:
        write(tmp_path / "b.zarr", drawn(), tokens=torch.arange(TOKENS) - 1)
    assert error.value.code == "shape"
    path = write(tmp_path / "a.zarr", drawn())
    tokens = torch.tensor([0, 1, 2, 3, -7, 5, 6, 7, -1], dtype=torch.int32)
    trace = open_trace(_overwrite(path, "sequences/0000/tokens", tokens))
    with pytest.raises(KvtoolError, match="sequence 0 has the token -7 in row 4") as error:
        _ = trace.sequences[0].tokens
    assert error.value.code == "trace-unsafe"
    fault = numbers_fault(trace)
    assert fault is not None
    assert fault.code == "trace-unsafe"
    assert run(["inspect", str(path), "--verify"]) == 2


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
