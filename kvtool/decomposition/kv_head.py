"""KVHead: the query heads of one KV head, with everything that all kept sets of an event share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kvtool.decomposition.covariance_space import (
    KINDS,
    ROUNDING,
    capacities,
    covariances,
    output_root,
    relative_errors,
    roots,
    rounding_floor,
)
from kvtool.decomposition.monte_carlo import Draws, mutual_information
from kvtool.decomposition.nats import HeadGradients, undefined
from kvtool.decomposition.output_space import OutputTerms, tangent_residual
from kvtool.decomposition.settings import DRAWS, RESIDUAL_QUERIES, Decompose
from kvtool.kernels.tangent import attend, tangent_at
from kvtool.layer import Layer
from kvtool.view import View

NOISES = ("unit", "scaled")  # sigma^2 = 1, and the mean variance of a channel of f_P
MEASURED = ("capacity_mc", "capacity_mc_se", "capacity_mc_saturated", "shape_gap")
Columns = dict[str, Tensor]  # name -> [G] float64, NaN is undefined


@dataclass(frozen=True, eq=False)
class KVHead:
    """One KV head at one event.

    Attributes:
        queries: [G, F, D] float64, the group's evaluated queries.
        keys, values: [N, D], [N, Dv] float64, the pool: the event's candidates.
        rows: [N] int64, their rows.
        scale, softcap, sink_logits: the layer's own; sink logits [G] or None.
        gradients: of the group's outputs, or None.
        probes: [G, r] int64, queries along which the derivative is checked.
        draws: one per query head.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    rows: Tensor
    scale: float
    softcap: float | None
    sink_logits: Tensor | None
    gradients: HeadGradients | None
    probes: Tensor
    draws: list[Draws]
    _known: dict[bytes, Columns] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, layer: Layer, view: View, kv_head: int, steps: Tensor, asked: Decompose) -> KVHead:
        """From a layer in float64 and the view of the event.

        Args:
            steps: [F] evaluated steps, each with a stored query.
        """
        geometry = layer.geometry
        heads = slice(kv_head * geometry.group, (kv_head + 1) * geometry.group)
        rows = view.tokens[kv_head]
        count, probes, draws = steps.numel(), [], []
        for head in range(heads.start, heads.stop):
            probing, drawing = view.stream(asked.seed, head).spawn(2)
            chosen = probing.choice(count, size=min(RESIDUAL_QUERIES, count), replace=False)
            probes.append(torch.from_numpy(chosen))
            draws.append(Draws.from_stream(drawing, DRAWS, count, geometry.value_dim))
        return cls(
            layer.queries[heads, torch.searchsorted(layer.query_steps, steps)].to(torch.float64),
            layer.keys[kv_head, rows].to(torch.float64),
            layer.values[kv_head, rows].to(torch.float64),
            rows,
            geometry.scale,
            geometry.softcap,
            None if geometry.sink_logits is None else geometry.sink_logits[heads].to(torch.float64),
            HeadGradients.of(layer, steps, heads),
            torch.stack(probes),
            draws,
        )

    @cached_property
    def pool_output(self) -> Tensor:
        """[G, F, Dv], f_P."""
        whole: Tensor = attend(
            self.queries, self.keys, self.values, scale=self.scale, softcap=self.softcap, sink_logits=self.sink_logits
        )
        return whole

    @cached_property
    def noises(self) -> Tensor:
        """[G, 2], sigma^2 at which capacities are given."""
        outputs = self.pool_output
        spread = (outputs - outputs.mean(1, keepdim=True)).square().mean((1, 2))
        if self.values.numel():
            # Outputs that are all equal differ by rounding, and that is no noise to measure by.
            least = (ROUNDING * self.values.norm(dim=1).amax()).square()
            spread = torch.where(spread > least, spread, 0.0)
        return torch.stack([torch.ones_like(spread), spread], dim=1)

    def columns(self, kept: Tensor, mean: Tensor, covariance: Tensor) -> Columns:
        """Everything that is said of one kept set.

        Args:
            kept: [N] bool.
            mean, covariance: [G, D] and [G, D, D], the centre and how queries scatter about it.
        """
        key = b"".join(tensor.contiguous().numpy().tobytes() for tensor in (kept, mean, covariance))
        if key not in self._known:
            self._known[key] = self._columns(kept, mean, covariance)
        return self._known[key]

    def _columns(self, kept: Tensor, mean: Tensor, covariance: Tensor) -> Columns:
        keys, values = (self.keys, self.values) if bool(kept.all()) else (self.keys[kept], self.values[kept])
        how = {"scale": self.scale, "softcap": self.softcap, "sink_logits": self.sink_logits}
        outputs = self.pool_output if bool(kept.all()) else attend(self.queries, keys, values, **how)
        tangent = tangent_at(mean, keys, values, **how)
        full, diagonal = tangent.full_matrix(), tangent.diagonal_matrix()
        shift = self.queries - mean[:, None]
        terms = OutputTerms.of(self.pool_output, outputs, shift, tangent, full, diagonal)
        found = terms.columns()
        probed = torch.take_along_dim(shift, self.probes[:, :, None], dim=1)
        found["tangent_residual"] = tangent_residual(probed, mean, tangent, full, self.softcap, self.sink_logits)
        found |= undefined(mean.shape[0]) if self.gradients is None else self.gradients.columns(terms)
        scattered = roots(tangent, full, diagonal, covariance)
        errors = relative_errors(covariances(scattered), rounding_floor(tangent, covariance))
        return found | errors | self._capacities(scattered, outputs)

    def _capacities(self, scattered: dict[str, list[Tensor]], outputs: Tensor) -> Columns:
        """Capacities at both noises, and the gaps between them."""
        found: Columns = {}
        by_kind = {kind: capacities(scattered[kind], self.noises) for kind in KINDS}
        gauss = capacities(output_root(outputs), self.noises)
        told = self._measured(outputs, gauss)
        for index, noise in enumerate(NOISES):
            found[f"sigma2_{noise}"] = self.noises[:, index]
            found |= {f"capacity_{kind}_{noise}": by_kind[kind][:, index] for kind in KINDS}
            found[f"capacity_gauss_{noise}"] = gauss[:, index]
            found |= {f"{name}_{noise}": column for name, column in zip(MEASURED, told[index], strict=True)}
            found[f"taylor_capacity_gap_{noise}"] = gauss[:, index] - by_kind["full"][:, index]
        return found

    def _measured(self, outputs: Tensor, gauss: Tensor) -> Tensor:
        """[2, 4, G]: at each noise the columns `MEASURED`, saturated as 1 or 0."""
        told = torch.full((len(NOISES), len(MEASURED), len(self.draws)), torch.nan, dtype=torch.float64)
        for head, draws in enumerate(self.draws):
            sound = [i for i in range(len(NOISES)) if float(self.noises[head, i]) > 0]
            most = [float(gauss[head, i]) for i in sound]
            found = mutual_information(outputs[head], [float(self.noises[head, i]) for i in sound], draws, most)
            for index, one, limit in zip(sound, found, most, strict=True):
                gap = torch.nan if one.saturated else limit - one.nats
                numbers = [one.nats, one.standard_error, float(one.saturated), gap]
                told[index, :, head] = torch.tensor(numbers, dtype=torch.float64)
        return told
