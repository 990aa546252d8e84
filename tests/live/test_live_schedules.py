"""Several events in a live run, against a plain model whose cache really loses its rows, step by step."""

from __future__ import annotations

import inspect
import json

import pytest
import torch

from kvtool.capture import capture
from kvtool.cli.main import run as command
from kvtool.errors import KvtoolError
from kvtool.live import live
from kvtool.replay import replay

PROMPT, TOKENS, BUDGET, SINKS, WINDOW = 60, 73, 20, 2, 6
OPTIONS = {"budgets": BUDGET, "sinks": SINKS, "window": WINDOW}


def pruned_run(model, tokens, first, leave):
    """Logits [T - first, V] of a plain model, one token a forward from row `first` on, rows deleted from its cache.

    Args:
        leave: function of (step, cache, held) -> {layer: [Hk lists of rows that leave before this query]}, as many in
            every head of a layer; `held` [layer][head] is the rows that the cache holds.
    """
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    found = []
    with torch.no_grad():
        cache = model(input_ids=torch.tensor([tokens[:first]]), use_cache=True).past_key_values
        layers = range(len(cache.layers))
        held = {i: [list(range(first)) for _ in range(cache.layers[i].keys.shape[1])] for i in layers}
        for step in range(first, len(tokens)):
            for layer, gone in leave(step, cache, held).items():
                stored, mine = cache.layers[layer], held[layer]
                stay = [
                    [i for i, row in enumerate(rows) if row not in set(out)]
                    for rows, out in zip(mine, gone, strict=True)
                ]
                for word in ("keys", "values"):
                    array = getattr(stored, word)[0]
                    setattr(stored, word, torch.stack([array[h][places] for h, places in enumerate(stay)])[None])
                held[layer] = [[rows[i] for i in places] for rows, places in zip(mine, stay, strict=True)]
            place = torch.tensor([[step]])
            output = model(input_ids=torch.tensor([[tokens[step]]]), **{name: cache}, position_ids=place)
            found.append(output.logits[0, -1])
            for rows in held.values():
                for mine in rows:
                    mine.append(step)
    return torch.stack(found)


def kl_of(model, tokens, first, logits):
    """[n] nats of the plain model's whole-cache predictions against `logits`."""
    with torch.no_grad():
        full = model(input_ids=torch.tensor([tokens])).logits[0, first:]
    p, q = full.double().softmax(-1), logits.double().softmax(-1)
    return (p * (p.log() - q.log())).sum(-1)


def decided(result, policy, sequence=0):
    """{layer: [Hk][T]} evict_step."""
    found = {}
    for entry in result.entries("evict_steps"):
        if entry["policy"] == policy and entry["sequence"] == sequence:
            found.setdefault(entry["layer"], []).append(entry["evict_step"])
    return found


def kl_by_step(result, policy):
    return torch.tensor([e["kl"] for e in result.entries("steps") if e["policy"] == policy], dtype=torch.float64)


def cells(result, sequence=0):
    return {c["policy"]: c for c in result.entries("cells") if c["sequence"] == sequence}


@pytest.mark.parametrize("decide", ["trace", "run"])
@pytest.mark.parametrize(
    ("name", "schedule", "events"),
    [
        ("llama", "every:4", [60, 64, 68, 72]),
        ("qwen3", "every:5/after/delay:2", [61, 66, 71]),
        ("llama", "high-water:24", [60, 64, 68, 72]),
        ("llama", "prefill:25+every:6/block:3", [25, 50, 60, 66, 72]),
        ("llama", "every:16,from:0", [32, 48, 64]),
    ],
)
def test_predictions_are_those_of_a_cache_that_loses_its_rows(folder, traced, tiny, name, schedule, events, decide):
    """What was decided, carried out by deleting: every step's KL agrees, in both kinds of decision."""
    found = live(folder(name), traced(name), ["tova", "knorm"], schedules=schedule, decide=decide, prefix=3, **OPTIONS)
    tokens = traced(name).sequences[0].tokens.tolist()
    for policy in ("tova", "knorm", "random"):
        steps = decided(found, policy)
        left = sorted({e for heads in steps.values() for mine in heads for e in mine if e < TOKENS})
        assert left
        assert set(left) <= set(events)
        first = TOKENS - cells(found)[policy]["evaluated_steps"]

        def leave(step, cache, held, steps=steps):
            return {i: [[r for r, e in enumerate(mine) if e == step] for mine in steps[i]] for i in steps}

        expected = kl_of(tiny(name), tokens, first, pruned_run(tiny(name), tokens, first, leave))
        assert torch.allclose(kl_by_step(found, policy), expected, rtol=1e-3, atol=1e-8)
        assert float(expected.max()) > 1e-4
    assert cells(found)["full"]["measured_kl"] < 1e-9


