"""A real model: SmolLM2-135M, on English that ships with Python."""

from __future__ import annotations

import pydoc_data.topics

import pytest
import torch

from kvtool.capture import capture
from kvtool.trace.recompute import recompute

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    place = tmp_path_factory.mktemp("smollm2")
    text = place / "topics.txt"
    text.write_text("\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)))
    return capture(
        "smollm2", place / "run.zarr", text_file=text, prompt_tokens=200, eval_tokens=24, layers="0,15,29", threads=1
    )


def test_the_stored_arrays_give_the_models_output(trace):
    assert [result.layer for result in recompute(trace)] == [0, 15, 29]
    assert all(result.error < 2e-6 for result in recompute(trace))


def test_geometry_and_manifest(trace):
    geometry = trace.sequences[0].layer(15).geometry
    assert (geometry.query_heads, geometry.kv_heads, geometry.key_dim, geometry.value_dim) == (9, 3, 64, 64)
    assert geometry.scale == 0.125
    frequencies = 1.0 / 100000.0 ** (torch.arange(0, 64, 2).float() / 64)
    assert torch.allclose(geometry.rotation.inv_freq, frequencies)
    assert geometry.rotation.layout == "half"
    assert trace.manifest["model"]["weight_digest"].startswith("b179c9523d0e6a0f")
    assert trace.manifest["model"]["parameters"] == 134_515_008


def test_the_first_tokens_are_attention_sinks(trace):
    """What random models never show: a large share of attention on the very first token in deep layers."""
    layer = trace.sequences[0].layer(15)
    g = layer.geometry
    mass = 0.0
    for h in range(g.query_heads):
        z = layer.keys[h // g.group, :221] @ layer.queries[h, 220] * g.scale
        mass += float(z.softmax(0)[0]) / g.query_heads
    assert mass > 0.3


def test_text_and_tokens_agree(trace):
    sequence = trace.sequences[0]
    start = "".join(sequence.texts())
    topics = pydoc_data.topics.topics
    assert "\n\n".join(topics[name] for name in sorted(topics)).startswith(start)
    assert len(start) > 500
