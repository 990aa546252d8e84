"""The probe: a few tokens through the model, to learn each layer's attention before anything is written."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvtool.capture.hook import AttentionCall, observed, sink_logits, softcap
from kvtool.capture.module_inputs import ModuleInputs
from kvtool.capture.projection import find_projection, linear_traffic, per_head
from kvtool.capture.reference import attend, relative_error
from kvtool.capture.rotation import find_rotation, frequency_candidates, scaling_candidates
from kvtool.capture.visibility import check_mask, expected_layers, window_of
from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.words import spans

TOKENS = 24
_SHIFT = 997
# float64 recomputation against the model's own output: rounding of the run's dtype, with room.
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True, eq=False)
class Probed:
    """One layer as the probe saw it.

    Attributes:
        geometry: see kvtool.layer.Geometry; the rotation is that of short sequences.
        module: its attention module.
        projection: the linear map W_O, or None where something stands between.
        tables_key: layers with the same key receive the same cos and sin objects; None: none received.
        sine_first: whether it receives (sin, cos) rather than (cos, sin).
    """

    geometry: Geometry
    module: nn.Module
    projection: nn.Module | None
    tables_key: int | None
    sine_first: bool

    def output_projection(self) -> Tensor | None:
        """[H, Dv, M] in the run's dtype, or None."""
        if self.projection is None:
            return None
        return per_head(self.projection, self.geometry.query_heads, self.geometry.value_dim)


@dataclass
class _Sight:
    """Observer that keeps every call of one forward."""

    calls: dict[int, AttentionCall] = field(default_factory=dict)

    def wants(self, layer: int) -> bool:
        return True

    def see(self, call: AttentionCall) -> None:
        if call.layer in self.calls:
            raise KvtoolError("model-unsupported", f"layer {call.layer} calls its attention more than once a forward")
        # A cache may go on to write into what it handed out.
        self.calls[call.layer] = replace(
            call, queries=call.queries.clone(), keys=call.keys.clone(), values=call.values.clone()
        )


def position_limit(config: Any) -> int | None:
    """Positions that a short run may use without changing the rotation or leaving a table; None: unlimited."""
    text = config.get_text_config()
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions")]
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    limits += [part.get("original_max_position_embeddings") for part in (parameters, *nested)]
    numbers = [int(limit) for limit in limits if isinstance(limit, int | float)]
    return min(numbers, default=None)