def test_the_closed_loop_by_hand(folder, traced, tiny):
    """KeyDiff, read off the pruned cache of a plain model as it goes: what the run decides, and what follows."""
    found = live(folder("llama"), traced("llama"), ["keydiff"], schedules="every:4", decide="run", **OPTIONS)
    tokens = traced("llama").sequences[0].tokens.tolist()
    taken = {}

    def leave(step, cache, held):
        if step % 4:
            return {}
        gone = {}
        for layer, heads in held.items():
            gone[layer] = []
            for head, rows in enumerate(heads):
                keys = cache.layers[layer].keys[0, head].double()
                units = keys / keys.norm(dim=-1, keepdim=True)
                mean = units.mean(0)
                alike = dict(zip(rows, (units @ mean / mean.norm()).tolist(), strict=True))
                kept = [r for r in rows if r < SINKS or r >= step - WINDOW]
                rest = sorted((r for r in rows if r not in kept), key=lambda r: alike[r])
                kept += rest[: BUDGET - len(kept)]
                gone[layer].append([r for r in rows if r not in kept])
                taken.update({(layer, head, r): step for r in gone[layer][-1]})
        return gone

    logits = pruned_run(tiny("llama"), tokens, PROMPT, leave)
    steps = decided(found, "keydiff")
    mine = {(i, h, r): e for i, heads in steps.items() for h, row in enumerate(heads) for r, e in enumerate(row)}
    assert {place: step for place, step in mine.items() if step < TOKENS} == taken
    expected = kl_of(tiny("llama"), tokens, PROMPT, logits)
    assert torch.allclose(kl_by_step(found, "keydiff"), expected, rtol=1e-3, atol=1e-8)
    # Errors have reached the decisions: but not those of the first layer, whose keys depend on the tokens alone.
    opened = live(folder("llama"), traced("llama"), ["keydiff"], schedules="every:4", **OPTIONS)
    apart = {}
    for layer, heads in decided(opened, "keydiff").items():
        pairs = zip(steps[layer], heads, strict=True)
        apart[layer] = sum(a != b for x, y in pairs for a, b in zip(x, y, strict=True))
    assert apart[0] == 0
    assert apart[1] + apart[2] > 0
    shares = {e["layer"]: e["decisions_differ"] for e in found.entries("layers") if e["policy"] == "keydiff"}
    assert shares == {i: count / (2 * TOKENS) for i, count in apart.items()}
    assert cells(found)["keydiff"]["decisions_differ"] == sum(apart.values()) / (3 * 2 * TOKENS)
    assert cells(opened)["keydiff"]["decisions_differ"] is None


@pytest.mark.parametrize("schedule", ["prompt-end", "at:41"])
def test_at_one_event_both_ways_of_deciding_agree(folder, traced, schedule):
    """Nothing was evicted before it, so the run has computed what the trace holds."""
    both = [
        live(folder("llama"), traced("llama"), ["all"], schedules=schedule, decide=decide, **OPTIONS)
        for decide in ("trace", "run")
    ]
    policies = set(cells(both[0]))
    assert len(policies) > 10
    for policy in policies:
        assert decided(both[0], policy) == decided(both[1], policy), policy
        assert cells(both[1])[policy]["decisions_differ"] == 0.0
        kl = [cells(result)[policy]["measured_kl"] for result in both]
        assert kl[1] == pytest.approx(kl[0], rel=1e-3, abs=1e-9)
    assert "decisions from the trace" in both[0].manifest["replay"]["loop"]
    assert "the run itself computed" in both[1].manifest["replay"]["loop"]
    assert any("oracles know the trace's future" in warning for warning in both[1].warnings)


