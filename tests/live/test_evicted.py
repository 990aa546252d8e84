"""Evicted tokens are out of reach and nothing else changes: against the plain model, deletion, and a dumb loop."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from kvtool.capture.generation import Feed
from kvtool.capture.hook import observed
from kvtool.capture.probe import probe
from kvtool.capture.quiet import quiet
from kvtool.capture.rotation_watch import RotaryState
from kvtool.errors import KvtoolError
from kvtool.live.evicted import Evicted
from kvtool.retained import RetainedSet

EVENT, TOKENS = 23, 37
ALL = [
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "gpt2",
    "opt",
    "cohere2",
    "llama4",
    "qwen3_next",
]


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(3, 300, (TOKENS,), generator=torch.Generator().manual_seed(9)).tolist()


def decisions(model: Any, kept: int | None, seed: int = 0, alike: bool = False) -> dict[int, RetainedSet]:
    """Every head of every layer keeps `kept` random rows of the first 23 (or all), each its own unless `alike`."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for layer, entry in probe(model).items():
        geometry = entry.geometry
        steps = torch.full((geometry.kv_heads, TOKENS), TOKENS, dtype=torch.int32)
        if kept is not None and geometry.kv_source is None:
            for head in range(geometry.kv_heads):
                steps[head, torch.randperm(EVENT, generator=generator)[kept:]] = EVENT
            steps = steps[:1].expand(geometry.kv_heads, -1) if alike else steps
        found[layer] = RetainedSet(steps if geometry.kv_source is None else found[geometry.kv_source].evict_step)
    return found


