"""Find each layer's rotary embedding by what it does, not by what it is called.

One forward at positions p and one at p + shift, with every attention module given the same
hidden states both times: then only the rotation tells the two apart. A layer whose queries did
not change has none; for the others the hypothesis (frequencies, layout, place) that turns the
first queries and keys into the second is the rotation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvtool.rotation import Layout, Rotation

# Largest relative error of a channel pair for a hypothesis to hold, by the run's dtype: float32
# angles are off by about 1e-6 of a turn, 16-bit queries and tables by their own rounding.
_TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# The runner-up must be this many times worse.
_MARGIN = 4.0


@dataclass(frozen=True, eq=False)
class Tables:
    """cos and sin that an attention module received for n rows, each [n, w] float32, scaling included."""

    cos: Tensor
    sin: Tensor

    @property
    def scaling(self) -> float:
        """The factor on cos and sin: the root of cos² + sin²."""
        square = self.cos.to(torch.float64) ** 2 + self.sin.to(torch.float64) ** 2
        return float(square.mean().sqrt())

    def swapped(self) -> Tables:
        """The same with cos and sin exchanged."""
        return Tables(self.sin, self.cos)

    @property
    def sine_first(self) -> bool:
        """Whether `cos` is really the sine: row 0 must stand at position 0, where the sine vanishes."""
        return not bool(self.cos[0].any()) and bool(self.sin[0].any())

    def pairs(self, count: int) -> tuple[Tensor, Tensor] | None:
        """cos and sin per channel pair, [n, count]: full-width tables repeat each pair's entry."""
        width = self.cos.shape[-1]
        if width == count:
            return self.cos, self.sin
        if width != 2 * count:
            return None
        for pick in (slice(0, count), slice(0, None, 2)):
            other = slice(count, None) if pick.step is None else slice(1, None, 2)
            if torch.equal(self.cos[:, pick], self.cos[:, other]) and torch.equal(
                self.sin[:, pick], self.sin[:, other]
            ):
                return self.cos[:, pick], self.sin[:, pick]
        return None


def received_tables(position_embeddings: Any) -> Tables | None:
    """What a layer got as `position_embeddings`, a pair or one complex table, batch axis dropped.

    A pair is taken for (cos, sin); see `Tables.swapped` for models that pass (sin, cos).
    """
    value = position_embeddings
    if isinstance(value, Tensor) and value.is_complex():
        flat = value.reshape(-1, value.shape[-1])
        return Tables(flat.real.to(torch.float32), flat.imag.to(torch.float32))
    if not (isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(part, Tensor) for part in value)):
        return None
    cos, sin = (part.detach().to(torch.float32) for part in value)
    if cos.dim() < 2 or cos.shape != sin.shape or cos.numel() != cos.shape[-1] * cos.shape[-2]:
        return None
    cos, sin = cos.reshape(-1, cos.shape[-1]), sin.reshape(-1, sin.shape[-1])
    return Tables(cos, sin)


def frequency_candidates(model: nn.Module, config: Any) -> list[Tensor]:
    """Every distinct inv_freq [R/2] that this model could use: its buffers, else what its configuration implies."""
    found: list[Tensor] = []

    def add(value: Tensor) -> None:
        if not any(value.shape == old.shape and torch.equal(value, old) for old in found):
            found.append(value)

    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2].endswith("inv_freq") and buffer.dim() == 1:
            add(buffer.detach().to(torch.float32).cpu())
    if not found and config is not None:
        for theta, dims in _implied(config):
            add(1.0 / theta ** (torch.arange(0, dims, 2, dtype=torch.int64).to(torch.float32) / dims))
    return found


