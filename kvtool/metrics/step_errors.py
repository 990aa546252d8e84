"""StepErrors: what one cell did to one layer at every evaluated step, before any metric sums it up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.kernels.retained_attention.errors import CellErrors
from kvtool.kernels.retained_attention.reference import CellBlock
from kvtool.layer import Gradients


@dataclass(frozen=True, eq=False)
class StepErrors:
    """One layer, one cell, n evaluated steps; float64. f_V is the output over all visible tokens, f_R over
    the retained ones, e = f_V - f_R, all before the output projection.

    Attributes:
        steps: [n] int64.
        squared_error: [H, n] |e|^2.
        squared_output: [H, n] |f_V|^2.
        mass: [H, n] share of attention that the evicted tokens had.
        gap: [H, n] |fE - f_R|, fE the weighted mean of the evicted values; NaN where nothing visible is evicted.
        cosine: [H, n] 1 - cos(f_V, f_R); NaN where either is zero.
        layer_squared_error, layer_squared_output: [n] the first two for sum over heads of W_O f,
            biases left out; None without an output projection.
        future_mass: [Hk, T] attention that each row gets from the evaluated steps, weights over all
            visible tokens, summed over the group's query heads; None where it was not computed.
        gradient_dot: [S, H, n] g·delta per draw, delta = f_R - f_V = -e and g the gradient of the drawn
            log-probabilities; in the layer's compute dtype. NaN at steps without a gradient; None where the
            layer has none, or where steps do not see their live set.
        gradients: how they were drawn; None where `gradient_dot` is.
        drawn_steps: how many of the steps had their next token drawn.
    """

    steps: Tensor
    squared_error: Tensor
    squared_output: Tensor
    mass: Tensor
    gap: Tensor
    cosine: Tensor
    layer_squared_error: Tensor | None = None
    layer_squared_output: Tensor | None = None
    future_mass: Tensor | None = None
    gradient_dot: Tensor | None = None
    gradients: Gradients | None = None
    drawn_steps: int = 0

    def between(self, start: int, stop: int) -> StepErrors:
        """The same for the steps start..stop-1 alone. Future mass speaks of all steps, and is left out."""
        inside = (self.steps >= start) & (self.steps < stop)

        def part(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[..., inside]

        drawn = 0
        if self.gradients is not None and self.gradient_dot is not None:
            known = self.steps[inside & ~torch.isnan(self.gradient_dot[0, 0])]
            if known.numel():
                low, high = self.gradients.targets
                drawn = max(min(high, stop) - max(low, int(known[0])), 0)
        if bool(inside.all()):  # nothing to copy
            return replace(self, future_mass=None, drawn_steps=drawn)
        return replace(
            self,
            steps=self.steps[inside],
            squared_error=self.squared_error[:, inside],
            squared_output=self.squared_output[:, inside],
            mass=self.mass[:, inside],
            gap=self.gap[:, inside],
            cosine=self.cosine[:, inside],
            layer_squared_error=part(self.layer_squared_error),
            layer_squared_output=part(self.layer_squared_output),
            future_mass=None,
            gradient_dot=part(self.gradient_dot),
            drawn_steps=drawn,
        )


def between(cells: Sequence[StepErrors], start: int, stop: int) -> list[StepErrors]:
    """`StepErrors.between` of every cell; what cells share is looked at once, and shared afterwards."""
    found: list[StepErrors] = []
    for cell in cells:
        first = cells[0]
        alike = cell is not first and cell.steps is first.steps and bool(cell.steps.numel())
        # A gradient is NaN where there is none, and that goes by the steps.
        alike = alike and cell.gradients is first.gradients
        alike = alike and (cell.gradient_dot is None) == (first.gradient_dot is None)
        if alike and found[0].steps is first.steps:  # nothing is cut off
            found.append(replace(cell, future_mass=None, drawn_steps=found[0].drawn_steps))
        else:
            found.append(cell.between(start, stop))
    return found


def stacked(values: Sequence[Tensor]) -> Tensor:
    """[C, ...] of tensors [...] of every cell; [1, ...] where all are one and the same tensor."""
    first = values[0]
    return first[None] if all(each is first for each in values) else torch.stack(list(values))


def measure(
    blocks: Iterable[CellBlock],
    steps: Tensor,
    cells: int,
    *,
    projection: Tensor | None = None,
    future_mass: Tensor | None = None,
    layer: int | None = None,
    output_gradients: Tensor | None = None,
    gradient_rows: Tensor | None = None,
) -> list[StepErrors]:
    """Collect the kernel's blocks of one layer into one StepErrors per cell. Sums are float64.

    Args:
        blocks: of all cells over all `steps`, cells of a block together.
        steps: [n].
        projection: [H, Dv, M] output projection without bias, or None.
        layer: its id, for the message.
        output_gradients: [S, H, Tg, Dv], finite, or None.
        gradient_rows: [n] which of the Tg belongs to each step, -1 where none does.

    Raises:
        KvtoolError: code `not-finite` where attention over all visible tokens is NaN or infinite.
    """
    count = int(steps.numel())
    collected: list[StepErrors | None] = [None] * cells
    rows: slice | None = None
    squared_full, projected_full, slopes = torch.empty(0), None, None
    for block in blocks:
        if block.rows != rows:
            rows, squared_full = block.rows, block.full.to(torch.float64).square().sum(-1)  # [H, b]
            projected_full = None if projection is None else _project(block.full, projection)
            if output_gradients is not None and gradient_rows is not None:
                slopes = _slopes(output_gradients, gradient_rows[rows])  # [H, b, S, Dv]
            _refuse_nonsense([squared_full, projected_full], layer)
        into = collected[block.cell]
        if into is None:
            into = _blank(steps, int(block.full.shape[0]), count, projection, future_mass, output_gradients)
            collected[block.cell] = into
        error, output = block.error.to(torch.float64), block.retained.to(torch.float64)
        into.squared_error[:, rows] = error.square().sum(-1)
        into.squared_output[:, rows] = squared_full
        into.mass[:, rows] = block.mass.to(torch.float64)
        into.gap[:, rows] = block.gap.to(torch.float64)
        into.cosine[:, rows] = _cosine_distance(block.full.to(torch.float64), output)
        if into.layer_squared_error is not None and into.layer_squared_output is not None:
            assert projection is not None
            into.layer_squared_error[rows] = _project(block.error, projection)
            into.layer_squared_output[rows] = projected_full
        if into.gradient_dot is not None and slopes is not None:
            into.gradient_dot[:, :, rows] = -(slopes @ error[..., None])[..., 0].permute(2, 0, 1).to(block.full.dtype)
    done = [cell for cell in collected if cell is not None]
    for cell in done:
        _refuse_overflow(cell.gradient_dot, gradient_rows, layer)
    if len(done) != cells:
        raise AssertionError(f"blocks of {len(done)} cells, expected {cells}")
    return done


def from_norms(
    norms: CellErrors,
    steps: Tensor,
    future_mass: Tensor | None = None,
    *,
    gradient_rows: Tensor | None = None,
    layer: int | None = None,
) -> list[StepErrors]:
    """One StepErrors per cell from what the kernel summed up itself.

    Raises:
        KvtoolError: as `measure`.
    """
    _refuse_nonsense([norms.squared_output, norms.layer_squared_output], layer)
    _refuse_overflow(norms.gradient_dot, gradient_rows, layer)
    return [
        StepErrors(
            steps,
            norms.squared_error[cell],
            norms.squared_output,
            norms.mass[cell],
            norms.gap[cell],
            norms.cosine[cell],
            None if norms.layer_squared_error is None else norms.layer_squared_error[cell],
            norms.layer_squared_output,
            future_mass,
            None if norms.gradient_dot is None else norms.gradient_dot[cell],
        )
        for cell in range(len(norms.squared_error))
    ]


def all_finite(values: Tensor) -> bool:
    """Whether no number is NaN or infinite: both show in the extremes, which need no second array."""
    if not values.numel():
        return True
    return all(math.isfinite(float(end)) for end in torch.aminmax(values))


def _refuse_nonsense(outputs: Iterable[Tensor | None], layer: int | None) -> None:
    if not all(output is None or all_finite(output) for output in outputs):
        where = "" if layer is None else f" in layer {layer}"
        raise KvtoolError(
            "not-finite",
            f"attention over all visible tokens, or its projection, is NaN or infinite{where}",
            "kvtool inspect --verify recomputes the stored output sample",
        )


def _refuse_overflow(dots: Tensor | None, gradient_rows: Tensor | None, layer: int | None) -> None:
    """Gradients are finite, yet their product with an error need not be.

    Args:
        dots: [..., n] g·delta, or None.
    """
    if dots is None or gradient_rows is None:
        return
    known = gradient_rows >= 0
    if not all_finite(dots if bool(known.all()) else dots[..., known]):
        kind = str(dots.dtype).removeprefix("torch.")
        raise KvtoolError(
            "not-finite",
            f"gradients{'' if layer is None else f' of layer {layer}'} times errors of attention are more than "
            f"{kind} can hold: there is no predicted KL",
            "--precision float64 holds more; gradients of that size are rarely those of a model",
        )


def _slopes(output_gradients: Tensor, rows: Tensor) -> Tensor:
    """Gradients of a block's steps in float64 [H, b, S, Dv], NaN where `rows` [b] is -1."""
    found = output_gradients[:, :, rows.clamp_min(0)].to(torch.float64)
    return torch.where((rows >= 0)[:, None], found, float("nan")).permute(1, 2, 0, 3)


