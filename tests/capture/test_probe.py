"""What the probe finds out about each architecture, and whom it refuses."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from kvtool.capture.probe import probe
from kvtool.errors import KvtoolError


def kinds(probed):
    return [(entry.geometry.kind, entry.geometry.window) for entry in probed.values()]


def test_heads_of_a_grouped_model(tiny):
    probed = probe(tiny("qwen3"))
    assert list(probed) == [0, 1, 2]
    for entry in probed.values():
        g = entry.geometry
        assert (g.query_heads, g.kv_heads, g.key_dim, g.value_dim) == (4, 2, 24, 24)
        assert g.scale == pytest.approx(24**-0.5)
        assert g.kv_source is None
        assert g.softcap is None
        assert g.sink_logits is None


def test_expanded_heads_of_latent_attention(tiny):
    g = probe(tiny("deepseek_v3"))[2].geometry
    assert (g.query_heads, g.kv_heads, g.key_dim, g.value_dim) == (4, 4, 24, 12)


def test_scale_comes_from_the_model(tiny):
    assert probe(tiny("gemma3"))[0].geometry.scale == pytest.approx(20**-0.5)
    assert probe(tiny("opt"))[0].geometry.scale == 1.0


def test_windows(tiny):
    sliding, full = ("sliding", 9), ("full", None)
    assert kinds(probe(tiny("mistral"))) == [sliding] * 3
    assert kinds(probe(tiny("gemma2"))) == [sliding, full, sliding]
    assert kinds(probe(tiny("gemma3"))) == [sliding, sliding, full]
    assert kinds(probe(tiny("cohere2"))) == [sliding, sliding, sliding, full]
    assert kinds(probe(tiny("llama4"))) == [("chunked", 9)] * 3 + [full]
    assert kinds(probe(tiny("llama"))) == [full] * 3


def test_softcap_and_sink_logits(tiny):
    assert all(entry.geometry.softcap == 0.5 for entry in probe(tiny("gemma2")).values())
    model = tiny("gpt_oss")
    for layer, entry in probe(model).items():
        assert torch.equal(entry.geometry.sink_logits, model.model.layers[layer].self_attn.sinks)


def test_shared_caches(tiny):
    probed = probe(tiny("gemma3n"))
    assert {layer: entry.geometry.kv_source for layer, entry in probed.items()} == {
        0: None, 1: None, 2: None, 3: None, 4: 3, 5: 2,
    }  # fmt: skip


def test_only_the_attention_layers_of_a_hybrid(tiny):
    assert list(probe(tiny("qwen3_next"))) == [3]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("llama", "model.layers.1.self_attn.o_proj"),
        ("gpt_oss", "model.layers.1.self_attn.o_proj"),
        ("gpt2", "transformer.h.1.attn.c_proj"),
        ("opt", "model.decoder.layers.1.self_attn.out_proj"),
        ("gptj", "transformer.h.1.attn.out_proj"),
        ("deepseek_v3", "model.layers.1.self_attn.o_proj"),
    ],
)
def test_output_projection_by_observation(tiny, name, path):
    model = tiny(name)
    entry = probe(model)[1]
    module = model.get_submodule(path)
    assert entry.projection is module
    matrix, g = entry.output_projection(), entry.geometry  # [H, Dv, M]
    assert matrix.shape == (g.query_heads, g.value_dim, 64)
    outputs = torch.randn(g.query_heads, g.value_dim, generator=torch.Generator().manual_seed(1))
    bias = module.bias if module.bias is not None else torch.zeros(64)
    summed = sum(outputs[h] @ matrix[h] for h in range(g.query_heads)) + bias
    assert torch.allclose(summed, module(outputs.reshape(1, 1, -1))[0, 0], atol=1e-5)


def test_no_projection_where_a_gate_stands_between(tiny):
    entry = probe(tiny("qwen3_next"))[3]
    assert entry.projection is None
    assert entry.output_projection() is None


@pytest.mark.parametrize("name", ["falcon", "mamba"])
def test_models_that_record_nothing_are_refused_by_name(tiny, name):
    with pytest.raises(KvtoolError, match=type(tiny(name)).__name__) as caught:
        probe(tiny(name))
    assert caught.value.code == "model-unsupported"


def test_other_layers_than_expected_are_refused(tiny, monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(model.config, "num_hidden_layers", 2)
    monkeypatch.setattr("kvtool.capture.probe.expected_layers", lambda config: [0, 1, 2, 3])
    with pytest.raises(KvtoolError, match=r"layers 0-3, but layers 0-1 were recorded"):
        probe(model)


def spoiled(tiny, spoil):
    """A tiny llama whose attention function is passed through `spoil(module, kwargs)` first."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attention(module, query, key, value, mask, **kwargs):
        return sdpa_attention_forward(module, query, key, value, spoil(query, key, mask), **kwargs)

    return attention


@pytest.mark.parametrize("kind", ["alibi", "bidirectional", "block"])
def test_masks_that_cannot_be_represented_are_refused(tiny, kind):
    """ALiBi inside the mask, attention to the future, and a mask with a hole."""

    def spoil(query, key, mask):
        n = query.shape[2]
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        if kind == "bidirectional":
            return torch.ones(1, 1, n, n, dtype=torch.bool)
        if kind == "block":
            causal[n // 2 :, 1] = False
            return causal[None, None]
        distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
        return torch.where(causal, 0.1 * distance.float(), float("-inf"))[None, None]

    functions = transformers.AttentionInterface()
    functions.register("spoiled", spoiled(tiny, spoil))
    transformers.AttentionMaskInterface.register("spoiled", lambda *args, **kwargs: None)
    model = tiny("llama")
    model.set_attn_implementation("spoiled")
    try:
        with pytest.raises(KvtoolError, match="LlamaForCausalLM uses a mask or bias"):
            probe(model)
    finally:
        model.set_attn_implementation("sdpa")


def test_a_wrong_softcap_is_noticed(tiny, monkeypatch):
    """Turning off what the model uses must make the check fail."""
    monkeypatch.setattr("kvtool.capture.probe.softcap", lambda call: None)
    with pytest.raises(KvtoolError, match="cannot represent"):
        probe(tiny("gemma2"))


def test_a_wrong_window_is_noticed(tiny, monkeypatch):
    monkeypatch.setattr("kvtool.capture.probe.window_of", lambda call, config: ("sliding", 10))
    with pytest.raises(KvtoolError, match="the mask it received is another"):
        probe(tiny("mistral"))


def test_missing_sinks_are_noticed(tiny, monkeypatch):
    monkeypatch.setattr("kvtool.capture.probe.sink_logits", lambda call: None)
    with pytest.raises(KvtoolError, match="cannot represent"):
        probe(tiny("gpt_oss"))


def test_the_model_is_left_as_it_was(tiny):
    model = tiny("gemma3")
    before = model.config._attn_implementation
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules() if isinstance(m, nn.Module))
    probe(model)
    assert model.config._attn_implementation == before
    assert hooks == sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
