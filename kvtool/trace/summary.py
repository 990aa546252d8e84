"""Summary: what a trace holds, as plain values for a table or a JSON document."""

from __future__ import annotations

from typing import Any

from kvtool.rotation import Rotation
from kvtool.trace.gradients import gradient_attributes
from kvtool.trace.layout import dtype_name
from kvtool.trace.reader import Sequence, Trace


def _rotation_word(rotation: Rotation | str | None) -> str:
    if rotation is None:
        return "unknown"
    if isinstance(rotation, str):
        return rotation
    return rotation.layout if rotation.by_position else f"{rotation.layout}, recorded"


def _layer(sequence: Sequence, layer_id: int) -> dict[str, Any]:
    geometry = sequence.geometry(layer_id)
    return {
        "layer": layer_id,
        "query_heads": geometry.query_heads,
        "kv_heads": geometry.kv_heads,
        "key_dim": geometry.key_dim,
        "value_dim": geometry.value_dim,
        "kind": geometry.kind,
        "window": geometry.window,
        "scale": geometry.scale,
        "softcap": geometry.softcap,
        "sink_logits": geometry.sink_logits is not None,
        "rotation": _rotation_word(geometry.rotation),
        "keys_rotated": sequence.parsed[layer_id][1],
        "kv_source": geometry.kv_source,
        "queries": sequence.shape("queries", layer_id)[1],
        "output_projection": sequence.has_array("output_projection", layer_id),
        "output_sample": sequence.has_array("output_sample", layer_id),
        "output_gradients": sequence.has_array("output_gradients", layer_id),
    }


def _sequence(sequence: Sequence) -> dict[str, Any]:
    prefix = f"sequences/{sequence.index:04d}/"
    entries = sequence.trace.commit.entries
    return {
        "sequence": sequence.index,
        "id": sequence.id,
        "tokens": sequence.length,
        "prompt_length": sequence.prompt_length,
        "prompt_digest": sequence.prompt_digest,
        "bytes": sum(entry.length for name, entry in entries.items() if name.startswith(prefix)),
        "landmarks": sequence.landmarks,
        "synthetic": sequence.synthetic,
        "attributes": sequence.attributes,
        "gradients": None if sequence.gradients is None else gradient_attributes(sequence.gradients),
        "layers": [_layer(sequence, layer_id) for layer_id in sequence.layer_ids],
    }


def summary(trace: Trace) -> dict[str, Any]:
    """Model, manifest, sizes, sequences and layers. Valid JSON; reads metadata and a few small arrays only."""
    return {
        "path": trace.shown,
        "digest": trace.digest,
        "format": trace.manifest["format"],
        "model": trace.manifest.get("model"),
        "manifest": trace.manifest,
        "stored_dtype": dtype_name(trace.stored_dtype),
        "files": len(trace.commit.entries),
        "bytes": trace.total_bytes,
        "layer_ids": trace.layer_ids,
        "sequences": [_sequence(sequence) for sequence in trace.sequences],
    }
