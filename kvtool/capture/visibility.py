"""Which keys a step sees: a layer's window from what it received, held against the mask it was given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvtool.capture.hook import AttentionCall
from kvtool.errors import KvtoolError
from kvtool.layer import Geometry, Kind

# Layer types whose attention module is expected to call the attention function.
_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding"}


def expected_layers(config: Any) -> list[int] | None:
    """Ids of the layers that attend, from the configuration; None where it does not say."""
    text = config.get_text_config()
    types = getattr(text, "layer_types", None)
    count = getattr(text, "num_hidden_layers", None)
    if types is not None:
        return [index for index, kind in enumerate(types) if kind in _ATTENDING]
    return None if count is None else list(range(count))


def window_of(call: AttentionCall, config: Any) -> tuple[Kind, int | None]:
    """Kind and size of a layer's window, from the call and else from the configuration.

    Whether it is true is decided by `check_mask` and by the recomputed output.
    """
    text = config.get_text_config()
    types = getattr(text, "layer_types", None)
    kind = types[call.layer] if types is not None and call.layer < len(types) else None
    if kind == "chunked_attention":
        return "chunked", int(text.attention_chunk_size)
    window = call.extras.get("sliding_window")
    if window is None and kind in ("sliding_attention", "hybrid_sliding"):
        window = getattr(text, "sliding_window", None)
    return ("full", None) if window is None else ("sliding", int(window))


def visible(geometry: Geometry, steps: Tensor, rows: Tensor) -> Tensor:
    """bool [n, Tk]: whether the query of steps[a] sees the key of rows[b]."""
    return (rows[None, :] <= steps[:, None]) & (rows[None, :] >= geometry.first_visible(steps)[:, None])


def check_mask(geometry: Geometry, call: AttentionCall, start: int) -> None:
    """Hold the mask of a call against causality and the layer's window.

    Args:
        start: step of the call's first query.

    Raises:
        KvtoolError: code `model-unsupported`: another mask, or a bias inside the mask.
    """
    n, columns = call.queries.shape[1], call.keys.shape[1]
    stop = start + n
    steps = torch.arange(start, stop)
    rows = torch.arange(stop - columns, stop)
    oldest = geometry.first_visible(steps)  # [n]
    if int(oldest[0]) < stop - columns:
        raise _mismatch(geometry)  # a key that the step should see is not there
    if call.mask is None:
        # Without a mask one query sees all columns, and several are plain causal over as many keys.
        if int(oldest[-1]) > stop - columns or (n > 1 and columns != n):
            raise _mismatch(geometry)
        return
    mask = call.mask[..., :columns]  # [., n, Tk]
    seen = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and bool((mask[~seen] > torch.finfo(mask.dtype).min / 2).any()):
        raise KvtoolError(
            "model-unsupported",
            f"layer {geometry.layer} adds a bias to its attention logits that kvtool cannot represent",
            "only causal, sliding and chunked masks, softcap and sink logits can be replayed",
        )
    if not bool((seen == visible(geometry, steps, rows)).all()):
        raise _mismatch(geometry)


def _mismatch(geometry: Geometry) -> KvtoolError:
    window = "causal" if geometry.window is None else f"{geometry.kind} with {geometry.window} tokens"
    return KvtoolError(
        "model-unsupported",
        f"layer {geometry.layer} should be {window}, but the mask it received is another: kvtool cannot represent it",
    )