def _blank(
    steps: Tensor,
    heads: int,
    count: int,
    projection: Tensor | None,
    future_mass: Tensor | None,
    output_gradients: Tensor | None,
) -> StepErrors:
    """Everything NaN, so that a step that was forgotten shows."""

    def nothing(*shape: int) -> Tensor:
        return torch.full(shape, float("nan"), dtype=torch.float64)

    error, output, mass, gap, cosine = (nothing(heads, count) for _ in range(5))
    layer_error, layer_output = (None if projection is None else nothing(count) for _ in range(2))
    dot = None
    if output_gradients is not None:
        dot = torch.full((output_gradients.shape[0], heads, count), float("nan"), dtype=output_gradients.dtype)
    return StepErrors(steps, error, output, mass, gap, cosine, layer_error, layer_output, future_mass, dot)


def _project(vectors: Tensor, projection: Tensor) -> Tensor:
    """|sum over heads of W_O f|^2 [b] for f [H, b, Dv]: heads are summed before the norm."""
    heads, count, value_dim = vectors.shape
    flat = vectors.transpose(0, 1).reshape(count, heads * value_dim)
    projected = flat @ projection.reshape(heads * value_dim, -1).to(flat.dtype)  # [b, M]
    return projected.to(torch.float64).square().sum(-1)


def _cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    """1 - cos(a, b) over the last axis as half the squared distance of the directions.

    That form is exactly 0 for equal vectors and never negative; NaN where either vector is zero.
    """
    difference: Tensor = a / a.norm(dim=-1, keepdim=True) - b / b.norm(dim=-1, keepdim=True)
    return difference.square().sum(-1).div(2)
