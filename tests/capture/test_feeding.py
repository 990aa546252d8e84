"""Models whose recurrent layers forget their state when several tokens follow at once."""

from __future__ import annotations

import pytest
import torch
import transformers

from kvtool.capture import capture
from kvtool.capture.feeding import later_tokens
from kvtool.capture.hook import observed
from kvtool.capture.probe import _Sight, probe
from kvtool.errors import KvtoolError


@pytest.fixture(scope="module")
def jamba():
    torch.manual_seed(3)
    config = transformers.JambaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        initializer_range=0.2,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.JambaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def jamba_folder(jamba, folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("jamba") / "model"
    jamba.save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(folder("llama")).save_pretrained(path)
    return path


def test_the_model_is_found_to_continue_token_by_token(jamba, tiny):
    assert later_tokens(jamba, 512) == 1
    assert later_tokens(tiny("llama"), 512) is None


@pytest.mark.parametrize("chunk", [None, 7])
def test_its_trace_holds_what_one_forward_computes(jamba, jamba_folder, tmp_path, chunk):
    text = tmp_path / "text.txt"
    text.write_text("a few words that are long enough to be read by a small model")
    trace = capture(jamba_folder, tmp_path / "run.zarr", text_file=text, prompt_tokens=30, eval_tokens=11, chunk=chunk)
    sequence, sight = trace.sequences[0], _Sight()
    with torch.no_grad(), observed(jamba, sight):
        jamba(input_ids=sequence.tokens[None].to(torch.int64))
    assert sorted(sight.calls) == sorted(probe(jamba)) == sequence.layer_ids
    for layer_id, call in sight.calls.items():
        layer = sequence.layer(layer_id)
        for name, expected in (("queries", call.queries), ("keys", call.keys), ("values", call.values)):
            error = (getattr(layer, name) - expected).norm() / expected.norm()
            assert error < 1e-5, f"{name} of layer {layer_id} are off by {error}"


def test_it_has_no_gradients(jamba_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a few words that are long enough to be read by a small model")
    with pytest.raises(KvtoolError, match="token by token"):
        capture(jamba_folder, tmp_path / "run.zarr", text_file=text, prompt_tokens=30, eval_tokens=11, gradients=2)
    assert not (tmp_path / "run.zarr").exists()


def test_a_decoy_beside_pickled_weights_is_refused(folder, tmp_path):
    import json
    import shutil

    path = tmp_path / "decoy"
    shutil.copytree(folder("llama"), path)
    (path / "pytorch_model.bin").write_bytes(b"never read")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "pytorch_model.bin"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(KvtoolError, match=r"leads to pytorch_model\.bin") as caught:
        capture(path, tmp_path / "run.zarr", prompt="hello", max_new_tokens=2)
    assert caught.value.code == "model-unsafe"
