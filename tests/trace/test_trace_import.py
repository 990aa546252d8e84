"""Dumps of other engines: what is asked for is taken, what is not is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from kvtool.errors import KvtoolError
from kvtool.rotation import Rotation
from kvtool.trace import open_trace
from kvtool.trace.import_dump import import_dump
from kvtool.trace.recompute import recompute

T, H, HK, D, DV = 12, 4, 2, 6, 4


def tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(4)
    made: dict[str, torch.Tensor] = {"sequences.0.tokens": torch.arange(T)}
    for layer in (2, 5):
        stem = f"sequences.0.layers.{layer}"
        made[f"{stem}.queries"] = torch.randn(H, T, D, generator=random)
        made[f"{stem}.keys"] = torch.randn(HK, T, D, generator=random)
        made[f"{stem}.values"] = torch.randn(HK, T, DV, generator=random)
    made["model.layers.5.output_projection"] = torch.randn(H, DV, 9, generator=random)
    return made


def meta() -> dict[str, Any]:
    rotation = {"inv_freq": [1.0, 0.01], "layout": "interleaved", "rotary_dims": 4, "attention_scaling": 1.5}
    return {
        "model": "engine/toy",
        "prompt_length": [9],
        "layers": {
            "2": {"scale": 0.4, "rotation": "none", "softcap": None},
            "5": {"scale": 0.5, "window": 5, "rotation": {**rotation, "rotary_start": 2}},
        },
    }


def dump(folder: Path, arrays: dict[str, torch.Tensor], values: Any) -> Path:
    path = folder / "dump.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in arrays.items()}, path, {"kvtool": json.dumps(values)})
    return path


def expect_refused(folder: Path, arrays: dict[str, torch.Tensor], values: Any, words: str, code: str = "dump") -> None:
    path = dump(folder, arrays, values)
    with pytest.raises(KvtoolError, match=words) as caught:
        import_dump(path, folder / "run.zarr")
    assert caught.value.code == code
    assert [p.name for p in folder.iterdir()] == ["dump.safetensors"]


def test_everything_arrives(tmp_path: Path) -> None:
    arrays = tensors()
    arrays["sequences.0.positions"] = torch.arange(T) * 2
    arrays["sequences.0.layers.5.sink_logits"] = torch.randn(H)
    arrays["sequences.0.layers.5.queries"] = arrays["sequences.0.layers.5.queries"][:, [1, 4, 11]]
    arrays["sequences.0.layers.5.query_steps"] = torch.tensor([1, 4, 11])
    import_dump(dump(tmp_path, arrays, meta()), tmp_path / "run.zarr")
    trace = open_trace(tmp_path / "run.zarr")
    (sequence,) = trace.sequences
    assert trace.manifest["model"] == {"name": "engine/toy"}
    assert trace.manifest["capture"]["source"] == "import"
    assert trace.manifest["capture"]["run_dtype"] == trace.manifest["capture"]["stored_dtype"] == "float32"
    assert len(trace.manifest["capture"]["dump_sha256"]) == 64
    assert trace.layer_ids == [2, 5]
    assert (sequence.length, sequence.prompt_length) == (T, 9)
    assert torch.equal(sequence.positions, torch.arange(T) * 2)
    for number in (2, 5):
        layer = sequence.layer(number)
        for name in ("queries", "keys", "values"):
            assert torch.equal(getattr(layer, name), arrays[f"sequences.0.layers.{number}.{name}"])
    assert sequence.layer(2).geometry.rotation == "none"
    assert sequence.layer(2).geometry.kind == "full"
    assert torch.equal(sequence.layer(2).query_steps, torch.arange(T))
    five = sequence.layer(5)
    assert torch.equal(five.query_steps, torch.tensor([1, 4, 11]))
    assert torch.equal(five.output_projection, arrays["model.layers.5.output_projection"])
    geometry = five.geometry
    assert (geometry.kind, geometry.window, geometry.scale) == ("sliding", 5, 0.5)
    assert torch.equal(geometry.sink_logits, arrays["sequences.0.layers.5.sink_logits"])
    assert isinstance(geometry.rotation, Rotation)
    assert (geometry.rotation.layout, geometry.rotation.rotary_dims, geometry.rotation.rotary_start) == (
        "interleaved",
        4,
        2,
    )
    assert geometry.rotation.attention_scaling == 1.5
    assert torch.equal(geometry.rotation.inv_freq, torch.tensor([1.0, 0.01]))


def test_defaults(tmp_path: Path) -> None:
    arrays, values = tensors(), meta()
    del values["layers"]["2"]["rotation"], values["layers"]["2"]["softcap"]
    arrays["sequences.0.layers.2.queries"] = arrays["sequences.0.layers.2.queries"][:, :3]
    import_dump(dump(tmp_path, arrays, values), tmp_path / "run.zarr")
    layer = open_trace(tmp_path / "run.zarr").sequences[0].layer(2)
    assert torch.equal(layer.positions, torch.arange(T))
    assert torch.equal(layer.query_steps, torch.arange(T - 3, T))  # the newest ones
    assert layer.geometry.rotation is None
    assert layer.geometry.softcap is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_dumps_dtype_is_stored_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    arrays = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors().items()}
    import_dump(dump(tmp_path, arrays, meta()), tmp_path / "run.zarr")
    sequence = open_trace(tmp_path / "run.zarr").sequences[0]
    assert sequence.stored_dtype == dtype
    for name in ("queries", "keys", "values"):
        assert torch.equal(sequence.array(name, 5), arrays[f"sequences.0.layers.5.{name}"])


def test_several_sequences_with_layers_of_their_own(tmp_path: Path) -> None:
    arrays, values = tensors(), meta()
    values["prompt_length"] = [9, 0]
    arrays["sequences.1.tokens"] = torch.arange(3)
    for name in ("queries", "keys", "values"):
        arrays[f"sequences.1.layers.2.{name}"] = arrays[f"sequences.0.layers.2.{name}"][:, :3]
    import_dump(dump(tmp_path, arrays, values), tmp_path / "run.zarr")
    trace = open_trace(tmp_path / "run.zarr")
    assert [s.layer_ids for s in trace.sequences] == [[2, 5], [2]]
    assert [s.prompt_length for s in trace.sequences] == [9, 0]


def test_shared_caches(tmp_path: Path) -> None:
    arrays, values = tensors(), meta()
    for name in ("keys", "values"):
        del arrays[f"sequences.0.layers.5.{name}"]
    values["layers"]["5"]["kv_source"] = 2
    import_dump(dump(tmp_path, arrays, values), tmp_path / "run.zarr")
    layer = open_trace(tmp_path / "run.zarr").sequences[0].layer(5)
    assert layer.geometry.kv_source == 2
    assert torch.equal(layer.values, arrays["sequences.0.layers.2.values"])


def test_keys_before_their_rotation(tmp_path: Path) -> None:
    arrays, values = tensors(), meta()
    values["layers"]["5"]["keys_rotated"] = False
    import_dump(dump(tmp_path, arrays, values), tmp_path / "run.zarr")
    layer = open_trace(tmp_path / "run.zarr").sequences[0].layer(5)
    raw = arrays["sequences.0.layers.5.keys"]
    assert isinstance(layer.geometry.rotation, Rotation)
    assert torch.equal(layer.keys, layer.geometry.rotation.rotate(raw, torch.arange(T)))
    assert not torch.equal(layer.keys, raw)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"colour": 1}, "unknown key 'colour'"),
        ({"model": None}, "lacks model"),
        ({"model": 5}, "lacks model"),
        ({"layers": None}, "lacks layers"),
        ({"layers": []}, "lacks layers"),
        ({"prompt_length": None}, "a list of 1 numbers"),
        ({"prompt_length": 9}, "a list of 1 numbers"),
        ({"prompt_length": [9, 9]}, "a list of 1 numbers"),
        ({"prompt_length": [13]}, "prompt_length of sequence 0 is 13, but it has 12 tokens"),
        ({"prompt_length": [-1]}, "is -1"),
        ({"prompt_length": [9.0]}, "is 9.0"),
        ({"prompt_length": [True]}, "is True"),
    ],
)
def test_metadata_that_does_not_fit(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    expect_refused(tmp_path, tensors(), {**meta(), **change}, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 4}, "layer 5 has the unknown key 'heads'"),
        ({"scale": None}, "layer 5 lacks scale"),
        ({"scale": "0.5"}, "layer 5 has scale '0.5'"),
        ({"softcap": -1.0}, "layer 5 has softcap -1.0"),
        ({"window": 0}, "layer 5 has window 0"),
        ({"window": 2.5}, "layer 5 has window 2.5"),
        ({"window": None, "kind": "sliding"}, "layer 5 is sliding without a window"),
        ({"kind": "full"}, "layer 5 is full but has a window"),
        ({"kind": "local"}, "layer 5 has kind 'local'"),
        ({"keys_rotated": "no"}, "layer 5 has keys_rotated 'no'"),
        ({"keys_rotated": False, "rotation": None}, "no rotation to rotate them with"),
        ({"kv_source": 2}, "has keys or values of its own"),
        ({"kv_source": -1}, "layer 5 has kv_source -1"),
        ({"rotation": "yarn"}, "layer 5: rotation is not a JSON object"),
        ({"rotation": {"theta": 1e4}}, "rotation has the unknown key 'theta'"),
        ({"rotation": {}}, "rotation lacks inv_freq"),
        ({"rotation": {"inv_freq": [1.0, 0.1, 0.1, 0.1]}}, "turns channels 0 to 7, but keys have 6"),
        ({"rotation": {"inv_freq": [1.0], "rotary_dims": 4}}, "1 frequencies for 4 rotated channels"),
        ({"rotation": {"inv_freq": [1.0], "layout": "full"}}, "layout 'full'"),
        ({"rotation": {"inv_freq": [1.0], "attention_scaling": -1}}, "attention_scaling -1"),
    ],
)
def test_layers_that_do_not_fit(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    values = meta()
    values["layers"]["5"].update(change)
    expect_refused(tmp_path, tensors(), values, words)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("sequences.0.layers.5.query", torch.ones(1), "tensor 'sequences.0.layers.5.query' is unknown"),
        ("sequences.x.tokens", torch.ones(1), "is unknown"),
        ("sequences.2.tokens", torch.arange(3), r"has the sequences \[0, 2\]"),
        ("sequences.0.layers.7.queries", torch.ones(H, T, D), "layer 7 has tensors, but"),
        ("model.layers.9.output_projection", torch.ones(H, DV, 3), "layer 9 has an output projection, but no queries"),
        ("sequences.0.tokens", torch.ones(T), "tokens is float32, expected integers"),
        ("sequences.0.tokens", torch.full((T,), -1), "no token ids"),
        ("sequences.0.tokens", torch.full((T,), 2**31), "no token ids"),
        ("sequences.0.tokens", torch.ones(1, T, dtype=torch.int64), "expected 1 dimensions"),
        ("sequences.0.positions", torch.ones(T), "positions is float32, expected integers"),
        ("sequences.0.layers.5.queries", torch.ones(1, H, T, D), "expected 3 dimensions"),
        ("sequences.0.layers.5.queries", torch.ones(3, T, D), "3 query heads cannot share 2 KV heads"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, name: str, tensor: torch.Tensor, words: str) -> None:
    expect_refused(tmp_path, {**tensors(), name: tensor}, meta(), words)


@pytest.mark.parametrize("name", ["queries", "keys", "values"])
def test_missing_tensors_are_named(tmp_path: Path, name: str) -> None:
    arrays = tensors()
    del arrays[f"sequences.0.layers.5.{name}"]
    expect_refused(tmp_path, arrays, meta(), f"lacks the tensor sequences.0.layers.5.{name}")


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("sequences.0.layers.5.keys", torch.ones(HK, T - 1, D), "they must agree"),
        ("sequences.0.layers.5.keys", torch.ones(HK, T, D + 1), "layer 5 of sequence 0: keys has shape"),
        ("sequences.0.layers.5.values", torch.ones(HK + 2, T, DV), "they must agree"),
        ("sequences.0.layers.5.query_steps", torch.arange(T - 1), "layer 5 of sequence 0: query_steps has shape"),
        ("sequences.0.layers.5.query_steps", torch.arange(T) + 1, "do not ascend within 0 to 11"),
        ("sequences.0.layers.5.sink_logits", torch.ones(H + 1), "sink_logits has shape"),
        ("sequences.0.layers.5.output_sample", torch.ones(H, 2, DV + 1), "output_sample has shape"),
        ("sequences.0.positions", torch.arange(T - 1), "positions has shape"),
    ],
)
def test_shapes_that_do_not_fit(tmp_path: Path, name: str, tensor: torch.Tensor, words: str) -> None:
    expect_refused(tmp_path, {**tensors(), name: tensor}, meta(), words, "shape")


def test_an_output_projection_of_other_heads_is_refused(tmp_path: Path) -> None:
    arrays = {**tensors(), "model.layers.5.output_projection": torch.ones(H, DV + 1, 9)}
    expect_refused(
        tmp_path, arrays, meta(), r"output projection of layer 5 has shape \[4, 5, 9\], expected \[4, 4, M\]", "shape"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    arrays = {**tensors(), "sequences.0.layers.5.keys": torch.ones(HK, T, D, dtype=dtype)}
    expect_refused(tmp_path, arrays, meta(), "sequences.0.layers.5.keys is .*, which a trace cannot store", "dtype")


def test_mixed_dtypes_are_refused_with_both_named(tmp_path: Path) -> None:
    arrays = {**tensors(), "sequences.0.layers.5.keys": torch.ones(HK, T, D, dtype=torch.bfloat16)}
    expect_refused(tmp_path, arrays, meta(), "layers.5.keys is BF16, .*values is F32", "dtype")


def test_infinity_is_refused_by_place(tmp_path: Path) -> None:
    arrays = tensors()
    arrays["sequences.0.layers.5.values"][1, 7, 2] = float("inf")
    expect_refused(tmp_path, arrays, meta(), "layer 5 values holds inf in head 1, row 7", "not-finite")


@pytest.mark.parametrize(
    ("values", "words"), [("{", "not sound JSON"), ("[]", "not a JSON object"), ('{"model":NaN}', "not sound JSON")]
)
def test_metadata_that_is_no_json_object(tmp_path: Path, values: str, words: str) -> None:
    path = tmp_path / "dump.safetensors"
    save_file(tensors(), path, {"kvtool": values})
    with pytest.raises(KvtoolError, match=words) as caught:
        import_dump(path, tmp_path / "run.zarr")
    assert caught.value.code == "dump"


def test_no_metadata_and_no_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "dump.safetensors"
    save_file(tensors(), path)
    with pytest.raises(KvtoolError, match="no metadata 'kvtool'"):
        import_dump(path, tmp_path / "run.zarr")
    path.write_bytes(b"\x80\x04pickle")
    with pytest.raises(KvtoolError, match="no sound safetensors file") as caught:
        import_dump(path, tmp_path / "run.zarr")
    assert caught.value.code == "dump"
    with pytest.raises(KvtoolError, match="does not exist") as caught:
        import_dump(tmp_path / "no.safetensors", tmp_path / "run.zarr")
    assert caught.value.code == "file-missing"
    assert [p.name for p in tmp_path.iterdir()] == ["dump.safetensors"]


def test_command(tmp_path: Path) -> None:
    from kvtool.cli.main import app

    arrays = tensors()
    arrays["sequences.0.layers.2.output_sample"] = torch.zeros(H, 2, DV)
    path, output = dump(tmp_path, arrays, meta()), tmp_path / "run.zarr"
    result = CliRunner().invoke(app, ["import", str(path), "-o", str(output)])
    assert result.exit_code == 0, result.output
    assert "1 sequence, 12 tokens, 2 layers" in result.stdout
    lines = result.stderr.strip().splitlines()
    assert lines[0].startswith("warning: attention recomputed from")  # zeros are not what attention gives
    assert lines[-1] == f"next: kvtool inspect {output} --verify"
    again = CliRunner().invoke(app, ["import", str(path), "-o", str(output)])
    assert isinstance(again.exception, KvtoolError)
    assert again.exception.code == "output-exists"
    assert CliRunner().invoke(app, ["import", str(path), "-o", str(output), "--force"]).exit_code == 0


def test_output_samples_are_recomputed(tmp_path: Path) -> None:
    arrays, values = tensors(), meta()
    stem = "sequences.0.layers.2"
    logits = (arrays[f"{stem}.queries"].double()[:, -1:] @ arrays[f"{stem}.keys"].double()[[0, 0, 1, 1]].mT) * 0.4
    arrays[f"{stem}.output_sample"] = (logits.softmax(-1) @ arrays[f"{stem}.values"].double()[[0, 0, 1, 1]]).float()
    import_dump(dump(tmp_path, arrays, values), tmp_path / "run.zarr")
    two, five = recompute(open_trace(tmp_path / "run.zarr"))
    assert two.error is not None
    assert two.error < 1e-6
    assert five.error is None
