"""Settings of two traces: what their manifests, sequences and geometries say differently."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvtool.compare.trace_rows import deviations
from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.rotation import Rotation
from kvtool.trace import Sequence, Trace

SIZES = ("query_heads", "kv_heads", "key_dim", "value_dim")
# What says where and by what a run was made, not what was run. It stands last.
_AROUND = ("capture.versions", "capture.argv", "capture.machine", "capture.threads", "capture.tool", "capture.device")


def flat(values: Any, name: str = "") -> dict[str, Any]:
    """Nested objects with dotted names; lists are values."""
    if not isinstance(values, Mapping):
        return {name: values}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{name}.{key}" if name else str(key))
    return found


def differing(a: Any, b: Any, name: str) -> list[dict[str, Any]]:
    """What differs of two JSON values: `name`, `a`, `b`, null where one lacks it."""
    mine, other = flat(a, name), flat(b, name)
    names = [*mine, *(key for key in other if key not in mine)]
    return [{"name": n, "a": mine.get(n), "b": other.get(n)} for n in names if mine.get(n) != other.get(n)]


def settings(a: Trace, b: Trace) -> list[dict[str, Any]]:
    """What the manifests and the sequences' attributes say differently, what decides numbers first."""
    found = [row for part in ("model", "tokenizer", "capture") for row in _part(a, b, part)]
    for one, other in zip(a.sequences, b.sequences, strict=False):
        skipped = ("prompt_length", "prompt_digest", "length", "gradients")
        sides = [{k: v for k, v in side.attributes.items() if k not in skipped} for side in (one, other)]
        found += differing(sides[0], sides[1], f"sequences[{one.index}]")
    return sorted(found, key=lambda row: row["name"].startswith(_AROUND))  # stable


def _part(a: Trace, b: Trace, part: str) -> list[dict[str, Any]]:
    return differing(a.manifest.get(part), b.manifest.get(part), part)


def refuse_other_shapes(a: Sequence, b: Sequence) -> None:
    """Raises:
    KvtoolError: code `shape` where no row of the one corresponds to a row of the other.
    """
    if a.length != b.length:
        raise KvtoolError(
            "shape",
            f"sequence {a.index} has {a.length} tokens in {a.trace.shown} and {b.length} in {b.trace.shown}: "
            "their rows cannot be compared",
            "capture the same tokens twice",
        )
    for layer in sorted(set(a.layer_ids) & set(b.layer_ids)):
        sizes = [{name: getattr(side.geometry(layer), name) for name in SIZES} for side in (a, b)]
        if sizes[0] != sizes[1]:
            name = next(name for name in SIZES if sizes[0][name] != sizes[1][name])
            raise KvtoolError(
                "shape",
                f"layer {layer} has {name} {sizes[0][name]} in {a.trace.shown} and {sizes[1][name]} in "
                f"{b.trace.shown}: "
                "these are different models",
                "kvtool inspect shows the geometry of both",
            )


def geometry_differences(a: Sequence, b: Sequence, layer: int, bound: float) -> list[dict[str, Any]]:
    """How one layer's attention differs besides its data: `sequence`, `layer`, `name`, `a`, `b`.

    Numbers that are learned or computed (sink logits, rotation) may differ by `bound`, relative.
    """
    mine, other = a.geometry(layer), b.geometry(layer)
    found: list[tuple[str, Any, Any]] = []
    for name in ("scale", "softcap", "kind", "window", "kv_source"):
        one, two = getattr(mine, name), getattr(other, name)
        same = math.isclose(one, two, rel_tol=1e-7) if isinstance(one, float) and isinstance(two, float) else one == two
        if not same:
            found.append((name, one, two))
    found += _tensor("sink_logits", mine.sink_logits, other.sink_logits, bound)
    found += _rotation(mine, other, bound)
    return [{"sequence": a.index, "layer": layer, "name": n, "a": x, "b": y} for n, x, y in found]


def _rotation(a: Geometry, b: Geometry, bound: float) -> list[tuple[str, Any, Any]]:
    one, two = a.rotation, b.rotation
    if not isinstance(one, Rotation) or not isinstance(two, Rotation):
        words = ["rotary" if isinstance(side, Rotation) else side for side in (one, two)]
        return [] if words[0] == words[1] else [("rotation", words[0], words[1])]
    found = [
        (f"rotation.{name}", getattr(one, name), getattr(two, name))
        for name in ("rotary_dims", "layout", "rotary_start", "attention_scaling")
        if getattr(one, name) != getattr(two, name)
    ]
    for name in ("inv_freq", "cos", "sin"):
        found += _tensor(f"rotation.{name}", getattr(one, name), getattr(two, name), bound)
    return found


def _tensor(name: str, a: Tensor | None, b: Tensor | None, bound: float) -> list[tuple[str, Any, Any]]:
    """Nothing where they agree; shapes where those differ, else the largest relative deviation on B's side."""
    if a is None or b is None or a.shape != b.shape:
        shapes = [None if side is None else list(side.shape) for side in (a, b)]
        return [] if a is None and b is None else [(name, shapes[0], shapes[1])]
    apart = float(deviations(a.reshape(1, -1), b.reshape(1, -1))[0])
    if apart <= bound:
        return []
    worst = int((a.to(torch.float64) - b.to(torch.float64)).abs().reshape(-1).argmax())
    return [(name, float(a.reshape(-1)[worst]), float(b.reshape(-1)[worst]))]
