"""Consistency: the shapes of a trace's arrays must agree with each other and with the layers' attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.rotation import Rotation
from kvtool.shapes import expect_shapes
from kvtool.trace.attributes import MOST, Fields
from kvtool.trace.layout import LAYER_ARRAYS, layer_path, projection_path
from kvtool.trace.metadata import Tree


def sequence_fields(values: Any, where: str) -> tuple[dict[str, Any], int, int]:
    """A sequence's attributes, its length and prompt length."""
    known = tuple(values) if isinstance(values, dict) else ()
    fields = Fields(values, known, where)
    for name in ("length", "prompt_length", "prompt_digest"):
        fields.require(name)
    length = cast(int, fields.whole("length", 1, 1 << 40))
    prompt_length = cast(int, fields.whole("prompt_length", 0, length))
    digest = fields.values["prompt_digest"]
    if not isinstance(digest, str) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise fields.fault("has a prompt_digest that is not 64 hex digits")
    if not isinstance(fields.values.get("id", ""), str) or not isinstance(fields.values.get("segments", []), list):
        raise fields.fault("has an id that is no text, or segments that are no list")
    return fields.values, length, prompt_length


def _shaped(tree: Tree, path: str, names: Mapping[str, str]) -> None:
    try:
        expect_shapes(**{name: (tree.arrays.get(f"{path}/{name}"), dims) for name, dims in names.items()})
    except KvtoolError as error:
        raise KvtoolError("trace-unsafe", f"{path}: {error.message}") from None


def steps_fault(steps: Tensor, count: int) -> str | None:
    """What is wrong with query steps [Tq] of a sequence of `count` rows, or None."""
    if not steps.numel():
        return None
    if bool((steps[1:] <= steps[:-1]).any()) or int(steps[0]) < 0 or int(steps[-1]) >= count:
        return f"query steps that do not ascend within 0 to {count - 1}"
    return None


def check_sequence(tree: Tree, path: str, length: int) -> None:
    """tokens and positions are there, and everything that counts tokens counts `length`.

    Raises:
        KvtoolError: code `trace-unsafe`.
    """
    for name in ("tokens", "positions"):
        if f"{path}/{name}" not in tree.arrays:
            raise KvtoolError("trace-unsafe", f"{path} has no {name}")
    if (f"{path}/text" in tree.arrays) != (f"{path}/text_offsets" in tree.arrays):
        raise KvtoolError("trace-unsafe", f"{path} has one of text and text_offsets without the other")
    _shaped(tree, path, {"tokens": str(length), "positions": str(length), "text_offsets": str(length + 1)})


def check_layer(tree: Tree, index: int, layer: int, geometries: Mapping[int, Geometry], length: int) -> None:
    """One layer's arrays fit its geometry, and its donor, if it has one, stores what it needs.

    Raises:
        KvtoolError: code `trace-unsafe`, naming the layer.
    """
    geometry, path = geometries[layer], layer_path(index, layer)
    where = f"layer {layer} of sequence {index}"
    stored = {name for name in LAYER_ARRAYS if f"{path}/{name}" in tree.arrays}
    own = {"keys", "values"} if geometry.kv_source is None else set()
    missing = sorted({"queries", "query_steps", *own} - stored)
    if missing or (geometry.kv_source is not None and stored & {"keys", "values"}):
        raise KvtoolError("trace-unsafe", f"{where} {'has no ' + missing[0] if missing else 'has keys beside a donor'}")
    for pair in (("rotation_cos", "rotation_sin"), ("output_gradients", "gradient_steps")):
        if len(stored & set(pair)) == 1:
            raise KvtoolError("trace-unsafe", f"{where} has one of {pair[0]} and {pair[1]} without the other")
    rotation = geometry.rotation
    if "rotation_cos" in stored and not isinstance(rotation, Rotation):
        raise KvtoolError("trace-unsafe", f"{where} has recorded rotations but no rotation attribute")
    bound = {
        "R/2": rotation.rotary_dims // 2 if isinstance(rotation, Rotation) else 0,
        "H": geometry.query_heads,
        "Hk": geometry.kv_heads,
        "D": geometry.key_dim,
        "Dv": geometry.value_dim,
        "T": length,
    }
    dims = {
        name: " ".join(str(bound[dim]) if dim in bound else dim for dim in names.split())
        for name, (_, names) in LAYER_ARRAYS.items()
    }
    _shaped(tree, path, dims)
    projection = tree.arrays.get(projection_path(layer))
    if projection is not None and projection.shape[:2] != (geometry.query_heads, geometry.value_dim):
        raise KvtoolError("trace-unsafe", f"{where} does not fit its output projection {list(projection.shape)}")
    if f"{path}/output_sample" in tree.arrays:
        rows, queries = (tree.arrays[f"{path}/{name}"].shape[1] for name in ("output_sample", "queries"))
        if rows > queries or rows > MOST:
            raise KvtoolError("trace-unsafe", f"{where} has outputs of {rows} steps but queries of {queries}")
    if geometry.kv_source is not None:
        donor = geometries.get(geometry.kv_source)
        if donor is None or donor.kv_source is not None or donor is geometry:
            raise KvtoolError("trace-unsafe", f"{where} reads the keys of layer {geometry.kv_source}, which has none")
        same = (donor.kv_heads, donor.key_dim, donor.value_dim)
        if same != (geometry.kv_heads, geometry.key_dim, geometry.value_dim):
            raise KvtoolError("trace-unsafe", f"{where} and its donor {donor.layer} differ in KV heads or channels")
