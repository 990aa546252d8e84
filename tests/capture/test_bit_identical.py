"""A recorded run gives the very logits of the model without kvtool, and records what attention saw."""

from __future__ import annotations

import pytest
import torch

from kvtool.capture.generation import Feed
from kvtool.capture.hook import implementation

RECORDED = [
    "llama",
    "llama-yarn",
    "llama-dynamic",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "phi3",
    "stablelm",
    "gpt2",
    "opt",
    "gptj",
    "smollm3",
    "cohere2",
    "glm4",
    "qwen3_next",
    "llama4",
]


def plain(model, pushes, chunk=None):
    """Logits behind each push of the model alone."""
    from kvtool.capture.rotation_watch import RotaryState

    state = RotaryState(model)
    feed = Feed(model, chunk=chunk)
    logits = [feed.push(part) for part in pushes]
    state.restore()
    return logits


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_bit_identical(tiny, record, pushes, name, dtype):
    model = tiny(name, dtype)
    alone = plain(model, pushes)
    recorded = record(model, pushes)
    for mine, theirs in zip(recorded.logits, alone, strict=True):
        assert torch.equal(mine, theirs)
    assert implementation(model) in ("sdpa", "eager")


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss", "llama4"])
def test_chunked_prefill_is_bit_identical_too(tiny, record, pushes, name):
    model = tiny(name)
    alone, recorded = plain(model, pushes, chunk=7), record(model, pushes, chunk=7)
    assert all(torch.equal(a, b) for a, b in zip(recorded.logits, alone, strict=True))


def attention_by_loop(geometry, queries, keys, values, step, row):
    """Output [H, Dv] of one query at `step`, computed head by head and key by key in float64."""
    heads, group = geometry.query_heads, geometry.query_heads // geometry.kv_heads
    out = torch.zeros(heads, geometry.value_dim, dtype=torch.float64)
    for h in range(heads):
        logits, seen = [], []
        for i in range(step + 1):
            if geometry.kind == "sliding" and step - i >= geometry.window:
                continue
            if geometry.kind == "chunked" and step // geometry.window != i // geometry.window:
                continue
            z = float(queries[h, row].double() @ keys[h // group, i].double()) * geometry.scale
            if geometry.softcap is not None:
                z = geometry.softcap * float(torch.tanh(torch.tensor(z / geometry.softcap, dtype=torch.float64)))
            logits.append(z)
            seen.append(i)
        if geometry.sink_logits is not None:
            logits.append(float(geometry.sink_logits[h]))
        weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
        for weight, i in zip(weights[: len(seen)], seen, strict=True):
            out[h] += weight * values[h // group, i].double()
    return out


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("chunk", [None, 7])
def test_recorded_arrays_give_the_models_output(tiny, record, pushes, name, chunk):
    """The last steps, through prefill, decoding and a block behind a short cache, by a dumb loop."""
    run = record(tiny(name), pushes, chunk=chunk)
    for layer, geometry in run.geometries.items():
        arrays = run.arrays[layer]
        donor = run.arrays[layer if geometry.kv_source is None else geometry.kv_source]
        assert arrays["queries"].shape == (geometry.query_heads, run.tokens, geometry.key_dim)
        assert donor["keys"].shape == (geometry.kv_heads, run.tokens, geometry.key_dim)
        assert donor["values"].shape == (geometry.kv_heads, run.tokens, geometry.value_dim)
        assert arrays["query_steps"].tolist() == list(range(run.tokens))
        sample = run.samples[layer]  # [H, 8, Dv]
        assert sample.shape[1] == 8
        for back in (1, 6, 8):  # inside the last block, and before it
            step = run.tokens - back
            expected = attention_by_loop(geometry, arrays["queries"], donor["keys"], donor["values"], step, step)
            error = (sample[:, -back].double() - expected).norm() / expected.norm()
            assert float(error) < 1e-5, (layer, step)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2", "deepseek_v3"])
def test_queries_and_keys_give_the_models_own_weights(tiny, record, name):
    """Weights that eager attention reports, in prefill, from recorded queries and keys: QK-norm is inside them."""
    model = tiny(name)
    tokens, before = list(range(10, 27)), implementation(model)
    model.set_attn_implementation("eager")
    run = record(model, [tokens])
    with torch.no_grad():
        reported = model(input_ids=torch.tensor([tokens]), output_attentions=True).attentions
    model.set_attn_implementation(before)
    for layer, geometry in run.geometries.items():
        queries, keys = run.arrays[layer]["queries"].double(), run.arrays[layer]["keys"].double()
        for h in range(geometry.query_heads):
            for t in (0, 8, 16):
                first = max(0, t - geometry.window + 1) if geometry.window else 0
                z = keys[h // geometry.group, first : t + 1] @ queries[h, t] * geometry.scale
                z = z if geometry.softcap is None else geometry.softcap * torch.tanh(z / geometry.softcap)
                theirs = reported[layer][0, h, t, first : t + 1].double()
                assert float((z.softmax(0) - theirs).abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("queries", "first"), [("all", 0), ("decode", 23), ("last:5", 34), ("last:20", 19), ("last:99", 0)]
)
@pytest.mark.parametrize("known", [True, False])
def test_query_selection(tiny, record, pushes, queries, first, known):
    model = tiny("llama")
    everything, run = record(model, pushes), record(model, pushes, queries=queries, known=known)
    for layer in run.geometries:
        assert run.arrays[layer]["query_steps"].tolist() == list(range(first, 39))
        assert torch.equal(run.arrays[layer]["queries"], everything.arrays[layer]["queries"][:, first:])
        assert torch.equal(run.arrays[layer]["keys"], everything.arrays[layer]["keys"])
        assert run.samples[layer].shape[1] == min(8, 39 - first)
        assert torch.equal(run.samples[layer], everything.samples[layer][:, -run.samples[layer].shape[1] :])


def test_batches_and_padding_are_refused(tiny):
    from kvtool.capture.hook import observed
    from kvtool.errors import KvtoolError

    class Eager:
        def wants(self, layer):
            return True

        def see(self, call):
            raise AssertionError("nothing of a batch may be seen")

    model = tiny("llama")
    with pytest.raises(KvtoolError, match="one sequence"), observed(model, Eager()):
        model(input_ids=torch.tensor([[5, 6], [7, 8]]))
    assert implementation(model) == "sdpa"
