"""Runs that decide for themselves read nothing ahead: what is not computed yet may be anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvtool.allocator import Uniform
from kvtool.budget import Budget
from kvtool.layer import Layer
from kvtool.live import live
from kvtool.live.recording import Recording
from kvtool.policies import Protection, policy_from_text
from kvtool.replay.choose import First
from kvtool.replay.decide import Track
from kvtool.replay.rules import Rules
from kvtool.rotation import Rotation
from kvtool.schedule import parse_schedule

TOKENS, PROMPT = 40, 22
OPTIONS = {"budgets": 20, "sinks": 2, "window": 6, "schedules": "every:4", "decide": "run"}


def layer_of(window=None):
    draw = torch.Generator().manual_seed(5)
    shapes = {"queries": (4, TOKENS, 8), "keys": (2, TOKENS, 8), "values": (2, TOKENS, 6)}
    arrays = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    rotation = Rotation(inv_freq=10000.0 ** (-torch.arange(0, 8, 2) / 8), rotary_dims=8)
    layer = Layer.from_arrays(**arrays, prompt_length=PROMPT, scale=0.5, window=window, rotation=rotation)
    return layer, arrays


def track(layer, word, schedule):
    label, policy = policy_from_text(word)
    rules = Rules(parse_schedule(schedule), Protection(1, 3))
    return Track(layer, label, policy, Budget.from_tokens(9), rules, layer.query_steps, Uniform(), First())


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize(
    "schedule", ["prompt-end", "every:5/after", "high-water:11", "prefill:8+every:3", "every:1,from:0"]
)
@pytest.mark.parametrize("word", ["h2o", "snapkv:window=4", "tova", "knorm", "jacap:tau=1", "random"])
def test_a_track_may_be_driven_while_its_layer_is_still_computed(word, schedule, window):
    layer, arrays = layer_of(window)
    whole = track(layer, word, schedule).run()
    growing = {name: torch.full_like(array, torch.nan) for name, array in arrays.items()}
    loaders = {**layer.loaders, **{name: (lambda array=array: array) for name, array in growing.items()}}
    driven = track(replace(layer, loaders=loaders), word, schedule)
    events = driven.events()
    steps = []
    while (step := next(events, None)) is not None:
        steps.append(step)
        for name, array in arrays.items():
            growing[name][:, :step] = array[:, :step]
    assert steps == [event.step for event in whole.events]
    assert steps
    assert torch.equal(driven.retained.evict_step, whole.evict_step)
    assert bool((whole.evict_step < TOKENS).any())


def decisions(result):
    return {(e["policy"], e["layer"], e["kv_head"]): e["evict_step"] for e in result.entries("evict_steps")}


def test_rows_that_are_not_computed_yet_may_hold_anything(folder, traced, monkeypatch):
    """Not even what another policy's run left there shows."""
    policies = ["tova", "h2o", "snapkv:window=4", "keydiff", "jacap:tau=1"]
    found = decisions(live(folder("llama"), traced("llama"), policies, **OPTIONS))
    poisoned = Recording.rewind

    def huge(self, step):
        poisoned(self, step)
        for rows in self._rows.values():
            for array in (rows.queries, rows.keys, rows.values):
                array.nan_to_num_(nan=1e30)

    for other in (huge, lambda self, step: None):
        monkeypatch.setattr(Recording, "rewind", other)
        assert decisions(live(folder("llama"), traced("llama"), policies, **OPTIONS)) == found
    alone = decisions(live(folder("llama"), traced("llama"), ["keydiff"], **OPTIONS))
    assert alone == {place: steps for place, steps in found.items() if place in alone}
    assert any(place[0] == "keydiff" for place in alone)


def test_decisions_depend_on_earlier_tokens_alone(folder, tmp_path):
    """Two texts that part at row 66: what left before it left both, and later decisions part."""
    from kvtool.capture import capture

    text = "Sphinx of black quartz, judge my vow. The five boxing wizards jump quickly; "
    found = []
    for name, tail in (("a", "pack my box with jugs, and more"), ("b", "0123456789 0123456789 012345678")):
        (tmp_path / f"{name}.txt").write_text(text[:66] + tail)
        trace = capture(
            folder("llama"),
            tmp_path / f"{name}.zarr",
            text_file=tmp_path / f"{name}.txt",
            prompt_tokens=60,
            eval_tokens=25,
        )
        tokens = trace.sequences[0].tokens
        found.append((tokens, decisions(live(folder("llama"), trace, ["tova", "h2o", "keydiff"], **OPTIONS))))
    (a, left), (b, right) = found
    parts = int((a != b).nonzero()[0])
    assert 60 < parts < 76
    assert left.keys() == right.keys()
    early, late = 0, 0
    for place, steps in left.items():
        for row, (x, y) in enumerate(zip(steps, right[place], strict=True)):
            if min(x, y) <= parts:
                assert x == y, (place, row)
                early += 1
            late += x != y
    assert early > 500
    assert late > 50


def test_a_run_in_float64_decisions_reads_what_the_model_computed(folder, traced):
    """The recording is in the decisions' own dtype, so that the layer reads the very tensors that are filled."""
    single, double = (
        live(folder("llama"), traced("llama"), ["keydiff"], precision=precision, **OPTIONS)
        for precision in ("float32", "float64")
    )
    assert decisions(single) == decisions(double)
    (kl,) = {c["measured_kl"] for c in double.entries("cells") if c["policy"] == "keydiff"}
    assert kl > 0
