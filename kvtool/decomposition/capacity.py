"""Capacity of a kept subset, in nats: the policy's own objective, and that of the full tangent.

Both are 1/2 logdet(I + X X^T), summed over the group's query heads, with one row of X per kept token. By the
definition: singular values of X. For all subsets: Cholesky factors of small Gram matrices, many at once
with the subsets as the last dimension, and a bound on what rounding did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtool.decomposition.damage import capped_logits, shares
from kvtool.decomposition.search import EPS, members, subsets
from kvtool.decomposition.split_masks import TINY
from kvtool.decomposition.subpools import SubPool
from kvtool.policies.objective import Objective

TILE_NUMBERS = 1 << 18  # float64 numbers of one tile of matrices

Weights = Callable[[Tensor], Tensor]


def short_rows(rows: Tensor) -> Tensor:
    """[..., n, min(n, d)], rows of the same inner products as `rows` [..., n, d], without squaring them."""
    if rows.shape[-1] <= rows.shape[-2]:
        return rows
    factor: Tensor = torch.linalg.qr(rows.transpose(-1, -2), mode="r").R
    return factor.transpose(-1, -2)


def nats(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """1/2 logdet(I + X X^T) of `matrices` X [..., a, b] and what rounding can have done to it."""
    sizes = torch.linalg.svdvals(matrices)
    squares = sizes.square()
    value = 0.5 * torch.log1p(squares).sum(-1)
    noise = 64 * EPS * sizes[..., :1].squeeze(-1) * (sizes / (1 + squares)).sum(-1)
    return value, noise


class OwnObjective:
    """The policy's own capacity, its weights fixed."""

    def __init__(self, objective: Objective) -> None:
        scale = (objective.weights / objective.ridge[:, None]).sqrt()
        self.rows = short_rows(scale[..., None] * objective.directions)  # [G, n, r]
        self.channels = int(objective.directions.shape[2])

    def of(self, kept: Tensor, limit: float = torch.inf) -> tuple[Tensor, Tensor]:
        """Minus the capacity of every set [K, b], and its noise. `limit` spares nothing here."""
        value, noise = torch.zeros(2, kept.shape[0], dtype=torch.float64)
        for at, part in _split(kept, 4096):
            for head in self.rows:
                found, error = nats(head[part.long()])
                value[at] -= found
                noise[at] += error
        return value, noise

    def bounds(self, keep: int) -> Tensor:
        """[S], at or below minus the capacity of every subset: the subset's own minor of the pool's Gram matrix."""
        heads, tokens, _ = self.rows.shape
        gram = self.rows @ self.rows.transpose(1, 2)  # [G, n, n]
        total = gram.diagonal(dim1=1, dim2=2).sum(1)
        slack = EPS * ((keep + 1) * keep * (keep + total) + (self.channels + 4) * keep * total + 64 * keep**2)
        gram.diagonal(dim1=1, dim2=2).add_(1.0)
        found = []
        for part in subsets(tokens, keep).split(_columns(keep * keep * heads)):
            found.append(-0.5 * _logdet(_minors(gram, _pairs(part, tokens))).sum(0))
        return torch.cat(found) - slack.sum()


