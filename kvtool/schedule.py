"""Schedule: when eviction runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvtool.errors import KvtoolError


class Schedule(Protocol):
    """Names the steps before whose query an event runs."""

    def events(self, prompt_length: int, tokens: int) -> list[int]: ...


@dataclass(frozen=True)
class PromptEnd:
    """One event, before query `prompt_length`, or before query `at`."""

    at: int | None = None

    def events(self, prompt_length: int, tokens: int) -> list[int]:
        """The event steps of a sequence of `tokens` rows.

        Raises:
            KvtoolError: `usage` for an event before any token, `no-queries` at or past the end.
        """
        step = prompt_length if self.at is None else self.at
        if step < 1:
            raise KvtoolError("usage", f"an event at step {step} has no token to evict", "--evict-at is at least 1")
        if step >= tokens:
            raise KvtoolError(
                "no-queries",
                f"the event at step {step} has no query after it: the sequence has {tokens} tokens",
                "choose an earlier --evict-at, or capture with --max-new-tokens or --eval-tokens",
            )
        return [step]

    def __str__(self) -> str:
        return "prompt-end" if self.at is None else f"at:{self.at}"
