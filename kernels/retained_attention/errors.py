"""What many retained sets do to attention, as error norms: fast, where the reference yields whole vectors.

The numbers are those of `reference.retained_attention`. Logits are computed once per tile of query rows, transposed
[keys, rows], and so are their exponentials. Tokens that a family of cells treats alike are gathered and multiplied
with V once (see `families`); a cell is a sum of such atoms, so one more budget of a ranking costs next to nothing.
Vectors stay inside a tile. Rows in which a set underflows are computed again by the set's own maximum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .evaluated import evaluated
from .head_span import HeadSpan, Which
from .inputs import Inputs, Seen, expect_evict_steps
from .tile import Workspace
from .vectors import Vectors, squared_norm

__all__ = ["CellErrors", "Which", "cell_errors", "serves"]

MOST_ROWS, LEAST_ROWS = 1024, 256  # query rows of one KV head in a tile: with fewer, calls cost more than sums
TILE_NUMBERS = 1 << 24  # exponentials of a tile
SPAN_STEPS = 512  # steps whose sets are cut into families at once
SPARSE = 0.8  # share of the tokens that some cell keeps, below which only these are read where that is enough
SPAN_BYTES = 96 << 20  # of projected errors of all cells of a span


@dataclass(frozen=True, eq=False)
class CellErrors:
    """C retained sets (cells) over R steps, H query heads; f_V is the output over all visible tokens, f_R over the
    retained ones, e = f_V - f_R.

    Attributes:
        squared_output: [H, R] float64 |f_V|^2.
        squared_error: [C, H, R] float64 |e|^2; exactly 0 where nothing visible is evicted.
        mass: [C, H, R] float64, share of attention that the evicted tokens had.
        gap: [C, H, R] float64 |fE - f_R|, NaN where nothing visible is evicted.
        cosine: [C, H, R] float64 1 - cos(f_V, f_R), NaN where either is zero.
        layer_squared_output: [R] float64 |sum over heads of W_O f_V|^2, None without an output projection.
        layer_squared_error: [C, R] likewise of e.
        gradient_dot: [C, S, H, R] g·(f_R - f_V), NaN at steps without a gradient; None without gradients.

    Where only errors were asked for, mass, gap and cosine are NaN.
    """

    squared_output: Tensor
    squared_error: Tensor
    mass: Tensor
    gap: Tensor
    cosine: Tensor
    layer_squared_output: Tensor | None = None
    layer_squared_error: Tensor | None = None
    gradient_dot: Tensor | None = None


def cell_errors(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    evict_steps: Tensor,
    *,
    steps: Tensor,
    rows: Tensor,
    first_visible: Tensor,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    projection: Tensor | None = None,
    gradients: Tensor | None = None,
    gradient_rows: Tensor | None = None,
    which: Which = "all",
    full: Tensor | None = None,
    log_sum_exp: Tensor | None = None,
    groups: Sequence[int] | None = None,
    block: int | None = None,
) -> CellErrors:
    """Error norms of every cell at every step.

    Args:
        queries: [H, R, D] float32 or float64, finite as all floating arguments.
        keys, values: [Hk, N, D], [Hk, N, Dv]; query head h reads KV head h // (H / Hk).
        evict_steps: [C, Hk, N] integers; row i is retained for step t iff t < evict_step[i].
        steps, rows, first_visible: [R], [N], [R]; row i is visible to step t iff first_visible <= rows[i] <= t.
        scale, softcap, sink_logits: as in `reference.attention`.
        projection: [H, Dv, M] output projection without bias, or None.
        gradients: [S, H, Tg, Dv], or None; gradient_rows: [R] which of the Tg belongs to a step, -1 for none.
        which: `all`, e = m (fE - f_R) from both sides of the cut; `errors`, squared_error, layer_* and gradient_dot
            alone, for which f_V - f_R serves where m >= 1e-3 (docs/metrics.md): about two thirds of the work.
        full: [H, R, Dv] f_V where it is known already; it is then not computed again.
        log_sum_exp: [H, R] of the logits of all visible tokens and the sink, where that is known beside `full`:
            `errors` then needs no token that every cell has evicted.
        groups: [C], such as the policy of each cell. To the last digit the numbers of a cell depend on the other cells
            of its group only; None is one group, which is fastest, and in which equal sets have equal numbers.
        block: steps in a tile; None chooses.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    inputs = Inputs.checked(queries, keys, values, steps, rows, first_visible, scale, softcap, sink_logits, block)
    expect_evict_steps(evict_steps, keys)
    found = _blank(inputs, len(evict_steps), projection, gradients)
    for span in _spans(inputs, evict_steps, projection):
        _measure_span(
            found, inputs, evict_steps, span, projection, gradients, gradient_rows, which, full, log_sum_exp, groups
        )
    return found


