"""What capturing and replaying a large model will take, from its shape and from measured ratios.

    python docs/plan_on_paper.py

prints the tables of docs/scaling.md as they stand there; a test holds the page to them. Change a number here, and
change the page.
"""

from __future__ import annotations

# The model: Llama 3 70B, at 128k tokens.
LAYERS, QUERY_HEADS, KV_HEADS, DIM, HIDDEN, PARAMETERS = 80, 64, 8, 128, 8192, 70.6e9
PROMPT, EVALUATED = 131_072, 512
STORED_BYTES = 2  # bfloat16
TOKENS = PROMPT + EVALUATED

# One core, as measured (single thread, AVX-512, ratios inside one run).
SGEMM = 91e9  # flop/s in float32, both factors in cache tiles
DENSE_SHARE = 0.93  # of it that scaled-dot-product attention reaches at 32k tokens
REPLAY = 4.7  # 10 policies x 5 ratios against that dense pass, at 32k tokens; floor 3.0
FLOAT64 = 1.9  # times slower than float32
LEVERAGE_SHARE = 1 / 1.13  # of the two-GEMM floor
READ, WRITE, RAW_WRITE = 2.2e9, 0.21e9, 1.7e9  # bytes/s: heads, checksums compared; Zarr chunks; a plain file

# One accelerator and its way in, assumed, not measured here.
GPU, GPU_SHARE, LINK = 990e12, 0.4, 50e9  # bf16 flop/s, the share that long prompts reach, bytes/s from host memory


def capture() -> dict[str, float]:
    """Of one prompt, all layers."""
    cache = 2 * KV_HEADS * TOKENS * DIM * STORED_BYTES
    return {
        "cache_bytes": LAYERS * cache,
        "all_query_bytes": LAYERS * QUERY_HEADS * TOKENS * DIM * STORED_BYTES,
        "late_query_bytes": LAYERS * QUERY_HEADS * (EVALUATED + 64) * DIM * STORED_BYTES,
        "projection_bytes": LAYERS * QUERY_HEADS * DIM * HIDDEN * STORED_BYTES,
        "weight_flops": 2 * PARAMETERS * TOKENS,
        "attention_flops": LAYERS * 2 * QUERY_HEADS * DIM * TOKENS**2,  # two products, half of them masked
    }


def replay() -> dict[str, float]:
    """Of one layer."""
    rows = QUERY_HEADS // KV_HEADS * EVALUATED
    dense = 4 * KV_HEADS * rows * TOKENS * DIM
    return {
        "dense_flops": dense,
        "errors_s": REPLAY * dense / (SGEMM * DENSE_SHARE),
        "leverage_s": 4 * KV_HEADS * TOKENS * DIM**2 / (SGEMM * LEVERAGE_SHARE),
        "expected_s": 2 * QUERY_HEADS * TOKENS * DIM**2 * FLOAT64 / SGEMM,
        "mass_s": 2 * QUERY_HEADS * DIM * TOKENS**2 / SGEMM,  # logits of all queries twice, half of them masked
        "read_s": (2 * KV_HEADS + QUERY_HEADS) * TOKENS * DIM * STORED_BYTES / READ,
        "array_bytes": 4 * (2 * KV_HEADS + QUERY_HEADS) * TOKENS * DIM,
        "late_array_bytes": 4 * DIM * (2 * KV_HEADS * TOKENS + QUERY_HEADS * (EVALUATED + 64)),
    }


def duration(seconds: float) -> str:
    """In the unit that suits."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def tables() -> list[str]:
    """The lines of both tables."""
    c, r = capture(), replay()
    flops = c["weight_flops"] + c["attention_flops"]
    kept = c["cache_bytes"] + c["projection_bytes"]
    lines = [
        "| capture, all 80 layers | formula | |",
        "|---|---|---|",
        f"| keys and values | `L · 2 · Hk · T · d · 2 B` | {c['cache_bytes'] / 1e9:.0f} GB |",
        f"| all queries (`--queries all`) | `L · H · T · d · 2 B` | {c['all_query_bytes'] / 1e9:.0f} GB |",
        f"| queries of the last 576 steps only | `L · H · 576 · d · 2 B` | {c['late_query_bytes'] / 1e9:.2f} GB |",
        f"| output projections | `L · H · d · M · 2 B` | {c['projection_bytes'] / 1e9:.1f} GB |",
        f"| weights | `2 · P · T` | {c['weight_flops']:.1e} flop |",
        f"| attention | `L · 2 · H · d · T²` | {c['attention_flops']:.1e} flop |",
        f"| on one core (91 Gflop/s) | `flop / 91e9` | {duration(flops / SGEMM)} |",
        f"| on 8 accelerators at 40 % of 990 Tflop/s | `flop / (8 · 0.4 · 990e12)` | "
        f"{duration(flops / (8 * GPU * GPU_SHARE))} |",
        f"| writing it all as Zarr chunks, 0.21 GB/s | `bytes / 0.21e9` | "
        f"{duration((kept + c['all_query_bytes']) / WRITE)} |",
        f"| the same at the speed of a plain file, 1.7 GB/s | `bytes / 1.7e9` | "
        f"{duration((kept + c['all_query_bytes']) / RAW_WRITE)} |",
        "",
        "| replay, one layer, 10 policies x 5 ratios | formula | one core | 80 layers, 16 workers |",
        "|---|---|---|---|",
    ]
    for name, formula, key in (
        (
            "dense attention of 512 queries, errors of 50 cells",
            "`4.7 · 4 · H · 512 · T · d / (0.93 · 91e9)`",
            "errors_s",
        ),
        ("leverage scores, one policy", "`1.13 · 4 · Hk · T · d² / 91e9`", "leverage_s"),
        ("Expected Attention, float64", "`1.9 · 2 · H · T · d² / 91e9`", "expected_s"),
        ("attention mass of all queries (H2O and its like)", "`2 · H · d · T² / 91e9`", "mass_s"),
        ("reading keys, values and all queries", "`(2 Hk + H) · T · d · 2 B / 2.2e9`", "read_s"),
    ):
        lines.append(f"| {name} | {formula} | {duration(r[key])} | {duration(r[key] * LAYERS / 16)} |")
    lines += [
        f"| arrays in memory, float32, all queries | `4 B · (2 Hk + H) · T · d` | {r['array_bytes'] / 1e9:.1f} GB | "
        f"{16 * r['array_bytes'] / 1e9:.0f} GB |",
        f"| the same with the last 576 queries | `4 B · d · (2 Hk · T + H · 576)` | "
        f"{r['late_array_bytes'] / 1e9:.1f} GB | "
        f"{16 * r['late_array_bytes'] / 1e9:.0f} GB |",
        "",
        "| replay on one accelerator, 80 layers | formula | |",
        "|---|---|---|",
        f"| errors of 50 cells at the floor of 3 dense passes | `3 · L · dense / (0.4 · 990e12)` | "
        f"{duration(3 * LAYERS * r['dense_flops'] / (GPU * GPU_SHARE))} |",
        f"| attention mass of all queries | `L · 2 · H · d · T² / (0.4 · 990e12)` | "
        f"{duration(LAYERS * r['mass_s'] * SGEMM / (GPU * GPU_SHARE))} |",
        f"| keys and values over a link of 50 GB/s | `bytes / 50e9` | {duration(c['cache_bytes'] / LINK)} |",
        f"| keys and values from disk at 2.2 GB/s | `bytes / 2.2e9` | {duration(c['cache_bytes'] / READ)} |",
    ]
    return lines


if __name__ == "__main__":
    print("\n".join(tables()))
