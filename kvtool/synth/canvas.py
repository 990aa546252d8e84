"""Canvas: queries, keys and values of one layer, from a scene.

Everything is built in logit units: a coefficient x of a query's channel times y of a key's is a
logit of x·y, so both are divided by the root of the layer's scale at the end. The first half of the
channels is rotated (partial rotary embedding) and holds what attention knows of distance: all
queries and keys are alike there before their rotation, which makes near rows likelier than far ones. The other
half passes through and holds content: one channel for each name of the scene, one that all
ordinary keys share, and noise. So a structure among contents survives the rotation exactly.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.rotation import Rotation
from kvtool.synth.scene import SINK, Group, Scene, Size, Wish

COMMON = "common"
NOISE = 0.5  # standard deviation of the content noise of queries and keys; logits then vary by about 0.7
KEY_MEAN = 2.0  # of the channel that all ordinary keys share
VALUE_NOISE = 0.5
GRID = 1024  # coefficients are multiples of 1/GRID: the last bits of a sum must not decide what is stored
BLOCK = 512
BASE = 10_000.0


@dataclass(frozen=True)
class Heads:
    """Sizes of a layer: H query heads on Hk KV heads, D channels of queries, keys and values alike."""

    query_heads: int
    kv_heads: int
    dim: int

    @property
    def scale(self) -> float:
        """1 / sqrt(D)."""
        return float(self.dim**-0.5)

    @property
    def rotation(self) -> Rotation:
        """Of the first half of the channels."""
        rotary = self.dim // 2
        return Rotation(rotary, "half", BASE ** (-torch.arange(0, rotary, 2, dtype=torch.float32) / rotary))


def stream(*words: object) -> torch.Generator:
    """Random numbers that depend on nothing but `words`."""
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def with_sink(scene: Scene) -> dict[str, Group]:
    """The scene's groups, a sink of near-zero value among them."""
    return {SINK: Group([0], {SINK: 1.0}, plain=True, value={}, spread=0.01), **scene.groups}