def serves(values: Tensor) -> bool:
    """Whether norms of `values` [Hk, N, Dv] can be summed as `cell_errors` does: all finite, and no token so much
    larger than another that the square of the smaller is lost in their dtype. Everything else is the reference's."""
    sizes = values.abs().amax(2)
    if not sizes.numel():
        return True
    most, least = float(sizes.max()), float(sizes[sizes > 0].min()) if bool((sizes > 0).any()) else 0.0
    info = torch.finfo(values.dtype)
    return math.isfinite(most) and most < info.max**0.4 and (least == 0.0 or least > info.tiny**0.4)


def _blank(inputs: Inputs, cells: int, projection: Tensor | None, gradients: Tensor | None) -> CellErrors:
    """Everything NaN, so that a step that was forgotten shows."""

    def nothing(*shape: int) -> Tensor:
        return torch.full(shape, float("nan"), dtype=torch.float64)

    heads, count = inputs.heads, int(inputs.steps.numel())
    dots = None
    if gradients is not None:
        dots = torch.full((cells, len(gradients), heads, count), float("nan"), dtype=inputs.queries.dtype)
    error, mass, gap, cosine = (nothing(cells, heads, count) for _ in range(4))
    return CellErrors(
        nothing(heads, count),
        error,
        mass,
        gap,
        cosine,
        None if projection is None else nothing(count),
        None if projection is None else nothing(cells, count),
        dots,
    )