@dataclass(frozen=True, eq=False)
class Centre:
    """The sub-pool at the centre: what the tangents of all its subsets are made of.

    Attributes:
        logits: [G, n] at the centre, capped.
        sink_logits: [G] or None.
        weights: [G, n] of the whole sub-pool.
        slopes: [G, n], derivative of the capped logit by the raw one.
    """

    logits: Tensor
    sink_logits: Tensor | None
    weights: Tensor
    slopes: Tensor

    @classmethod
    def of(cls, pool: SubPool) -> Centre:
        logits = capped_logits(pool.scale * (pool.mean @ pool.keys.T), pool.softcap)
        slopes = torch.ones_like(logits) if pool.softcap is None else 1 - (logits / pool.softcap) ** 2
        weights = shares(logits, pool.sink_logits)[0] if pool.pool_weights is None else pool.pool_weights
        return cls(logits, pool.sink_logits, weights, slopes)

    def pool_weights(self, inside: Tensor) -> Tensor:
        """[G, K, n], weights of the whole sub-pool, 0 outside the sets `inside` [K, n]."""
        return self.weights[:, None, :] * inside

    def own_weights(self, inside: Tensor) -> Tensor:
        """[G, K, n], weights renormalised in each set; the sink stays in the denominator."""
        sink = None if self.sink_logits is None else self.sink_logits[:, None]
        return shares(self.logits[:, None, :].masked_fill(~inside, -torch.inf), sink)[0]

    def both_weights(self, sets: Tensor) -> Tensor:
        """[b, 2, G, s] of the tokens of `sets` [s, b] alone: `pool_weights` and `own_weights`."""
        index = sets.long().T.contiguous()  # [b, s]
        found = self.logits.new_empty(index.shape[0], 2, self.logits.shape[0], index.shape[1])
        logits = torch.empty_like(found[:, 0])
        for head in range(self.logits.shape[0]):
            found[:, 0, head] = self.weights[head].take(index)
            logits[:, head] = self.logits[head].take(index)
        if self.sink_logits is not None:
            sink = self.sink_logits[None, :, None].expand(1, -1, index.shape[1])
            logits = torch.cat([logits, sink])
        found[:, 1] = torch.softmax(logits, 0)[: index.shape[0]]
        return found


