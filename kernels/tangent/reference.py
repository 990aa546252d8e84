"""Tangents in plain torch: f_C(q), its derivative J_C at a centre, and the diagonal part of it.

f_C(q) = sum over i in C of a_i(q) u_i, with a_i = exp z_i / (exp b + sum over C of exp z_j), z_i = s q·k_i or
c tanh(s q·k_i / c). With the slope d_i = 1 - (z_i(mu)/c)^2 (1 without a softcap) and k~_i = d_i k_i, the logits
respond to dq = q - mu by z'_i = s dq·k~_i, and

    J dq  = sum_i a_i (z'_i - zbar) u_i,   zbar = sum_j a_j z'_j     the softmax competes: weights sum to 1
    JD dq = sum_i a_i (1 - a_i) z'_i u_i                             each token by itself

since the softmax's Jacobian is S = Diag(a) - a a^T, of which JD keeps the diagonal. S is never formed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_NUMBERS = 1 << 22  # weights of one block of queries: 32 MiB in float64


@dataclass(frozen=True, eq=False)
class Tangent:
    """Attention of G query heads over one set of n tokens, each head at its own centre, and its derivative there.

    Attributes:
        keys: [n, D].
        directions: [n, Dv], u_i.
        scale: s.
        weights: [G, n], a_i at the centre.
        sink_weight: [G], share of attention that the sink logit takes; 0 without one.
        slopes: [G, n], d_i.
        output: [G, Dv], f_C at the centre.
    """

    keys: Tensor
    directions: Tensor
    scale: float
    weights: Tensor
    sink_weight: Tensor
    slopes: Tensor
    output: Tensor

    def responses(self, shift: Tensor) -> Tensor:
        """[G, F, n], z' of each token to the query shifts [G, F, D]."""
        return self.scale * (shift @ self.keys.T) * self.slopes[:, None, :]

    def full(self, shift: Tensor) -> Tensor:
        """[G, F, Dv], J dq for the shifts [G, F, D], block by block."""
        return self._by_token(shift, competing=True)

    def diagonal(self, shift: Tensor) -> Tensor:
        """[G, F, Dv], JD dq."""
        return self._by_token(shift, competing=False)

    def _by_token(self, shift: Tensor, competing: bool) -> Tensor:
        found = shift.new_empty(*shift.shape[:2], self.directions.shape[1])
        for part in _blocks(shift, self.keys):
            moved = self.responses(shift[:, part])
            if competing:
                moved = (moved - moved @ self.weights[:, :, None]) * self.weights[:, None, :]
            else:
                moved = moved * (self.weights * (1 - self.weights))[:, None, :]
            found[:, part] = moved @ self.directions
        return found

    def full_matrix(self) -> Tensor:
        """[G, Dv, D], J: s [sum_i a_i (u_i - ubar)(k~_i - kbar)^T + a_b ubar kbar^T], bars not renormalised."""
        found = self.weights.new_empty(self.weights.shape[0], self.directions.shape[1], self.keys.shape[1])
        for head, (a, sink) in enumerate(zip(self.weights, self.sink_weight, strict=True)):
            keys, middle = self._scaled_keys(head), self.output[head]
            mean = a @ keys
            found[head] = (a[:, None] * (self.directions - middle)).T @ (keys - mean) + sink * torch.outer(middle, mean)
        return self.scale * found

    def diagonal_matrix(self) -> Tensor:
        """[G, Dv, D], JD: s sum_i a_i (1 - a_i) u_i k~_i^T."""
        found = self.weights.new_empty(self.weights.shape[0], self.directions.shape[1], self.keys.shape[1])
        for head, a in enumerate(self.weights):
            found[head] = ((a * (1 - a))[:, None] * self.directions).T @ self._scaled_keys(head)
        return self.scale * found

    def concentrated_matrix(self) -> Tensor:
        """[G, Dv, D], s sum_i a_i^2 u_i (k~_i - kbar)^T: what is left of J - JD if zbar, the shift that all logits
        share, is subtracted from every z'_i before competition is dropped. Small where weight is spread."""
        found = self.weights.new_empty(self.weights.shape[0], self.directions.shape[1], self.keys.shape[1])
        for head, a in enumerate(self.weights):
            keys = self._scaled_keys(head)
            found[head] = (a.square()[:, None] * self.directions).T @ (keys - a @ keys)
        return self.scale * found

    def _scaled_keys(self, head: int) -> Tensor:
        """[n, D], k~_i."""
        return self.slopes[head][:, None] * self.keys