def _spans(inputs: Inputs, evict_steps: Tensor, projection: Tensor | None) -> Iterator[slice]:
    """Runs of steps, cut where sets change if that leaves no run too short to be worth its families."""
    steps = inputs.steps
    most = SPAN_STEPS
    if projection is not None:
        cells = max(128, 1 << len(evict_steps).bit_length())  # runs of few cells more or less cut their steps alike
        one = max(1, cells * projection.shape[2] * inputs.queries.element_size())
        most = max(LEAST_ROWS // inputs.group, min(most, SPAN_BYTES // one), 1)
    least = max(1, LEAST_ROWS // inputs.group // 4)
    start, count = 0, int(steps.numel())
    changes = _changes(evict_steps, steps)
    while start < count:
        stop = min(start + most, count)
        inside = changes[(changes > steps[start]) & (changes <= steps[stop - 1])]
        for change in inside.tolist():
            place = int((steps[start:stop] < change).sum()) + start
            if place - start >= least:
                stop = place
                break
        yield slice(start, stop)
        start = stop


def _changes(evict_steps: Tensor, steps: Tensor) -> Tensor:
    """Ascending steps at which a token leaves, besides at most the first of `steps` and the one behind the last; like
    `unique`, which sorts all of them."""
    if not evict_steps.numel() or not steps.numel():
        return evict_steps.new_zeros(0)
    least, most = int(steps.min()), int(steps.max())
    there = torch.zeros(most - least + 2, dtype=torch.bool)
    there[(evict_steps.to(torch.int64).clamp(least, most + 1) - least).flatten()] = True
    return there.nonzero()[:, 0] + least


def _measure_span(
    found: CellErrors,
    inputs: Inputs,
    evict_steps: Tensor,
    span: slice,
    projection: Tensor | None,
    gradients: Tensor | None,
    gradient_rows: Tensor | None,
    which: Which,
    full: Tensor | None,
    log_sum_exp: Tensor | None,
    groups: Sequence[int] | None,
) -> None:
    """Fill in the steps of one span."""
    columns = Seen.between(inputs, span).columns
    size = inputs.block or _tile_steps(inputs, columns)
    parts = [slice(at, min(at + size, span.stop)) for at in range(span.start, span.stop, size)]
    width, cells = inputs.values.shape[2], len(evict_steps)
    projected = None
    if projection is not None:
        shape = (cells + 1, span.stop - span.start, projection.shape[2])  # the last is f_V itself
        projected = inputs.queries.new_zeros(shape)
    memory = Workspace(len(inputs.rows[columns]), size * inputs.group, width, inputs.queries)
    group_of = [0] * cells if groups is None else list(groups)
    sparse = which == "errors" and full is not None and log_sum_exp is not None
    for kv_head in range(inputs.kv_heads):
        group = inputs.query_heads_of(kv_head)
        leaves = evict_steps[:, kv_head][:, columns]
        copies = _copies(leaves, inputs.steps[span], group_of)
        leaves, numbers = leaves[list(copies)], list(copies)
        apart = None if groups is None else [group_of[cell] for cell in copies]
        kept = (leaves > inputs.steps[span].min()).any(0) if sparse else None
        if kept is not None and int(kept.sum()) >= SPARSE * kept.numel():
            kept = None
        head = HeadSpan(inputs, kv_head, columns, leaves, inputs.steps[span], which, memory, kept, numbers, apart)
        for part in parts:
            known = None if full is None else full[group, part].reshape(-1, width)
            sums = None if log_sum_exp is None else log_sum_exp[group, part].reshape(-1)
            inside = slice(part.start - span.start, part.stop - span.start)
            slopes = None if gradients is None else _slopes(gradients[:, group], gradient_rows, part)
            tile = evaluated(head, part, known, sums)
            found.squared_output[group, part] = _by_step(squared_norm(tile.full), inputs.group)
            if projection is not None and projected is not None:
                projected[cells, inside] += _project(tile.full[None], projection[group])[0]
            for vectors in tile.vectors():
                _store(found, vectors, group, part, inputs.group, which)
                if projection is not None and projected is not None:
                    moved = _project(vectors.error(), projection[group])
                    projected[vectors.places, inside] += moved
                    for cell, own in zip(vectors.cells, moved, strict=True):
                        for copy in copies[cell]:
                            projected[copy, inside] += own
                if slopes is not None and found.gradient_dot is not None:
                    dots = torch.einsum("ktd,tsd->kst", vectors.error(), slopes).neg_()
                    found.gradient_dot[vectors.places, :, group, part] = dots.unflatten(2, (inputs.group, -1))
        for cell, others in copies.items():
            for copy in others:
                for numbers_of in (found.squared_error, found.mass, found.gap, found.cosine):
                    numbers_of[copy, group, span].copy_(numbers_of[cell, group, span])
                if found.gradient_dot is not None:
                    found.gradient_dot[copy, :, group, span].copy_(found.gradient_dot[cell, :, group, span])
    if projected is not None and found.layer_squared_error is not None and found.layer_squared_output is not None:
        norms = torch.linalg.vector_norm(projected, dim=-1, dtype=torch.float64).square()
        found.layer_squared_error[:, span], found.layer_squared_output[span] = norms[:cells], norms[cells]


def _tile_steps(inputs: Inputs, columns: slice | Tensor) -> int:
    """Steps in a tile of these columns."""
    rows = TILE_NUMBERS // max(1, len(inputs.rows[columns]))
    return max(1, min(MOST_ROWS, max(LEAST_ROWS, rows)) // inputs.group)


def _copies(leaves: Tensor, steps: Tensor, groups: list[int]) -> dict[int, list[int]]:
    """Every distinct set of `leaves` [C, n] over the steps, as its first cell -> the other cells of its group with that
    very set.

    What two cells keep alike has the same numbers to the bit, whatever family the sums are made in.
    """
    found: dict[tuple[int, bytes], int] = {}
    copies: dict[int, list[int]] = {}
    for cell, mine in enumerate(leaves.clamp(int(steps.min()), int(steps.max()) + 1).to(torch.int32).numpy()):
        first = found.setdefault((groups[cell], mine.tobytes()), cell)
        copies.setdefault(first, [])
        if first != cell:
            copies[first].append(cell)
    return copies


def _store(found: CellErrors, vectors: Vectors, group: slice, part: slice, heads: int, which: Which) -> None:
    numbers = [(found.squared_error, vectors.squared_error)]
    if which == "all":
        numbers += [(found.mass, vectors.mass), (found.gap, vectors.gap), (found.cosine, vectors.cosine)]
    for into, values in numbers:
        into[vectors.places, group, part] = _by_step(values(), heads)


def _by_step(values: Tensor, heads: int) -> Tensor:
    """[..., G, b] of values [..., G b]."""
    found: Tensor = values.unflatten(-1, (heads, -1))
    return found


def _project(vectors: Tensor, projection: Tensor) -> Tensor:
    """[k, b, M], sum over the G heads of W_O f for vectors [k, G b, Dv] and projection [G, Dv, M]."""
    heads, width, _ = projection.shape
    flat = vectors.unflatten(1, (heads, -1)).transpose(1, 2).flatten(2)  # [k, b, G Dv]
    found: Tensor = flat @ projection.reshape(heads * width, -1).to(flat.dtype)
    return found


def _slopes(gradients: Tensor, gradient_rows: Tensor | None, part: slice) -> Tensor:
    """[G b, S, Dv] gradients of a tile's rows, NaN where there is none."""
    assert gradient_rows is not None
    rows = gradient_rows[part]
    found = torch.where((rows >= 0)[:, None], gradients[:, :, rows.clamp_min(0)], float("nan"))  # [S, G, b, Dv]
    return found.permute(1, 2, 0, 3).flatten(0, 1)