@pytest.mark.parametrize("decide", ["trace", "run"])
def test_two_sequences_are_two_runs(folder, traced, tmp_path, decide):
    prompts = ["Sphinx of black quartz, judge my vow.", "Pack my box with five dozen liquor jugs"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    trace = capture(folder("llama"), tmp_path / "t.zarr", prompts=tmp_path / "p.jsonl", max_new_tokens=12)
    options = {"schedules": "every:4", "decide": decide, "budgets": 12, "sinks": 1, "window": 4}
    together = live(folder("llama"), trace, ["h2o", "tova"], **options)
    for index in (1, 0):
        alone = live(folder("llama"), trace, ["h2o", "tova"], sequences=[index], **options)
        for policy in ("h2o", "tova", "random"):
            assert decided(alone, policy, index) == decided(together, policy, index)
            kl = cells(alone, index)[policy]["measured_kl"]
            assert cells(together, index)[policy]["measured_kl"] == pytest.approx(kl, rel=1e-9, abs=1e-12)
    assert {e["sequence"] for e in together.entries("spans")} >= {0, 1}


@pytest.mark.parametrize("name", ["gemma3", "gemma3n", "gpt_oss", "deepseek_v3", "llama4", "qwen3_next", "mistral"])
def test_every_kind_of_model_decides_for_itself(folder, traced, name):
    """Windows, shared caches, sink logits, MLA: the first layer decides as the trace does, `full` stays exact."""
    trace = traced(name)
    found = live(
        folder(name),
        trace,
        ["knorm", "h2o"],
        schedules="every:3",
        decide="run",
        layer_errors=True,
        calibrate=True,
        budgets=5,
        sinks=1,
        window=2,
    )
    first = min(trace.layer_ids)
    assert cells(found)["full"]["measured_kl"] < 1e-9
    for entry in found.entries("layers"):
        if entry["layer"] == first:
            assert entry["decisions_differ"] == 0.0
        geometry = trace.sequences[0].geometry(entry["layer"])
        if geometry.kind == "full" and entry["policy"] != "full":
            assert entry["events"] == 5
    for policy in ("knorm", "h2o"):
        steps = decided(found, policy)
        for layer in trace.layer_ids:
            geometry = trace.sequences[0].geometry(layer)
            if geometry.kv_source is not None:
                assert steps[layer] == steps[geometry.kv_source]
            if geometry.kind == "sliding":  # what has left the window by itself is not evicted
                lives = [e - r for mine in steps[layer] for r, e in enumerate(mine) if e < TOKENS]
                assert max(lives) < geometry.window
        ratios = [
            row["closed_output_error"] / row["output_error"]
            for row in found.entries("rows")
            if row["layer"] == first and row["policy"] == policy and row["output_error"]
        ]
        assert ratios
        assert all(abs(ratio - 1) < 1e-3 for ratio in ratios)


def test_the_trace_decides_as_replay_does(folder, traced):
    schedules = ["every:4", "high-water:30"]
    found = live(folder("gemma3"), traced("gemma3"), ["tova"], schedules=schedules, chunk=5, **OPTIONS)
    opened = replay(traced("gemma3"), ["tova"], schedules=schedules, **OPTIONS)

    def digests(result):
        return {
            (e["policy"], e["schedule"], e["layer"], e["kv_head"]): e["digest"] for e in result.entries("evict_steps")
        }

    assert digests(found) == digests(opened)
    assert len({digest for _, digest in digests(found).items()}) > 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"generate": 3, "schedules": "every:4"}, "--generate goes with one event"),
        ({"decide": "model"}, "--decide model is unknown"),
        ({"schedules": "every:4", "evict_at": 3}, "--evict-at and a schedule were both given"),
        ({"schedules": "at:73"}, "no query after it"),
        ({"schedules": "sometimes"}, "is not understood"),
    ],
)
def test_bad_options(folder, traced, options, sentence):
    with pytest.raises(KvtoolError, match=sentence):
        live(folder("llama"), traced("llama"), ["knorm"], **OPTIONS, **options)


def test_the_command_takes_the_options_of_replay(folder, traced, tmp_path, capsys):
    words = ["live", str(folder("llama")), str(traced("llama", gradients=2).path), "-p", "knorm", "-b", "20"]
    words += ["--window", "6", "--sinks", "2"]
    assert command([*words, "--every", "4", "--decide", "run", "--calibrate", "--answer", "0451"]) == 0
    said = capsys.readouterr().out
    assert "KL over decode time, budget 20" in said
    assert "later layers, steps and decisions" in " ".join(said.split())
    assert "Between events (4 spans)" in " ".join(said.split())
    assert command([*words, "--high-water", "25", "--prefix", "3", "--evict-order", "after", "--delay", "2"]) == 0
    assert "events" in capsys.readouterr().out
    assert command([*words, "-s", "every:4", "-s", "prompt-end"]) == 0
    said = capsys.readouterr().out
    assert "budget 20, every:4: " in said
    assert "budget 20, prompt-end: " in said
    assert command([*words, "--every", "4", "--generate", "2"]) == 2
    assert "--generate goes with one event" in capsys.readouterr().err