class Tangents:
    """What the full tangents of a sub-pool share: 1/2 logdet(I + J Lambda J^T / sigma^2), J = s U_C S_C K~_C."""

    def __init__(self, pool: SubPool, centre: Centre, sigma2: Tensor) -> None:
        values, vectors = torch.linalg.eigh(pool.covariance)
        root = vectors * values.clamp_min(0).sqrt()[:, None, :]  # [G, D, D], covariance = root root^T
        scale = pool.scale / sigma2.sqrt()
        keys = (scale[:, None] * centre.slopes)[..., None] * pool.keys  # [G, n, D]
        self.keys = short_rows(keys @ root)  # [G, n, r]
        self.values = short_rows(pool.values)  # [n, r']
        self.centre = centre
        self.channels = int(pool.values.shape[1] + pool.keys.shape[1])

    def of(self, kept: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        """Minus the capacity of every set [K, b], and its noise."""
        value, noise = torch.zeros(2, kept.shape[0], dtype=torch.float64)
        for at, part in _split(kept, 2048):
            a = weights(members(part, self.values.shape[0]))  # [G, K, n]
            centred = self.keys[:, None] - (a @ self.keys)[:, :, None, :]  # [G, K, n, r]
            tangent = self.values.T @ (a[..., None] * centred)  # [G, K, r', r]
            found, error = nats(tangent)
            value[at] = -found.sum(0)
            noise[at] = error.sum(0)
        return value, noise

    def bounds(self, keep: int) -> Tensor:
        """[2, S], at or below minus the capacity of every subset: with the pool's weights, and with its own.

        det(I + G T) with G = U_C U_C^T + jitter = L L^T and T = S K~ Lambda K~^T S is det(I + L^T T L). The jitter
        raises the capacity by at most jitter·tr T / 2, and rounding moves what is factored by a small multiple of
        eps·tr G·max kappa (the weights of a set sum to at most 1, tr T <= 4 max kappa): all of it below `slack`.
        """
        heads, tokens, _ = self.keys.shape
        kappa = self.keys @ self.keys.transpose(1, 2)  # [G, n, n]
        gram = self.values @ self.values.T
        jitter = 4 * keep**2 * EPS * float(gram.diagonal().max()) + TINY
        gram.diagonal().add_(jitter)
        size = float(gram.diagonal().sum()) * kappa.diagonal(dim1=1, dim2=2).amax(1)  # [G]
        slack = EPS * (size * (8 * keep**2 + 16 * keep + 8 * tokens + 4 * self.channels + 64) + keep**3 + 64 * keep**2)
        found = []
        room = kappa.new_empty(0)
        for part in subsets(tokens, keep).split(_columns(keep * keep * heads * 2)):
            shape = (keep, keep, 2, heads, part.shape[0])
            if room.shape[1:] != shape:  # fresh memory for every tile would cost more than the arithmetic
                room = kappa.new_empty(3, *shape)
            pairs = _pairs(part, tokens)  # [b, b, s]
            factor = _minors(gram[None], pairs)  # [b, b, 1, s]
            _cholesky(factor)
            spread = _minors(kappa, pairs)[:, :, None]  # [b, b, 1, G, s]
            whitened = _whitened(factor[:, :, None], spread, self.centre.both_weights(part), room)
            found.append(-0.5 * _logdet(whitened).sum(1))
        return torch.cat(found, 1) - slack.sum()


def _whitened(factor: Tensor, spread: Tensor, a: Tensor, room: Tensor) -> Tensor:
    """I + M^T kappa M [b, b, c, G, s] with M = S L = (Diag(a) - a a^T) L, as L^T T L needs no other sum.

    Args:
        factor: L [b, b, 1, 1, s], lower triangular.
        spread: kappa [b, b, 1, G, s], covariances of the keys' logits.
        a: [b, c, G, s].
        room: [3, b, b, c, G, s], overwritten.
    """
    scaled, product, found = room
    size = factor.shape[0]
    torch.mul(factor, a[:, None], out=scaled)
    mean = scaled.sum(0)  # [b, c, G, s], a^T L
    product.zero_()  # kappa Diag(a) L
    towards = torch.zeros_like(a)  # kappa a
    for k in range(size):
        product[:, : k + 1].addcmul_(spread[:, k, None], scaled[k, None, : k + 1])
        towards.addcmul_(spread[:, k], a[k])
    product.addcmul_(towards[:, None], mean[None], value=-1)  # kappa M
    found.zero_()
    pulled = torch.zeros_like(a)  # a^T kappa M
    for k in range(size):
        found[: k + 1].addcmul_(scaled[k, : k + 1, None], product[k, None])
        pulled.addcmul_(product[k], a[k])
    found.addcmul_(mean[:, None], pulled[None], value=-1)
    found.diagonal(dim1=0, dim2=1).add_(1.0)
    whitened: Tensor = found
    return whitened


def _cholesky(matrices: Tensor) -> None:
    """Factor `matrices` [b, b, ...] in place; the upper triangle becomes 0."""
    size = matrices.shape[0]
    for k in range(size):
        matrices[k:, k] /= matrices[k, k].sqrt()
        matrices[k, k + 1 :] = 0.0
        below = matrices[k + 1 :, k]
        matrices[k + 1 :, k + 1 :].addcmul_(below[:, None], below[None], value=-1)


def _logdet(matrices: Tensor) -> Tensor:
    """[...] of positive definite `matrices` [b, b, ...], which are overwritten."""
    size = matrices.shape[0]
    for k in range(size - 1):
        below = matrices[k + 1 :, k]
        matrices[k + 1 :, k + 1 :].addcmul_(below[:, None], (below / matrices[k, k])[None], value=-1)
    return matrices.diagonal(dim1=0, dim2=1).log().sum(-1)


def _pairs(sets: Tensor, tokens: int) -> Tensor:
    """[b, b, s], where each pair of every set's tokens lies in a flattened [n, n]."""
    index = sets.long().T.contiguous()
    return index[:, None] * tokens + index[None]


def _minors(matrices: Tensor, pairs: Tensor) -> Tensor:
    """[b, b, H, s] of `matrices` [H, n, n]."""
    found = matrices.new_empty(*pairs.shape[:2], matrices.shape[0], pairs.shape[2])
    for head, matrix in enumerate(matrices):
        found[:, :, head] = matrix.flatten().index_select(0, pairs.flatten()).view(pairs.shape)
    return found


def _columns(numbers: int) -> int:
    return max(1, TILE_NUMBERS // numbers)


def _split(sets: Tensor, at_once: int) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, sets.shape[0], at_once):
        part = sets[start : start + at_once]
        yield slice(start, start + part.shape[0]), part