def tangent_at(
    centre: Tensor,
    keys: Tensor,
    directions: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tangent:
    """Attention over one set, linearised.

    Args:
        centre: [G, D], one per query head.
        keys: [n, D], shared by the G heads.
        directions: [n, Dv].
        scale: factor on q·k.
        softcap: c of c·tanh(z/c), or None.
        sink_logits: [G] logits without a direction in the denominator, or None.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(centre[:, None], keys, directions, sink_logits)
    logits = _logits(centre[:, None], keys, scale, softcap)[:, 0]
    slopes = torch.ones_like(logits) if softcap is None else 1 - (logits / softcap).square()
    weights, sink_weight = _softmax(logits[:, None], sink_logits)
    weights, sink_weight = weights[:, 0], sink_weight[:, 0]
    return Tangent(keys, directions, scale, weights, sink_weight, slopes, weights @ directions)


def attend(
    queries: Tensor,
    keys: Tensor,
    directions: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """f_C of every query, [G, F, Dv], zero over an empty set.

    Args:
        queries: [G, F, D]; the others as in `tangent_at`.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(queries, keys, directions, sink_logits)
    output = queries.new_zeros(*queries.shape[:2], directions.shape[1])
    for part in _blocks(queries, keys):
        weights, _ = _softmax(_logits(queries[:, part], keys, scale, softcap), sink_logits)
        output[:, part] = weights @ directions
    return output


def attention_weights(
    queries: Tensor, keys: Tensor, *, scale: float, softcap: float | None = None, sink_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """a_i of every query [G, F, n] and the sink's own share [G, F]; all at once, so for few queries only."""
    return _softmax(_logits(queries, keys, scale, softcap), sink_logits)


def _check(queries: Tensor, keys: Tensor, directions: Tensor, sink_logits: Tensor | None) -> None:
    fits = queries.ndim == 3 and keys.ndim == 2 and directions.ndim == 2
    if not fits or keys.shape[1] != queries.shape[2] or keys.shape[0] != directions.shape[0]:
        raise ValueError(
            f"queries {list(queries.shape)}, keys {list(keys.shape)} and directions {list(directions.shape)} do not fit"
        )
    if sink_logits is not None and tuple(sink_logits.shape) != (queries.shape[0],):
        raise ValueError(f"sink_logits has shape {list(sink_logits.shape)}, expected [{queries.shape[0]}]")


def _blocks(queries: Tensor, keys: Tensor) -> Iterator[slice]:
    size = max(1, BLOCK_NUMBERS // max(1, queries.shape[0] * keys.shape[0]))
    return (slice(start, start + size) for start in range(0, queries.shape[1], size))


def _logits(queries: Tensor, keys: Tensor, scale: float, softcap: float | None) -> Tensor:
    """[G, F, n]."""
    logits = scale * (queries @ keys.T)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _softmax(logits: Tensor, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights [G, F, n] and the sink's own [G, F]; what is subtracted is the maximum of the set, or the sink's."""
    if sink_logits is None:
        empty = logits.new_zeros(logits.shape[:2])
        return (torch.softmax(logits, dim=-1) if logits.shape[-1] else logits), empty
    sink = sink_logits.to(logits.dtype)[:, None, None].expand(-1, logits.shape[1], 1)
    weights = torch.softmax(torch.cat([logits, sink], dim=-1), dim=-1)
    return weights[..., :-1], weights[..., -1]
