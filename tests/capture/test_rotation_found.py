"""The rotary embedding of each architecture, found by behaviour and proved by undoing it."""

from __future__ import annotations

import pytest
import torch

from kvtool.capture.probe import probe
from kvtool.capture.rotation import Tables, find_rotation
from kvtool.rotation import Rotation

EXPECTED = {  # layout, first rotated channel, rotated channels
    "llama": ("half", 0, 16),
    "llama3-scaled": ("half", 0, 16),
    "llama-yarn": ("half", 0, 16),
    "llama-dynamic": ("half", 0, 16),
    "qwen3": ("half", 0, 24),
    "gemma2": ("half", 0, 16),
    "gemma3": ("half", 0, 16),
    "gemma3n": ("half", 0, 16),
    "gpt_oss": ("half", 0, 16),
    "deepseek_v2": ("interleaved", 16, 8),
    "deepseek_v3": ("half", 16, 8),
    "phi3": ("half", 0, 8),
    "stablelm": ("half", 0, 4),
    "gptj": ("interleaved", 0, 8),
    "cohere2": ("interleaved", 0, 16),
    "glm4": ("interleaved", 0, 8),
    "qwen3_next": ("half", 0, 4),
    "llama4": ("interleaved", 0, 16),
}
WITHOUT = {"gpt2": [0, 1, 2], "opt": [0, 1, 2], "smollm3": [3], "cohere2": [3], "llama4": [3]}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layout_and_place(tiny, name, dtype):
    probed = probe(tiny(name, dtype))
    for layer, entry in probed.items():
        if layer not in WITHOUT.get(name, []):
            r = entry.geometry.rotation
            assert isinstance(r, Rotation), layer
            assert (r.layout, r.rotary_start, r.rotary_dims) == EXPECTED[name]


@pytest.mark.parametrize("name", WITHOUT)
def test_layers_without_rotation(tiny, name):
    probed = probe(tiny(name))
    assert [layer for layer, entry in probed.items() if entry.geometry.rotation == "none"] == WITHOUT[name]


def test_each_layer_type_has_its_own_frequencies(tiny):
    model = tiny("gemma3")
    probed = probe(model)
    local, everywhere = (probed[layer].geometry.rotation.inv_freq for layer in (0, 2))
    assert torch.equal(local, model.model.rotary_emb.sliding_attention_inv_freq)
    assert torch.equal(everywhere, model.model.rotary_emb.full_attention_inv_freq)
    assert not torch.equal(local, everywhere)


def test_scaled_frequencies_are_told_from_the_original_ones(tiny):
    model = tiny("llama3-scaled")
    found = probe(model)[1].geometry.rotation.inv_freq
    unscaled = 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)
    assert torch.equal(found, model.model.rotary_emb.inv_freq)
    assert not torch.allclose(found, unscaled)


def test_attention_scaling(tiny):
    assert probe(tiny("llama-yarn"))[0].geometry.rotation.attention_scaling == pytest.approx(0.1 * 1.3862944 + 1)
    assert probe(tiny("llama-yarn", torch.bfloat16))[0].geometry.rotation.attention_scaling == pytest.approx(1.1386294)
    assert probe(tiny("gpt_oss"))[0].geometry.rotation.attention_scaling == pytest.approx(1.3465736)
    assert probe(tiny("llama"))[0].geometry.rotation.attention_scaling == 1.0


# Qwen3-Next's first attention layer stands behind recurrent ones: its input is not the token alone.
@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {"qwen3_next"}))
def test_unrotated_queries_of_one_token_agree_across_positions(tiny, record, name):
    """At layer 0 a repeated token differs by its position alone, so undoing the rotation makes it equal."""
    run = record(tiny(name), [[7] * 21, [7], [7]])
    layer = min(run.geometries)
    rotation, positions = run.geometries[layer].rotation, torch.arange(23)
    for array in ("queries", "keys"):
        rotated = run.arrays[layer][array].double()
        plain = rotation.unrotate(rotated, positions, rows=positions)
        size = plain.norm(dim=-1, keepdim=True)
        assert float(((plain - plain[:, :1]) / size).abs().max()) < 5e-5
        assert float(((rotated - rotated[:, :1]) / size).abs().max()) > 0.1
        again = rotation.rotate(plain, positions, rows=positions)
        assert float(((again - rotated) / size).abs().max()) < 1e-6
        first, stop = rotation.rotary_start, rotation.rotary_start + rotation.rotary_dims
        assert torch.equal(plain[..., :first], rotated[..., :first])
        assert torch.equal(plain[..., stop:], rotated[..., stop:])


