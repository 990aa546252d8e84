"""Feeding: how many tokens a model takes at once when its cache already holds some."""

from __future__ import annotations

from typing import Any

import torch

from kvtool.capture.generation import Feed
from kvtool.errors import KvtoolError

TOKENS = 24
# Relative distance of logits, one forward against two, of ordinary rounding, and from where on a state is lost.
BOUNDS = {torch.float32: (5e-5, 1e-2), torch.float16: (1e-2, 0.2), torch.bfloat16: (5e-2, 0.5)}


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

    def error(later: int | None) -> float:
        feed = Feed(model, later=later)
        feed.push(tokens[: count // 2])
        return float((feed.push(tokens[count // 2 :]) - whole).norm() / whole.norm())

    block, single = error(None), error(1)
    rounding, lost = BOUNDS.get(whole.dtype, BOUNDS[torch.float32])
    # Chunked recurrences round differently from stepwise ones: a block is as good as single tokens are.
    if block <= max(rounding, 10 * single) and block <= lost:
        return None
    if single <= lost:
        return 1
    raise KvtoolError(
        "model-unsupported",
        f"{type(model).__name__} does not continue a sequence from its own cache: the logits move by {single:.2g}",
        "its implementation in this version of transformers is at fault",
    )
