"""Run the model: feed tokens through its cache, pick the next one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtool.errors import KvtoolError


@dataclass(frozen=True)
class Decoding:
    """How the next token is picked: greedy at temperature 0, else drawn.

    Attributes:
        temperature: divides the logits.
        top_k, top_p: candidates are cut to the k likeliest, then to the smallest set of mass p.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def pick(self, logits: Tensor, generator: torch.Generator) -> int:
        """The next token from logits [V]."""
        if not self.temperature:
            return int(logits.argmax())
        logits = logits.to(torch.float32).cpu() / self.temperature
        order = logits.sort(descending=True, stable=True)
        probabilities = order.values[: self.top_k].softmax(-1)
        if self.top_p is not None:
            # The token that crosses p still belongs to the set.
            probabilities = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities >= self.top_p, 0.0)
        return int(order.indices[int(torch.multinomial(probabilities, 1, generator=generator))])


class Feed:
    """One sequence of a model: a growing cache, fed in chunks.

    Args:
        model: a causal language model in evaluation mode.
        chunk: most tokens of one forward, or None for no limit.
        later: the same once the cache holds tokens.
        around: context manager put around each forward, given its number of tokens.
        progress: called with the number of tokens after each forward.
    """

    def __init__(
        self,
        model: Any,
        *,
        chunk: int | None = None,
        later: int | None = None,
        around: Callable[[int], AbstractContextManager[None]] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._model, self._chunk, self._later = model, chunk, later
        self._around = around or (lambda n: nullcontext())
        self._progress = progress or (lambda n: None)
        names = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in ("cache", "past_key_values") if name in names), None)
        # Logits of a long prompt are larger than everything else, and only the last row matters.
        self._options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in names:
            self._options["logits_to_keep"] = 1
        self._cache: Any = None
        self.length = 0

    def push(self, tokens: list[int]) -> Tensor:
        """Run `tokens`; returns the logits [V] behind the last of them."""
        *_, last = self._forwards(tokens, 1)
        return last[-1]

    def logits(self, tokens: list[int]) -> Tensor:
        """Run `tokens`; returns the logits [n, V] behind every one of them."""
        return torch.cat(list(self._forwards(tokens, None)))

    @torch.enable_grad()
    def graph(self, tokens: list[int], keep: int) -> Tensor:
        """Run `tokens` in one forward whose graph is kept, the cache's new rows included.

        Returns:
            The last `keep` logits [keep, V], to differentiate.
        """
        return self._forward(tokens, keep)

    def fork(self, around: Callable[[int], AbstractContextManager[None]] | None = None) -> Feed:
        """The same sequence up to here with a cache of its own and `around` its forwards; it reports no progress."""
        other = copy.copy(self)
        other._progress = lambda n: None
        other._cache = copy.deepcopy(self._cache)
        other._around = around or (lambda n: nullcontext())
        return other

    @torch.no_grad()
    def _forwards(self, tokens: list[int], keep: int | None) -> Iterator[Tensor]:
        """The last `keep` logits of each forward, all for None."""
        start = 0
        while start < len(tokens):
            limits = [self._chunk, self._later if self._cache is not None else None]
            part = tokens[start : start + min((n for n in limits if n), default=len(tokens))]
            yield self._forward(part, keep or len(part))
            start += len(part)

    def _forward(self, tokens: list[int], keep: int) -> Tensor:
        cache = {} if self._cache is None or self._cache_name is None else {self._cache_name: self._cache}
        options = dict(self._options)
        if "logits_to_keep" in options:
            options["logits_to_keep"] = keep
        with self._around(len(tokens)):
            try:
                output = self._model(input_ids=torch.tensor([tokens]), **cache, **options)
            except KvtoolError:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                raise KvtoolError(
                    "model-unsupported",
                    f"{type(self._model).__name__} fails on {len(tokens)} tokens behind {self.length}: {reason}",
                    "the fault lies in the model or in its implementation",
                ) from error
        self._cache = output.get("cache", output.get("past_key_values"))
        self.length += len(tokens)
        self._progress(len(tokens))
        logits: Tensor = output.logits[0, -keep:]
        return logits


def generate(
    feed: Feed, logits: Tensor, new_tokens: int, stop: frozenset[int], decoding: Decoding, seed: int
) -> Iterator[int]:
    """Yield each new token once its keys and values are computed; `logits` [V] are those behind the prompt.

    The last token is fed like the others and its logits discarded, so that every yielded token
    is in the cache. A token of `stop` is fed, yielded and ends the run.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(new_tokens):
        token = decoding.pick(logits, generator)
        logits = feed.push([token])
        yield token
        if token in stop:
            return