def paint(scene: Scene, size: Size, heads: Heads, seed: tuple[object, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [H, T, D] and keys [Hk, T, D], rotated, and values [Hk, T, D], all float64.

    Args:
        seed: words that name this layer of this sequence.

    Raises:
        KvtoolError: code `usage` where the channels do not suffice.
    """
    group = heads.query_heads // heads.kv_heads
    found = [_kv_head(scene, size, heads, group, (*seed, head)) for head in range(heads.kv_heads)]
    queries, keys, values = zip(*found, strict=True)
    return torch.cat(queries), torch.stack(keys), torch.stack(values)


def _kv_head(
    scene: Scene, size: Size, heads: Heads, group: int, seed: tuple[object, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [G, T, D], keys [T, D] and values [T, D] of one KV head."""
    make, tokens, content = stream(*seed), size.tokens, heads.dim - heads.dim // 2
    groups = with_sink(scene)
    names = [COMMON, *dict.fromkeys(name for one in groups.values() for name in one.channels)]
    if len(names) + 4 > content:
        raise KvtoolError(
            "usage",
            f"--dim {heads.dim} leaves {content} channels for {len(names)} names and noise",
            f"use --dim {-(-2 * (len(names) + 4) // 4) * 4} or more",
        )
    order = (torch.randperm(content, generator=make) + heads.dim // 2).tolist()
    channel, noisy = dict(zip(names, order, strict=False)), order[len(names) :]

    distance = _distance_channels(heads, scene.locality)
    keys = torch.zeros(tokens, heads.dim, dtype=torch.float64) + distance
    keys[:, noisy] = NOISE * torch.randn(tokens, len(noisy), generator=make, dtype=torch.float64)
    keys[:, channel[COMMON]] = KEY_MEAN
    values = VALUE_NOISE * torch.randn(tokens, heads.dim, generator=make, dtype=torch.float64)
    for one in groups.values():
        if one.plain:
            keys[one.rows] = 0.0
        for name, coefficient in one.channels.items():
            keys[one.rows, channel[name]] = coefficient
        if one.value is not None:
            values[one.rows] = one.spread / VALUE_NOISE * values[one.rows]
            for at, content_value in one.value.items():
                values[one.rows, at] += content_value
    rows = torch.arange(tokens)
    root, rotation = heads.scale**0.5, heads.rotation
    turned_keys = rotation.rotate(keys, rows)
    painted = []
    for _ in range(group):
        queries = torch.zeros(tokens, heads.dim, dtype=torch.float64) + distance
        queries[:, noisy] = NOISE * torch.randn(tokens, len(noisy), generator=make, dtype=torch.float64)
        turned = rotation.rotate(queries, rows)
        _set(turned, turned_keys, scene, size, groups, channel)
        painted.append(turned / root)
    return torch.stack(painted), turned_keys / root, values


def _distance_channels(heads: Heads, locality: float) -> Tensor:
    """[D]: what every un-rotated query and key holds in its rotated channels. A query and a key that are n rows
    apart then have a logit of locality times the mean of cos(n·frequency)."""
    rotary = heads.dim // 2
    found = torch.zeros(heads.dim, dtype=torch.float64)
    found[: rotary // 2] = (locality / (rotary // 2)) ** 0.5
    return found


def _set(
    queries: Tensor, keys: Tensor, scene: Scene, size: Size, groups: dict[str, Group], channel: dict[str, int]
) -> None:
    """Give `queries` [T, D], in logit units, the coefficients that the scene asks for."""
    own = Wish(1, size.tokens, (SINK,), {SINK: scene.sink})
    solved = _solve(own, queries, keys, groups)
    queries[1:, channel[SINK]] = solved[:, 0]
    queries[0, channel[SINK]] = solved[0, 0]
    for name, coefficients in scene.queries.items():
        queries[:, channel[name]] = coefficients
    for name, (group, share) in scene.at_least.items():
        first = groups[group].rows[-1] + 1
        wish = Wish(first, size.tokens, (name,), {group: share})
        queries[:, channel[name]] = _solve(wish, queries, keys, groups).max()
    found = []
    for wish in scene.wishes:
        for name in wish.channels:
            queries[wish.start : wish.stop, channel[name]] = 0.0
        found.append(_solve(wish, queries, keys, groups))
    for wish, coefficients in zip(scene.wishes, found, strict=True):
        for place, name in enumerate(wish.channels):
            queries[wish.start : wish.stop, channel[name]] = coefficients[:, place]


def _solve(wish: Wish, queries: Tensor, keys: Tensor, groups: dict[str, Group]) -> Tensor:
    """[n, channels]: coefficients under which the groups get their shares of all that each query sees.

    With z the logits so far, group j must reach lse(rest) + log(p_j / (1 - sum of p)), and adding the
    coefficients x moves it by M x, M the groups' coefficients on the channels.
    """
    matrix = torch.tensor(
        [[groups[name].channels.get(at, 0.0) for at in wish.channels] for name in wish.shares], dtype=torch.float64
    )
    steps = wish.stop - wish.start
    shares = torch.stack([torch.as_tensor(share, dtype=torch.float64).expand(steps) for share in wish.shares.values()])
    wished = (shares / (1 - shares.sum(0))).log()  # [groups, n]
    all_rows = sorted(row for name in wish.shares for row in groups[name].rows)
    found = torch.empty(steps, len(wish.channels), dtype=torch.float64)
    for low in range(wish.start, wish.stop, BLOCK):
        high = min(wish.stop, low + BLOCK)
        logits = queries[low:high] @ keys[:high].T
        logits.masked_fill_(torch.arange(high) > torch.arange(low, high)[:, None], -torch.inf)
        now = torch.stack([logits[:, groups[name].rows].logsumexp(1) for name in wish.shares])
        logits[:, all_rows] = -torch.inf
        needed = logits.logsumexp(1) + wished[:, low - wish.start : high - wish.start] - now
        found[low - wish.start : high - wish.start] = torch.linalg.solve(matrix, needed).T
    return (found * GRID).round() / GRID
