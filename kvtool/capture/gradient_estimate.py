"""What gradients add to a capture's estimate: bytes in the trace, and memory of the graph that is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool.capture.estimate import LayerShape, array_bytes
from kvtool.capture.gradient_plan import GradientPlan
from kvtool.capture.inputs import Input

_ATTRIBUTE = 260  # the sequence attribute `gradients`, indented


def gradient_disk_bytes(
    shapes: Mapping[int, LayerShape], inputs: list[Input], plan: GradientPlan, stored_item: int
) -> int:
    """Bytes of all gradients when every sequence reaches its maximum of tokens."""
    total = 0
    for item in inputs:
        steps = len(plan.evaluated(len(item.prompt), item.most_tokens))
        total += _ATTRIBUTE
        for shape in shapes.values():
            drawn = (plan.draws, shape.query_heads, steps, shape.value_dim)
            total += array_bytes("output_gradients", drawn, stored_item) + array_bytes("gradient_steps", (steps,), 8)
    return total


def gradient_memory_bytes(
    shapes: Mapping[int, LayerShape], inputs: list[Input], plan: GradientPlan, run_item: int, config: Any
) -> int:
    """Memory of the largest block's graph, of its logits, of the gradients themselves and of the
    outputs that they are held against.

    Per step and layer the graph keeps some 14 vectors of the model's width, 5 of its feed-forward width and
    6 of all heads; per layer the keys and values of all rows, repeated over the groups.
    """
    text = config.get_text_config()
    hidden = getattr(text, "hidden_size", 0) or 0
    wide = getattr(text, "intermediate_size", 0) or 0
    wide = max(wide) if isinstance(wide, list) else wide
    most = 0
    for item in inputs:
        steps = len(plan.evaluated(len(item.prompt), item.most_tokens))
        block = min(plan.block or steps, steps)
        graph = sum(
            block * (14 * hidden + 5 * wide + 6 * s.query_heads * s.key_dim)
            + item.most_tokens * s.query_heads * (s.key_dim + s.value_dim)
            for s in shapes.values()
        )
        logits = 4 * block * int(text.vocab_size)
        drawn = (2 * plan.draws + 1) * steps * sum(s.query_heads * s.value_dim for s in shapes.values())
        most = max(most, (graph + drawn) * run_item + logits * max(run_item, 4))
    return most