class Kept(Evicted):
    """Keeps every call, for the dumb loop."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[tuple[int, Any]] = []

    def see(self, call: Any) -> None:
        super().see(call)
        self.calls.append((self._start, call))


def run(
    model: Any, tokens: list[int], retained: dict[int, RetainedSet] | None, chunk: int | None = None
) -> tuple[torch.Tensor, list[tuple[int, Any]]]:
    """Logits [14, V] behind the rows after the event, and the attention calls that gave them."""
    rotary = RotaryState(model)
    feed = Feed(model)
    feed.push(tokens[:EVENT])
    try:
        if retained is None:
            branch = feed.fork()
            return torch.cat([branch.logits(part) for part in parts(tokens[EVENT:], chunk)]), []
        watched = Kept({layer: entry.geometry for layer, entry in probe(model).items()}, retained, EVENT)
        branch = feed.fork(around=watched.forward)
        with observed(model, watched):
            logits = torch.cat([branch.logits(part) for part in parts(tokens[EVENT:], chunk)])
        return logits, watched.calls
    finally:
        rotary.restore()


def parts(tokens: list[int], chunk: int | None) -> list[list[int]]:
    size = chunk or len(tokens)
    return [tokens[i : i + size] for i in range(0, len(tokens), size)]


def close(a: torch.Tensor, b: torch.Tensor, bound: float = 2e-5) -> bool:
    return float((a.double() - b.double()).norm() / b.double().norm()) < bound


@pytest.mark.parametrize("chunk", [None, 1, 5])
@pytest.mark.parametrize("name", ALL)
def test_removing_nothing_gives_the_models_own_logits(tiny, tokens, name, chunk):
    model = tiny(name)
    plain, _ = run(model, tokens, None, chunk)
    hidden, calls = run(model, tokens, decisions(model, None), chunk)
    assert calls
    assert close(hidden, plain)


@pytest.mark.parametrize("name", ALL)
def test_removing_something_does_not_and_block_and_single_steps_agree(tiny, tokens, name):
    model = tiny(name)
    retained = decisions(model, 5)
    block, _ = run(model, tokens, retained)
    single, _ = run(model, tokens, retained, chunk=1)
    middle, _ = run(model, tokens, retained, chunk=4)
    plain, _ = run(model, tokens, None)
    assert close(single, block)
    assert close(middle, block)
    assert not close(block, plain, 1e-2)


def naive_output(geometry: Any, call: Any, row: int, step: int, leaves: torch.Tensor) -> torch.Tensor:
    """[H, Dv] of one query, head by head and key by key in float64, from the tokens that are left to it."""
    columns = call.keys.shape[1]
    first = step - row + call.queries.shape[1] - columns  # row of column 0
    out = torch.zeros(geometry.query_heads, geometry.value_dim, dtype=torch.float64)
    for head in range(geometry.query_heads):
        kv = head // geometry.group
        logits, values = [], []
        for column in range(columns):
            token = first + column
            if token > step or (token < TOKENS and leaves[kv, token] < TOKENS and step >= leaves[kv, token]):
                continue
            if geometry.kind == "sliding" and step - token >= geometry.window:
                continue
            if geometry.kind == "chunked" and step // geometry.window != token // geometry.window:
                continue
            z = float(call.queries[head, row].double() @ call.keys[kv, column].double()) * geometry.scale
            logits.append(z if geometry.softcap is None else geometry.softcap * math.tanh(z / geometry.softcap))
            values.append(call.values[kv, column].double())
        if geometry.sink_logits is not None:
            logits.append(float(geometry.sink_logits[head]))
        weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
        for weight, value in zip(weights[: len(values)], values, strict=True):
            out[head] += weight * value
    return out


@pytest.mark.parametrize("chunk", [None, 1, 5])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3n", "gpt_oss", "deepseek_v3", "llama4"])
def test_attention_under_eviction_equals_a_loop_over_what_is_left(tiny, tokens, name, chunk):
    """GQA with other sets in every head, sliding and chunked windows, softcap, sink logits, MLA, shared caches."""
    model = tiny(name)
    retained = decisions(model, 4, seed=3)
    geometries = {layer: entry.geometry for layer, entry in probe(model).items()}
    _, calls = run(model, tokens, retained, chunk)
    seen = set()
    for start, call in calls:
        n = call.queries.shape[1]
        for row in {0, n // 2, n - 1}:
            leaves = retained[call.layer].evict_step
            expected = naive_output(geometries[call.layer], call, row, start + row, leaves)
            found = call.output[row].double()
            assert float((found - expected).norm() / expected.norm()) < 1e-5, (call.layer, start + row)
            seen.add((call.layer, start + row))
    assert {layer for layer, _ in seen} == set(geometries)
    assert {EVENT, TOKENS - 1} <= {step for _, step in seen}


def full_gpt_oss() -> Any:
    """Sink logits without a window."""
    torch.manual_seed(1)
    config = transformers.GptOssConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        layer_types=["full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.3,
        eos_token_id=2,
        pad_token_id=None,
    )
    with quiet():
        model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            parameter.add_(torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3", "phi3", "sinks"])
def test_hiding_equals_deleting_from_the_cache(tiny, tokens, name):
    """Heads keep different tokens but equally many, so they can be cut out of the cache; positions stay.

    The cache of MLA holds one latent row for all heads, so there they keep the same.
    """
    model = full_gpt_oss() if name == "sinks" else tiny(name)
    retained = decisions(model, 6, seed=5, alike=name == "deepseek_v3")
    hidden, _ = run(model, tokens, retained, chunk=1)
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        cache = model(input_ids=torch.tensor([tokens[:EVENT]]), use_cache=True).past_key_values
        for layer, decided in retained.items():
            stored = cache.layers[layer]
            for word in ("keys", "values"):
                rows = getattr(stored, word)[0]  # [Hk, 23, D]
                left = [rows[h][decided.evict_step[h, :EVENT] == TOKENS] for h in range(rows.shape[0])]
                setattr(stored, word, torch.stack(left)[None])
        assert cache.get_seq_length() == 6
        deleted = []
        for row in range(EVENT, TOKENS):
            place = torch.tensor([[row]])
            output = model(input_ids=torch.tensor([[tokens[row]]]), **{cache_name: cache}, position_ids=place)
            deleted.append(output.logits[0, -1])
    assert close(hidden, torch.stack(deleted))


@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek_v3"])
def test_masks_by_head_agree_under_sdpa_and_eager(tiny, tokens, name):
    model = tiny(name)
    retained = decisions(model, 5)
    by_sdpa = [run(model, tokens, retained, chunk)[0] for chunk in (None, 1)]
    model.set_attn_implementation("eager")
    try:
        by_eager = [run(model, tokens, retained, chunk)[0] for chunk in (None, 1)]
    finally:
        model.set_attn_implementation("sdpa")
    assert all(close(a, b) for a, b in zip(by_sdpa, by_eager, strict=True))


def test_rows_behind_the_trace_never_leave(tiny, tokens):
    """A continuation of the model's own runs past T: what was never evicted stays in reach there too."""
    model = tiny("llama")
    geometries = {layer: entry.geometry for layer, entry in probe(model).items()}
    watched = Evicted(geometries, decisions(model, 5), TOKENS + 3)
    hidden = watched.hidden(0, 2, TOKENS + 5)
    assert hidden.shape == (4, 2, TOKENS + 5)
    assert hidden[:, :, :EVENT].sum((1, 2)).tolist() == [2 * (EVENT - 5)] * 4
    assert not hidden[:, :, EVENT:].any()
    assert torch.equal(hidden[0], hidden[1])  # one group, one set
    assert not torch.equal(hidden[1], hidden[2])


def test_a_mask_that_contradicts_the_geometry_is_refused(tiny, tokens):
    """Every layer of its own kind and window is held against its own mask."""
    model = tiny("mistral")
    geometries = {layer: entry.geometry for layer, entry in probe(model).items()}
    last = max(geometries)
    wrong = {**geometries, last: replace(geometries[last], window=geometries[last].window - 1)}
    feed = Feed(model)
    feed.push(tokens[:EVENT])
    watched = Evicted(wrong, decisions(model, None), EVENT)
    branch = feed.fork(around=watched.forward)
    with observed(model, watched), pytest.raises(KvtoolError):
        branch.logits(tokens[EVENT:])


def test_a_layer_that_is_never_called_is_missed(tiny, tokens):
    model = tiny("llama")
    geometries = {layer: entry.geometry for layer, entry in probe(model).items()}
    feed = Feed(model)
    feed.push(tokens[:EVENT])
    watched = Evicted({**geometries, 99: geometries[0]}, {}, EVENT)
    branch = feed.fork(around=watched.forward)
    with observed(model, watched), pytest.raises(KvtoolError, match=r"layers \[99\] were not called"):
        branch.logits(tokens[EVENT:])