def _implied(config: Any) -> Iterable[tuple[float, int]]:
    """(theta, rotary dims) of models that keep no inv_freq buffer, such as GPT-J."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 1
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    parameters = getattr(text, "rope_parameters", None) or {}
    thetas = {parameters.get("rope_theta"), getattr(text, "rope_theta", None), 10000.0}
    dims = {getattr(text, "rotary_dim", None), getattr(text, "qk_rope_head_dim", None), head}
    partial = parameters.get("partial_rotary_factor") or getattr(text, "partial_rotary_factor", None)
    if partial:
        dims.add(int(head * partial) // 2 * 2)
    return [(float(theta), int(n)) for theta in thetas if theta for n in dims if n]


def scaling_candidates(model: nn.Module) -> list[float]:
    """Every attention scaling that a rotary module of the model holds."""
    found = {1.0}
    for module in model.modules():
        for name, value in vars(module).items():
            if name.endswith("attention_scaling") and isinstance(value, int | float):
                found.add(float(value))
    return sorted(found)


def attention_scaling(tables: Tables | None, candidates: list[float]) -> float:
    """The factor received, as the exact number the model holds where one is near; 1 where nothing was received."""
    if tables is None:
        return 1.0
    nearest = min(candidates, key=lambda value: abs(value - tables.scaling))
    return nearest if abs(nearest - tables.scaling) < 4e-3 * tables.scaling else tables.scaling


def agrees(rotation: Rotation, tables: Tables, positions: Tensor, dtype: torch.dtype) -> bool:
    """Whether the rotation predicts the tables that a layer received at `positions` [n]."""
    pairs = tables.pairs(rotation.rotary_dims // 2)
    if pairs is None:
        return False
    # A model's own angles are float32 products, off by half an ulp of the position.
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype] * rotation.attention_scaling
    bound += float(positions.max()) * 2.0**-24
    return all(
        bool(((mine - theirs).abs() <= bound).all())
        for mine, theirs in zip(rotation.tables(positions), pairs, strict=True)
    )


def find_rotation(
    before: Tensor,
    after: Tensor,
    positions: Tensor,
    shift: int,
    candidates: list[Tensor],
    scalings: list[float],
    tables: Tables | None,
    dtype: torch.dtype,
) -> Rotation | Literal["none"] | None:
    """The rotation of one layer.

    Args:
        before, after: [h, n, D] queries (and keys) of the same hidden states at `positions` [n]
            and at `positions + shift`.
        candidates: inv_freq hypotheses; `scalings`: attention scaling hypotheses.
        tables: what the layer received at `positions`, or None; decides between frequencies first.
        dtype: the run's.

    Returns:
        A Rotation; "none" if nothing moved; None if no hypothesis holds, or two do.
    """
    if torch.equal(before, after):
        return "none"
    scaling = attention_scaling(tables, scalings)
    dim = before.shape[-1]
    hypotheses = [
        Rotation(2 * len(inv_freq), layout, inv_freq, scaling, start)
        for inv_freq in candidates
        if 2 * len(inv_freq) <= dim
        for layout in _layouts()
        for start in sorted({0, dim - 2 * len(inv_freq)})
    ]
    if tables is not None:
        told = [hypothesis for hypothesis in hypotheses if agrees(hypothesis, tables, positions, dtype)]
        hypotheses = told or hypotheses
    before, after = before.to(torch.float64), after.to(torch.float64)
    ranked = sorted(((_error(h, before, after, positions, shift), i) for i, h in enumerate(hypotheses)))
    if not ranked or ranked[0][0] > _TOLERANCE[dtype]:
        return None
    if len(ranked) > 1 and ranked[1][0] < max(_MARGIN * ranked[0][0], 1e-9):
        return None
    return hypotheses[ranked[0][1]]


def _layouts() -> tuple[Layout, Layout]:
    return "half", "interleaved"


def _error(rotation: Rotation, before: Tensor, after: Tensor, positions: Tensor, shift: int) -> float:
    """Largest relative error of a channel of `after` [h, n, D] predicted by turning `before`."""
    predicted = rotation.rotate(rotation.unrotate(before, positions), positions + shift)
    error = (predicted - after).square().sum((0, 1)).sqrt()  # [D]
    size = after.square().sum((0, 1)).sqrt()
    return float((error / size.clamp_min(0.05 * float(size.mean()) + 1e-30)).max())
