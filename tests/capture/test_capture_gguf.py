"""A GGUF file and the safetensors it was made from must give the same queries and keys.

The llama family stores q and k rows in another order in GGUF; whoever forgets to undo it loads
cleanly and attends to noise. The Qwen family has no such order.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import tokenizers

from kvtool.capture import capture
from kvtool.capture.dry_run import dry_run
from kvtool.capture.request import Request
from kvtool.errors import KvtoolError

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def gguf_name(name):
    if name in NAMES:
        return NAMES[name]
    _, _, number, rest = name.split(".", 3)
    return f"blk.{number}.{NAMES[rest]}"


def woven(weight, heads):
    """Rows of each head from half order (0..7, 8..15) to pairs (0, 8, 1, 9, ...), as GGUF llamas keep them."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, arch):
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if arch == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = ["<unk>", "<s>", "</s>", *alphabet, "ZZ"]
    words += [f"<extra{i}>" for i in range(config.vocab_size - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_merges(["Z Z"])
    writer.add_token_types([3, 3, 3, *[1] * (len(words) - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in model.state_dict().items():
        array = weight.numpy().astype(np.float32)
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = woven(array, heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_file(tiny, tmp_path_factory):
    made = {}
    # The head width of a Qwen3 GGUF file is not read by transformers, which takes 128.
    for name, arch in (("llama", "llama"), ("qwen3-wide", "qwen3")):
        made[name] = tmp_path_factory.mktemp("gguf") / f"{name}.gguf"
        write_gguf(made[name], tiny(name), arch)
    return made


@pytest.mark.parametrize("name", ["llama", "qwen3-wide"])
def test_gguf_and_safetensors_agree(gguf_file, folder, tmp_path, name):
    text = tmp_path / "t.txt"
    text.write_text("Sphinx of black quartz, judge my vow, and do it soon.")
    options = {"text_file": text, "prompt_tokens": 30, "eval_tokens": 8}
    a = capture(folder(name), tmp_path / "a.zarr", **options)
    b = capture(gguf_file[name], tmp_path / "b.zarr", **options)
    assert a.sequences[0].tokens.tolist() == b.sequences[0].tokens.tolist()
    assert b.manifest["model"]["weight_format"] == "gguf"
    assert b.manifest["capture"]["run_dtype"] == "float32"
    for layer in a.layer_ids:
        for array in ("queries", "keys", "values"):
            x, y = (getattr(trace.sequences[0].layer(layer), array).double() for trace in (a, b))
            assert float((x - y).norm() / x.norm()) < 1e-5, (layer, array)


def test_a_gguf_files_expanded_size_is_known_before_loading(gguf_file, tiny, monkeypatch):
    """Quantized or not, it becomes float32: the limit is held against that."""
    monkeypatch.setattr("kvtool.capture.prepare.load_model", lambda *args: pytest.fail("weights were loaded"))
    request = Request(model=str(gguf_file["llama"]), prompt="Hello", max_new_tokens=4)
    estimate = dry_run(request)
    parameters = sum(parameter.numel() for parameter in tiny("llama").parameters())
    assert estimate.weight_bytes == 4 * parameters
    assert estimate.memory_bytes > estimate.weight_bytes
    with pytest.raises(KvtoolError, match="more than --max-memory 100 kB") as caught:
        dry_run(Request(model=str(gguf_file["llama"]), prompt="Hello", max_memory="100kB"))
    assert caught.value.code == "memory"
