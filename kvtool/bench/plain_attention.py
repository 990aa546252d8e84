"""Plain attention: what anyone would write with torch's own SDPA to get the same error norms.

Every function gives the squared errors [C, H, R] of C retained sets, f_V being known: the very
numbers of `kvtool.kernels.retained_attention`, which tests hold it against.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvtool.bench.synthetic import Case


def dense_outputs(case: Case) -> Tensor:
    """f_V [H, R, Dv], one pass over all tokens. The query rows of a group meet their KV head as one block."""
    full = sdpa(case.grouped[None], case.keys[None], case.values[None], scale=case.scale)[0]
    return full.reshape(*case.queries.shape[:2], -1)


def log_sum_exps(case: Case, steps: Tensor | None = None, block: int = 256) -> Tensor:
    """[H, R] log of the sum of exponentials that `dense_outputs` divides by, query block by query block.

    Args:
        steps: [R] rows of the queries, which see no later ones; None is behind all tokens.
    """
    heads, count, _ = case.queries.shape
    group = heads // case.keys.shape[0]
    found = case.queries.new_empty(heads, count)
    for head in range(heads):
        keys = case.keys[head // group]
        for low in range(0, count, block):
            part = slice(low, low + block)
            logits = (case.queries[head, part] * case.scale) @ keys.T
            if steps is not None:
                logits.masked_fill_(torch.arange(len(keys)) > steps[part, None], float("-inf"))
            found[head, part] = logits.logsumexp(-1)
    return found


def masked_errors(case: Case, evict_steps: Tensor, full: Tensor) -> Tensor:
    """One masked pass for every cell."""
    queries, keys, values = case.grouped[None], case.keys[None], case.values[None]
    found = []
    for leaves in evict_steps:
        kept = (leaves > case.tokens)[None, :, None, :]  # [1, Hk, 1, N]
        output = sdpa(queries, keys, values, attn_mask=kept, scale=case.scale)[0]
        found.append(_squared(output, full))
    return torch.stack(found)


def gathered_errors(case: Case, evict_steps: Tensor, full: Tensor) -> Tensor:
    """For every cell and KV head one pass over copies of what it keeps."""
    queries = case.grouped
    found = []
    for leaves in evict_steps:
        outputs = []
        for head, mine in enumerate(leaves):
            index = (mine > case.tokens).nonzero()[:, 0]
            keys, values = case.keys[head, index], case.values[head, index]
            outputs.append(sdpa(queries[None, None, head], keys[None, None], values[None, None], scale=case.scale)[0])
        found.append(_squared(torch.cat(outputs), full))
    return torch.stack(found)


def _squared(output: Tensor, full: Tensor) -> Tensor:
    """[H, R] |f_V - f_R|^2 of outputs [Hk, G R, Dv]."""
    return (output.reshape(full.shape) - full).square().sum(-1)


def steps_errors(case: Case, evict_step: Tensor, steps: Tensor, full: Tensor) -> Tensor:
    """[H, R] squared errors of one cell of a decode run, one step at a time, as a serving loop would.

    The cache is a buffer that one row is appended to at every step, and that is compacted where tokens leave.

    Args:
        case: all T tokens; its queries [H, R, D] are those of `steps`.
        evict_step: [1, T]; one KV head.
        steps: [R] consecutive rows.
        full: [H, R, Dv], f_V of every step.
    """
    (leaves,) = evict_step
    first = int(steps[0])
    events = set(leaves[leaves > first].tolist())
    keys, values = case.keys[0], case.values[0]
    live = (leaves[:first] > first).nonzero()[:, 0]
    room = int(live.numel()) + case.tokens - first
    k, v = keys.new_empty(room, keys.shape[1]), values.new_empty(room, values.shape[1])
    rows, count = torch.empty(room, dtype=torch.int64), int(live.numel())
    k[:count], v[:count], rows[:count] = keys[live], values[live], live
    queries = case.queries.transpose(0, 1).contiguous()  # [R, H, D]
    found = queries.new_empty(queries.shape[:2])
    for at, step in enumerate(steps.tolist()):
        if step in events:
            stay = (leaves[rows[:count]] > step).nonzero()[:, 0]
            k[: len(stay)], v[: len(stay)], rows[: len(stay)] = k[stay], v[stay], rows[stay]
            count = len(stay)
        k[count], v[count], rows[count] = keys[step], values[step], step
        count += 1
        output = sdpa(queries[at][None, None], k[None, None, :count], v[None, None, :count], scale=case.scale)[0, 0]
        found[at] = (output - full[:, at]).square().sum(-1)
    return found.T
