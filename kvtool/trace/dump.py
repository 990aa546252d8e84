"""Dump: a safetensors file that any engine can write, turned into a trace (docs/import.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.trace.attributes import Fields, parse_mask, parse_rotation
from kvtool.trace.commit import parse_json
from kvtool.trace.layout import FLOATS, dtype_name

TOP_KEYS = ("model", "prompt_length", "layers")
LAYER_KEYS = ("scale", "softcap", "window", "kind", "kv_source", "keys_rotated", "rotation")
LAYER_TENSORS = ("queries", "keys", "values", "query_steps", "sink_logits", "output_sample")

_SEQUENCE = re.compile(r"sequences\.(0|[1-9]\d{0,5})\.(tokens|positions)\Z")
_LAYER = re.compile(rf"sequences\.(0|[1-9]\d{{0,5}})\.layers\.(0|[1-9]\d{{0,5}})\.({'|'.join(LAYER_TENSORS)})\Z")
_PROJECTION = re.compile(r"model\.layers\.(0|[1-9]\d{0,5})\.output_projection\Z")
_KNOWN = (
    "known tensors: sequences.<n>.tokens, sequences.<n>.positions, model.layers.<l>.output_projection, "
    "sequences.<n>.layers.<l>." + "|".join(LAYER_TENSORS)
)


@dataclass(frozen=True)
class LayerMeta:
    """What the dump's JSON says about one layer; shapes come from its tensors."""

    fields: Fields
    keys_rotated: bool
    kv_source: int | None


def fault(what: str, hint: str | None = None) -> KvtoolError:
    """An error about a dump."""
    return KvtoolError("dump", what, hint or "docs/import.md describes what a dump holds")