def test_dynamic_ntk_across_its_limit_is_recorded_row_by_row(tiny, record):
    """48 positions are its own; rows decoded beyond were turned with a base that grows with the text."""
    model = tiny("llama-dynamic")
    run = record(model, [[7] * 40, *[[7]] * 30])
    rotation, rows = run.geometries[0].rotation, torch.arange(70)
    assert rotation.inv_freq is None
    assert not rotation.by_position
    assert rotation.cos.shape == rotation.sin.shape == (70, 8)
    short = probe(model)[0].geometry.rotation
    cos, sin = short.tables(torch.arange(48))
    assert torch.equal(rotation.cos[:48], cos)
    assert torch.equal(rotation.sin[:48], sin)
    assert not torch.allclose(rotation.cos[69], short.tables(torch.tensor([69]))[0][0], atol=1e-3)
    keys = run.arrays[0]["keys"].double()
    plain = rotation.unrotate(keys, rows, rows=rows)
    assert float((plain - plain[:, :1]).abs().max() / plain.norm(dim=-1).mean()) < 5e-5
    naive = short.unrotate(keys, rows)
    assert float((naive - naive[:, :1]).abs().max() / plain.norm(dim=-1).mean()) > 1e-2


def test_a_prompt_beyond_the_limit_uses_one_other_base(tiny, record):
    run = record(tiny("llama-dynamic"), [[7] * 60])
    rotation = run.geometries[0].rotation
    assert rotation.inv_freq is not None
    assert not torch.equal(rotation.inv_freq, run.probed[0].geometry.rotation.inv_freq)
    plain = rotation.unrotate(run.arrays[0]["keys"].double(), torch.arange(60))
    assert float((plain - plain[:, :1]).abs().max() / plain.norm(dim=-1).mean()) < 5e-5


def test_one_sequence_leaves_no_frequencies_to_the_next(tiny, record):
    """A long text first must not change what a middling one records."""
    model = tiny("llama-dynamic")
    middling = [list(range(10, 65)), [9], [8]]
    alone = record(model, middling)
    record(model, [[7] * 120])
    after = record(model, middling)
    assert torch.equal(alone.arrays[0]["keys"], after.arrays[0]["keys"])


def test_an_unknown_rotation_stays_unknown(tiny):
    """Frequencies that are not among the candidates, and a change that is no rotation at all."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 24, 16, generator=generator)
    positions = torch.arange(24)
    true = Rotation(16, "half", 1.0 / 777.0 ** (torch.arange(0, 16, 2).float() / 16))
    other = 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)
    before, after = true.rotate(x, positions), true.rotate(x, positions + 100)
    assert find_rotation(before, after, positions, 100, [other], [1.0], None, torch.float32) is None
    assert find_rotation(before, after * 1.5, positions, 100, [true.inv_freq], [1.0], None, torch.float32) is None
    found = find_rotation(before, after, positions, 100, [other, true.inv_freq], [1.0], None, torch.float32)
    assert torch.equal(found.inv_freq, true.inv_freq)
    assert found.layout == "half"


def test_received_tables_of_every_width():
    angles = torch.arange(5)[:, None] * torch.tensor([1.0, 0.5, 0.25])
    half = Tables(torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1))
    woven = Tables(angles.cos().repeat_interleave(2, -1), angles.sin().repeat_interleave(2, -1))
    narrow = Tables(angles.cos(), angles.sin())
    for tables in (half, woven, narrow):
        cos, sin = tables.pairs(3)
        assert torch.equal(cos, angles.cos())
        assert torch.equal(sin, angles.sin())
        assert tables.pairs(2) is None
    assert narrow.swapped().sine_first
    assert not narrow.sine_first
