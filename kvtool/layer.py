"""Layer: one layer of one sequence, lazily loaded; all that policies and metrics ever see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.rotation import Rotation
from kvtool.shapes import expect_shapes

Kind = Literal["full", "sliding", "chunked"]
MOST_DRAWS = 1 << 16  # of gradients: beyond them a draw says nothing new


@dataclass(frozen=True, eq=False)
class Geometry:
    """What attention of one layer is, without its data.

    Attributes:
        layer: the model's own layer id (ids may have gaps).
        query_heads, kv_heads: H and Hk; query head h reads KV head h // (H / Hk).
        key_dim, value_dim: D and Dv.
        scale: factor on q·k, taken from the model, never assumed.
        softcap: c of c·tanh(z/c), or None.
        kind, window: `full`; `sliding` sees t - i < window; `chunked` sees i // window == t // window.
        sink_logits: [H] float32 learned logits without a key in the denominator, or None.
        rotation: a Rotation, "none" for a layer without, None where unknown.
        kv_source: the layer whose keys and values this layer reads, or None for its own.
        element_bytes: bytes of one number of a key or value, as stored.
    """

    layer: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float | None = None
    kind: Kind = "full"
    window: int | None = None
    sink_logits: Tensor | None = None
    rotation: Rotation | Literal["none"] | None = None
    kv_source: int | None = None
    element_bytes: int = 4

    @property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.query_heads // self.kv_heads

    def first_visible(self, steps: Tensor) -> Tensor:
        """The oldest row that each step sees, same shape as `steps` (int64)."""
        if self.kind == "sliding" and self.window is not None:
            return (steps - self.window + 1).clamp_min(0)
        if self.kind == "chunked" and self.window is not None:
            return torch.div(steps, self.window, rounding_mode="floor") * self.window
        return torch.zeros_like(steps)


@dataclass(frozen=True)
class Gradients:
    """How the gradients of one sequence were drawn: what every layer's `output_gradients` have in common.

    Attributes:
        draws: S, independent draws from the model's own full-cache distribution of next tokens.
        block: evaluated steps per block; targets beyond a step's own block are cut from its gradient.
        at: which steps were evaluated: those of the continuation, of the prompt, or all.
        targets: half-open range of steps whose next token was drawn; step t' predicts row t'+1.
        steps: how many steps' next tokens were drawn, the divisor of a mean per step.
        seed: seed of the draws.
        probe: what was drawn at the logits, either with the Fisher information as covariance: `tokens`, the
            gradient of a drawn token's log-probability, or `signs`, random signs through its square root.
    """

    draws: int
    block: int
    at: Literal["continuation", "prompt", "all"]
    targets: tuple[int, int]
    steps: int
    seed: int
    probe: Literal["signs", "tokens"] = "tokens"


_INFORMATION = "information from "  # and the name of a calibration trace: the key of a loader


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of one sequence. Arrays are loaded on first use, in the compute dtype.

    Whatever the trace stores (bf16, fp16, fp32), arithmetic sees `dtype` (float32 or float64).

    Attributes:
        geometry: see Geometry.
        tokens: T, rows of the sequence.
        prompt_length: rows that belong to the prompt.
        positions: [T] int64 rotary positions.
        query_steps: [Tq] int64 ascending rows whose queries are stored.
        prompt_digest: hex digest that seeds random streams.
        loaders: name -> function returning the array as stored, or in a dtype at least as wide, for `queries`
            [H, Tq, D], `keys` [Hk, T, D], `values` [Hk, T, Dv] and optionally `output_projection` [H, Dv, M],
            `output_sample` [H, n, Dv] (output of the last n query steps), `output_gradients`
            [S, H, Tg, Dv].
        gradients: how `output_gradients` were drawn, None where the trace has none.
        gradient_steps: [Tg] int64 ascending rows of `output_gradients`, None where this layer has none.
    """

    geometry: Geometry
    tokens: int
    prompt_length: int
    positions: Tensor
    query_steps: Tensor
    prompt_digest: str
    loaders: Mapping[str, Callable[[], Tensor]] = field(repr=False)
    dtype: torch.dtype = torch.float32
    gradients: Gradients | None = None
    gradient_steps: Tensor | None = None

    def _load(self, name: str) -> Tensor:
        return self.loaders[name]().to(self.dtype)

    @cached_property
    def queries(self) -> Tensor:
        """[H, Tq, D], rotated, in row order of `query_steps`."""
        return self._load("queries")

    @cached_property
    def keys(self) -> Tensor:
        """[Hk, T, D], as the model cached them (rotated)."""
        return self._load("keys")

    @cached_property
    def values(self) -> Tensor:
        """[Hk, T, Dv]."""
        return self._load("values")

    @cached_property
    def output_projection(self) -> Tensor | None:
        """[H, Dv, M], or None where the trace holds none."""
        return self._load("output_projection") if "output_projection" in self.loaders else None

    @cached_property
    def output_gradients(self) -> Tensor | None:
        """[S, H, Tg, Dv], or None where the trace holds none: per draw, what was drawn at the logits, pulled
        back to attention's output before any gate or output projection."""
        return self._load("output_gradients") if "output_gradients" in self.loaders else None

    def has(self, name: str) -> bool:
        """Whether the optional array `name` is stored."""
        return name in self.loaders

    def with_information(self, calibration: str, load: Callable[[], Tensor]) -> Layer:
        """The same layer with the Fisher information [H, Dv, Dv] that a calibration trace says of it."""
        return replace(self, loaders={**self.loaders, _INFORMATION + calibration: load})

    def information(self, calibration: str) -> Tensor:
        """[H, Dv, Dv] float64, the mean of g g^T over the gradients of the trace named `calibration`.

        Raises:
            KvtoolError: code `trace-lacks` where nobody brought it.
        """
        if _INFORMATION + calibration not in self.loaders:
            raise KvtoolError(
                "trace-lacks",
                f"layer {self.geometry.layer} was not brought together with the calibration trace {calibration}",
                "replay does so; a policy called by hand needs Layer.with_information",
            )
        return self.loaders[_INFORMATION + calibration]().to(torch.float64)

    def with_dtype(self, dtype: torch.dtype) -> Layer:
        """The same layer computing in `dtype`."""
        return replace(self, dtype=dtype)

    def with_queries_of(self, steps: Tensor) -> Layer:
        """The same layer with the queries of `steps` [n] alone, each stored; keys and values are shared. Once this
        layer is let go, those of a long prompt take no memory."""
        some, keys, values = self.queries[:, torch.searchsorted(self.query_steps, steps)], self.keys, self.values
        loaders = {**self.loaders, "queries": lambda: some, "keys": lambda: keys, "values": lambda: values}
        return replace(self, query_steps=steps, loaders=loaders)

    def query_rows(self, start: int, stop: int) -> slice:
        """Where the queries of steps start..stop-1 lie in `queries`.

        Raises:
            KvtoolError: code `trace-lacks` when some of them were not captured.
        """
        low, high = (int(torch.searchsorted(self.query_steps, bound)) for bound in (start, stop))
        if high - low != stop - start:
            raise KvtoolError(
                "trace-lacks",
                f"layer {self.geometry.layer} holds {high - low} of the queries of steps {start} to {stop - 1}",
                "capture with --queries all, or choose a policy that reads no past queries",
            )
        return slice(low, high)

    @classmethod
    def from_arrays(
        cls,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        prompt_length: int,
        scale: float,
        layer: int = 0,
        query_steps: Tensor | None = None,
        positions: Tensor | None = None,
        output_projection: Tensor | None = None,
        softcap: float | None = None,
        kind: Kind | None = None,
        window: int | None = None,
        sink_logits: Tensor | None = None,
        rotation: Rotation | Literal["none"] | None = None,
        prompt_digest: str = "0" * 64,
        dtype: torch.dtype = torch.float32,
        output_gradients: Tensor | None = None,
        gradient_steps: Tensor | None = None,
        gradients: Gradients | None = None,
    ) -> Layer:
        """A layer from arrays in memory: `queries` [H, Tq, D], `keys` [Hk, T, D], `values` [Hk, T, Dv]."""
        sizes = expect_shapes(
            queries=(queries, "H Tq D"),
            keys=(keys, "Hk T D"),
            values=(values, "Hk T Dv"),
            query_steps=(query_steps, "Tq"),
            positions=(positions, "T"),
            output_projection=(output_projection, "H Dv M"),
            sink_logits=(sink_logits, "H"),
            output_gradients=(output_gradients, "S H Tg Dv"),
            gradient_steps=(gradient_steps, "Tg"),
        )
        if len({value is None for value in (output_gradients, gradient_steps, gradients)}) != 1:
            raise KvtoolError("shape", "output_gradients, gradient_steps and gradients come together or not at all")
        if sizes["H"] % sizes["Hk"]:
            raise KvtoolError("shape", f"{sizes['H']} query heads cannot share {sizes['Hk']} KV heads evenly")
        if query_steps is None:
            query_steps = torch.arange(sizes["T"] - sizes["Tq"], sizes["T"])
        arrays = {"queries": queries, "keys": keys, "values": values}
        if output_projection is not None:
            arrays["output_projection"] = output_projection
        if output_gradients is not None:
            arrays["output_gradients"] = output_gradients
        return cls(
            geometry=Geometry(
                layer=layer,
                query_heads=sizes["H"],
                kv_heads=sizes["Hk"],
                key_dim=sizes["D"],
                value_dim=sizes["Dv"],
                scale=scale,
                softcap=softcap,
                kind=kind or ("full" if window is None else "sliding"),
                window=window,
                sink_logits=sink_logits,
                rotation=rotation,
                element_bytes=keys.element_size(),
            ),
            tokens=sizes["T"],
            prompt_length=prompt_length,
            positions=torch.arange(sizes["T"]) if positions is None else positions.to(torch.int64),
            query_steps=query_steps.to(torch.int64),
            prompt_digest=prompt_digest,
            loaders={name: partial(torch.clone, array) for name, array in arrays.items()},
            dtype=dtype,
            gradients=gradients,
            gradient_steps=None if gradient_steps is None else gradient_steps.to(torch.int64),
        )