class Dump:
    """An opened dump: names, dtypes and shapes are known, tensors are read when asked for.

    Raises:
        KvtoolError: `file-missing`, `dump`, `dtype`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise KvtoolError("file-missing", f"{path} does not exist or is no file")
        try:
            self.file: Any = safe_open(str(path), framework="pt")
            self.names = set(self.file.keys())
            raw = (self.file.metadata() or {}).get("kvtool")
        except (SafetensorError, OSError, ValueError) as error:
            raise fault(
                f"{path} is no sound safetensors file: {error}", "write it with safetensors.torch.save_file"
            ) from None
        if raw is None:
            raise fault(f"{path} has no metadata 'kvtool'")
        try:
            values = parse_json(raw.encode(), "metadata 'kvtool'")
        except KvtoolError as error:
            raise fault(f"{path}: {error.message}") from None
        self.fields = Fields(values, TOP_KEYS, "metadata 'kvtool'", "dump")
        self.model = self.fields.values.get("model")
        if not isinstance(self.model, str) or not self.model:
            raise fault("metadata 'kvtool' lacks model, the model's name")
        self._sort_names()
        self.layers = self._layers()
        self.prompt_lengths = self._prompt_lengths()
        self.dtype = self._dtype()

    def _sort_names(self) -> None:
        self.sequences: dict[int, dict[int, set[str]]] = {}
        self.projections: list[int] = []
        for name in sorted(self.names):
            if found := _SEQUENCE.match(name):
                self.sequences.setdefault(int(found[1]), {})
            elif found := _LAYER.match(name):
                self.sequences.setdefault(int(found[1]), {}).setdefault(int(found[2]), set()).add(found[3])
            elif found := _PROJECTION.match(name):
                self.projections.append(int(found[1]))
            else:
                raise fault(f"the tensor {name[:100]!r} is unknown", _KNOWN)
        if sorted(self.sequences) != list(range(len(self.sequences))) or not self.sequences:
            raise fault(f"{self.path} has the sequences {sorted(self.sequences)}, expected 0, 1, 2 and so on")

    def _layers(self) -> dict[int, LayerMeta]:
        found: dict[int, LayerMeta] = {}
        values = self.fields.values.get("layers")
        if not isinstance(values, Mapping):
            raise fault("metadata 'kvtool' lacks layers")
        for name, entry in values.items():
            if not re.match(r"(0|[1-9]\d{0,5})\Z", name):
                raise fault(f"metadata 'kvtool' names a layer {name[:40]!r}, which is no number")
            fields = Fields(entry, LAYER_KEYS, f"layer {name}", "dump")
            if fields.number("scale") is None:
                raise fault(f"layer {name} lacks scale", "give the factor on q·k that the model uses, often D ** -0.5")
            found[int(name)] = LayerMeta(fields, fields.flag("keys_rotated", True), fields.whole("kv_source"))
        used = {layer for layers in self.sequences.values() for layer in layers}
        for missing in sorted(used - set(found)):
            raise fault(f"layer {missing} has tensors, but metadata 'kvtool' does not describe it")
        for idle in sorted(set(found) - used):
            raise fault(f"metadata 'kvtool' describes layer {idle}, which has no tensors")
        for stray in sorted(set(self.projections) - used):
            raise fault(f"layer {stray} has an output projection, but no queries")
        return found

    def _prompt_lengths(self) -> list[int]:
        lengths = self.fields.values.get("prompt_length")
        count = len(self.sequences)
        if not isinstance(lengths, list) or len(lengths) != count:
            raise fault(
                f"metadata 'kvtool' must give prompt_length as a list of {count} numbers, one for each sequence"
            )
        for index, length in enumerate(lengths):
            total = self.shape(f"sequences.{index}.tokens", 1)[0]
            if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= total:
                raise fault(f"prompt_length of sequence {index} is {length!r}, but it has {total} tokens")
        return lengths

    def _dtype(self) -> torch.dtype:
        dtypes = {
            self.file.get_slice(name).get_dtype(): name
            for name in sorted(self.names)
            if name.endswith((".queries", ".keys", ".values"))
        }
        known = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        for dtype, name in dtypes.items():
            if dtype not in known:
                raise KvtoolError(
                    "dtype", f"{name} is {dtype}, which a trace cannot store", "cast to one of " + ", ".join(FLOATS)
                )
        if len(dtypes) > 1:
            pairs = ", ".join(f"{name} is {dtype}" for dtype, name in sorted(dtypes.items()))
            raise KvtoolError("dtype", f"one trace has one dtype, but {pairs}", "cast all of them to the same")
        return known[next(iter(dtypes))] if dtypes else torch.float32

    def shape(self, name: str, rank: int) -> list[int]:
        """Shape of a tensor that must be there with that rank."""
        if name not in self.names:
            raise fault(f"{self.path} lacks the tensor {name}")
        shape = list(self.file.get_slice(name).get_shape())
        if len(shape) != rank:
            raise fault(f"{name} has the shape {shape}, expected {rank} dimensions")
        return shape

    def tensor(self, name: str, rank: int, *, whole: bool = False) -> Tensor:
        """A tensor that must be there; `whole` asks for integers."""
        self.shape(name, rank)
        tensor = cast(Tensor, self.file.get_tensor(name))
        if whole == tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise fault(f"{name} is {dtype_name(tensor.dtype)}, expected {'integers' if whole else 'floats'}")
        return tensor

    def geometry(self, sequence: int, layer: int) -> Geometry:
        """One layer's geometry: sizes from its tensors, the rest from the JSON."""
        stem, meta = f"sequences.{sequence}.layers.{layer}", self.layers[layer]
        heads, _, key_dim = self.shape(f"{stem}.queries", 3)
        donor = layer if meta.kv_source is None else meta.kv_source
        if meta.kv_source is not None and {"keys", "values"} & self.sequences[sequence][layer]:
            raise fault(f"layer {layer} reads the keys of layer {donor}, but has keys or values of its own")
        if donor not in self.sequences[sequence] or self.layers[donor].kv_source not in (None,):
            raise fault(f"layer {layer} reads the keys of layer {donor}, which has none in sequence {sequence}")
        source = f"sequences.{sequence}.layers.{donor}"
        kv_heads, rows, _ = self.shape(f"{source}.keys", 3)
        if self.shape(f"{source}.values", 3)[:2] != [kv_heads, rows]:
            heads_and_rows = " and ".join(
                f"{name} {self.shape(f'{source}.{name}', 3)[:2]}" for name in ("keys", "values")
            )
            raise KvtoolError(
                "shape",
                f"layer {donor} of sequence {sequence} has [KV heads, tokens] of {heads_and_rows}, and they must agree",
                "one row per KV head and token, never repeated for the query heads of a group",
            )
        total = self.shape(f"sequences.{sequence}.tokens", 1)[0]
        if rows != total:
            raise KvtoolError(
                "shape", f"layer {donor} of sequence {sequence} has keys of {rows} tokens, and there are {total} tokens"
            )
        if not kv_heads or heads % kv_heads:
            raise fault(f"{stem}: {heads} query heads cannot share {kv_heads} KV heads evenly")
        sinks = f"{stem}.sink_logits"
        kind, window = parse_mask(meta.fields)
        rotation = parse_rotation(meta.fields.values.get("rotation"), key_dim, f"layer {layer}", "dump")
        if not meta.keys_rotated and rotation is None:
            raise fault(f"layer {layer} has keys_rotated false, but no rotation to rotate them with")
        return Geometry(
            layer=layer,
            query_heads=heads,
            kv_heads=kv_heads,
            key_dim=key_dim,
            value_dim=self.shape(f"{source}.values", 3)[2],
            scale=cast(float, meta.fields.number("scale")),
            softcap=meta.fields.number("softcap", positive=True),
            kind=kind,
            window=window,
            sink_logits=self.tensor(sinks, 1) if sinks in self.names else None,
            rotation=rotation,
            kv_source=meta.kv_source,
        )
