"""Feeding: how many tokens a model takes at once when its cache already holds some."""

from __future__ import annotations

from typing import Any

import torch

from kvtool.capture.generation import Feed
from kvtool.errors import KvtoolError

TOKENS = 24
# Relative distance of logits, one forward against two: rounding is far below, a lost state far above.
BOUNDS = {torch.float32: 5e-5, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def later_tokens(model: Any, most: int | None) -> int | None:
    """Tokens that one forward may add to a cache that is not empty: None for any number, or 1.

    Some hybrid models use the saved state of their recurrent layers only when a single token
    follows; a longer block silently starts from nothing.

    Args:
        most: positions that a short run may use, or None.

    Raises:
        KvtoolError: code `model-unsupported` where not even single tokens continue a sequence.
    """
    count = TOKENS if most is None else max(min(TOKENS, most // 2), 2)
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(21)).tolist()
    whole = Feed(model).push(tokens)
    bound = BOUNDS.get(whole.dtype, 5e-5)
    for later in (None, 1):
        feed = Feed(model, later=later)
        feed.push(tokens[: count // 2])
        parted = feed.push(tokens[count // 2 :])
        if float((parted - whole).norm()) <= bound * float(whole.norm()):
            return later
    raise KvtoolError(
        "model-unsupported",
        f"{type(model).__name__} does not continue a sequence from its own cache: the logits change",
        "capture with one forward is not offered; report the architecture",
    )