@torch.no_grad()
def probe(model: Any) -> dict[int, Probed]:
    """Geometry, rotation and projection of every attention layer, by layer id.

    Raises:
        KvtoolError: code `model-unsupported`, naming the model and what about it cannot be recorded.
    """
    config = model.config
    name = type(model).__name__
    limit = position_limit(config)
    n = TOKENS if limit is None else max(min(TOKENS, limit // 2), 1)
    vocabulary = int(config.get_text_config().vocab_size)
    tokens = torch.randint(0, vocabulary, (1, n), generator=torch.Generator().manual_seed(20))

    first = _Sight()
    try:
        with observed(model, first):
            model(input_ids=tokens, use_cache=True)
    except KvtoolError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise KvtoolError("model-unsupported", f"{name} fails on {n} tokens: {reason}") from error
    _check_layers(name, sorted(first.calls), expected_layers(config))
    modules = {layer: call.module for layer, call in first.calls.items()}

    sight, inputs = _Sight(), ModuleInputs()
    with observed(model, sight), inputs.kept(modules), linear_traffic(modules) as traffic:
        model(input_ids=tokens, use_cache=True)

    probed: dict[int, Probed] = {}
    for layer, call in sorted(sight.calls.items()):
        geometry = _geometry(name, call, config, sight.calls)
        _check_output(name, geometry, call)
        probed[layer] = Probed(
            geometry,
            call.module,
            find_projection(traffic[layer], call.output),
            inputs.keys[layer],
            inputs.sine_first[layer],
        )
    return _with_rotations(model, tokens, probed, sight, inputs, limit)


def _check_layers(name: str, found: list[int], expected: list[int] | None) -> None:
    if not found:
        raise KvtoolError(
            "model-unsupported",
            f"{name} does not run its attention through the attention interface: nothing can be recorded",
            "models without attention (Mamba) and those with an attention of their own (Falcon, Bloom) are not served",
        )
    if expected is not None and found != expected:
        raise KvtoolError(
            "model-unsupported",
            f"{name} should attend in layers {spans(expected)}, but layers {spans(found)} were recorded",
        )


def _geometry(name: str, call: AttentionCall, config: Any, calls: dict[int, AttentionCall]) -> Geometry:
    (heads, _, dim), kv_heads, value_dim = call.queries.shape, call.keys.shape[0], call.values.shape[-1]
    if heads % kv_heads:
        raise KvtoolError(
            "model-unsupported", f"{name}: {heads} query heads cannot share {kv_heads} KV heads in layer {call.layer}"
        )
    kind, window = window_of(call, config)
    donors = [
        layer
        for layer in sorted(calls)
        if layer < call.layer
        and torch.equal(calls[layer].keys, call.keys)
        and torch.equal(calls[layer].values, call.values)
    ]
    return Geometry(
        layer=call.layer,
        query_heads=heads,
        kv_heads=kv_heads,
        key_dim=dim,
        value_dim=value_dim,
        scale=call.scale,
        softcap=softcap(call),
        kind=kind,
        window=window,
        sink_logits=sink_logits(call),
        kv_source=donors[0] if donors else None,
    )


def _check_output(name: str, geometry: Geometry, call: AttentionCall) -> None:
    """Refuse a layer whose output is not what scale, softcap, sinks and a causal window explain."""
    narrow = call.output.dtype != torch.float32
    if not bool(torch.isfinite(call.output).all()):
        raise KvtoolError(
            "model-load", f"{name} computes NaN or infinity in layer {geometry.layer}: its weights are broken"
        )
    if call.extras.get("position_bias") is None:
        check_mask(geometry, call, 0)
        error = relative_error(call.output.transpose(0, 1), attend(geometry, call.queries, call.keys, call.values))
        if error <= BOUNDS[call.output.dtype]:
            return
    raise KvtoolError(
        "model-unsupported",
        f"{name} uses a mask or bias in layer {geometry.layer} that kvtool cannot represent",
        "its attention output does not follow from queries, keys and values by causal attention"
        + ("; eager attention rounds logits to 16 bits, so try --model-dtype float32 first" if narrow else ""),
    )


def _with_rotations(
    model: Any, tokens: Tensor, probed: dict[int, Probed], sight: _Sight, inputs: ModuleInputs, limit: int | None
) -> dict[int, Probed]:
    """The same layers with `geometry.rotation` found; None stays where it could not be."""
    n = tokens.shape[1]
    shift = _SHIFT if limit is None else min(_SHIFT, limit - n)
    if "position_ids" not in inspect.signature(model.forward).parameters or shift < 1:
        return probed
    shifted = _Sight()
    modules = {layer: entry.module for layer, entry in probed.items()}
    positions = torch.arange(n)
    with observed(model, shifted), inputs.given_again(modules):
        model(input_ids=tokens, position_ids=(positions + shift)[None], use_cache=True)
    candidates, scalings = frequency_candidates(model, model.config), scaling_candidates(model)
    done = {}
    for layer, entry in probed.items():
        before, after = sight.calls[layer], shifted.calls[layer]
        pair = [before.queries], [after.queries]
        if entry.geometry.kv_source is None:
            pair[0].append(before.keys)
            pair[1].append(after.keys)
        rotation = find_rotation(
            torch.cat(pair[0]),
            torch.cat(pair[1]),
            positions,
            shift,
            candidates,
            scalings,
            inputs.tables[layer],
            before.queries.dtype,
        )
        done[layer] = replace(entry, geometry=replace(entry.geometry, rotation=rotation))
    return done
