"""Attributes: a layer's Geometry as the JSON that a trace stores, and back again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch

from kvtool.errors import KvtoolError
from kvtool.layer import Geometry, Kind
from kvtool.rotation import Layout, Rotation
from kvtool.trace.layout import LAYER_FIELDS, ROTATION_FIELDS

MOST = 1 << 20  # heads, channels, windows beyond this are lies


def layer_attributes(geometry: Geometry, keys_rotated: bool) -> dict[str, Any]:
    """The attributes of one layer; what is None is left out."""
    attributes: dict[str, Any] = {
        "query_heads": geometry.query_heads,
        "kv_heads": geometry.kv_heads,
        "key_dim": geometry.key_dim,
        "value_dim": geometry.value_dim,
        "scale": float(geometry.scale),
        "softcap": None if geometry.softcap is None else float(geometry.softcap),
        "kind": geometry.kind,
        "window": geometry.window,
        "kv_source": geometry.kv_source,
        "keys_rotated": bool(keys_rotated),
        "rotation": _rotation_attributes(geometry.rotation),
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _rotation_attributes(rotation: Rotation | str | None) -> dict[str, Any] | str | None:
    if rotation is None or isinstance(rotation, str):
        return rotation
    fields: dict[str, Any] = {
        "rotary_dims": rotation.rotary_dims,
        "layout": rotation.layout,
        "rotary_start": rotation.rotary_start,
        "attention_scaling": float(rotation.attention_scaling),
    }
    if rotation.inv_freq is not None:
        fields["inv_freq"] = rotation.inv_freq.to(torch.float32).tolist()
    return fields


class Fields:
    """Typed reading of one JSON object that somebody else wrote.

    Args:
        values: the object.
        known: its permitted keys; null counts as absent.
        where: said in errors, such as `layer 7`.
        code: error code of every complaint.
    """

    def __init__(self, values: Any, known: tuple[str, ...], where: str, code: str = "trace-unsafe") -> None:
        self.where, self.code = where, code
        if not isinstance(values, Mapping):
            raise self.fault("is not a JSON object")
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise self.fault(f"has the unknown key {unknown[0]!r}", "known keys: " + ", ".join(known))
        self.values = {name: value for name, value in values.items() if value is not None}

    def fault(self, what: str, hint: str | None = None) -> KvtoolError:
        """An error that names the place."""
        return KvtoolError(self.code, f"{self.where} {what}", hint)

    def whole(self, name: str, low: int = 0, high: int = MOST) -> int | None:
        """An integer within bounds, or None."""
        value = self.values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high):
            raise self.fault(f"has {name} {_short(value)}, expected a whole number from {low} to {high}")
        return value

    def number(self, name: str, *, positive: bool = False) -> float | None:
        """A finite number, or None."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fault(f"has {name} {_short(value)}, expected a number")
        if abs(value) > 1e300 or math.isnan(value) or (positive and value <= 0):
            raise self.fault(f"has {name} {_short(value)}, expected a {'positive' if positive else 'finite'} number")
        return float(value)

    def word(self, name: str, choices: tuple[str, ...]) -> str | None:
        """One of `choices`, or None."""
        value = self.values.get(name)
        if value is not None and value not in choices:
            raise self.fault(f"has {name} {_short(value)}, expected one of {', '.join(choices)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.fault(f"has {name} {_short(value)}, expected true or false")
        return value

    def require(self, name: str) -> None:
        """Complain when `name` is absent."""
        if name not in self.values:
            raise self.fault(f"lacks {name}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def parse_rotation(
    value: Any, key_dim: int, where: str, code: str, recorded: bool = False
) -> Rotation | Literal["none"] | None:
    """A layer's rotation from JSON.

    Args:
        value: an object, "none", or None where it is unknown.
        key_dim: D, which the rotated channels must fit into.
        recorded: whether cos and sin are stored row by row; the caller attaches them.
    """
    if value is None:
        return None
    if value == "none":
        return "none"
    fields = Fields(value, ROTATION_FIELDS, f"{where}: rotation", code)
    inv_freq = fields.values.get("inv_freq")
    if inv_freq is not None:
        sound = isinstance(inv_freq, list) and all(
            isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in inv_freq
        )
        if not sound or not 1 <= len(inv_freq) <= MOST:
            raise fields.fault("has an inv_freq that is not a list of finite numbers")
    if inv_freq is None and not recorded:
        raise fields.fault("lacks inv_freq", 'write "rotation": "none" for a layer without, or leave rotation out')
    dims = fields.whole("rotary_dims", 2)
    if dims is None:
        dims = 2 * len(inv_freq) if inv_freq is not None else key_dim
    start = fields.whole("rotary_start") or 0
    if dims % 2 or start + dims > key_dim:
        raise fields.fault(f"turns channels {start} to {start + dims - 1}, but keys have {key_dim}")
    if inv_freq is not None and 2 * len(inv_freq) != dims:
        raise fields.fault(f"has {len(inv_freq)} frequencies for {dims} rotated channels, expected {dims // 2}")
    scaling = fields.number("attention_scaling", positive=True)
    return Rotation(
        rotary_dims=dims,
        layout=cast(Layout, fields.word("layout", ("half", "interleaved")) or "half"),
        inv_freq=None if inv_freq is None else torch.tensor(inv_freq, dtype=torch.float32),
        attention_scaling=1.0 if scaling is None else scaling,
        rotary_start=start,
    )


def parse_mask(fields: Fields) -> tuple[Kind, int | None]:
    """kind and window, which must agree: a window on sliding and chunked layers, none on full ones."""
    window = fields.whole("window", 1, 1 << 40)
    kind = fields.word("kind", ("full", "sliding", "chunked")) or ("full" if window is None else "sliding")
    if (kind == "full") != (window is None):
        raise fields.fault(f"is {kind} {'without a' if window is None else 'but has a'} window")
    return cast(Kind, kind), window


def parse_layer(values: Any, layer: int, where: str, *, recorded: bool) -> tuple[Geometry, bool]:
    """Geometry and `keys_rotated` from stored attributes; arrays are attached by the caller.

    Args:
        recorded: whether the layer's rotation is stored row by row.

    Raises:
        KvtoolError: code `trace-unsafe`, naming layer and attribute.
    """
    fields = Fields(values, LAYER_FIELDS, where)
    for name in ("query_heads", "kv_heads", "key_dim", "value_dim", "scale", "kind"):
        fields.require(name)
    heads, kv_heads, key_dim, value_dim = (
        cast(int, fields.whole(name, 1)) for name in ("query_heads", "kv_heads", "key_dim", "value_dim")
    )
    if heads % kv_heads:
        raise fields.fault(f"has {heads} query heads, which cannot share {kv_heads} KV heads evenly")
    kind, window = parse_mask(fields)
    geometry = Geometry(
        layer=layer,
        query_heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=cast(float, fields.number("scale")),
        softcap=fields.number("softcap", positive=True),
        kind=kind,
        window=window,
        rotation=parse_rotation(fields.values.get("rotation"), key_dim, where, "trace-unsafe", recorded),
        kv_source=fields.whole("kv_source"),
    )
    return geometry, fields.flag("keys_rotated", True)
