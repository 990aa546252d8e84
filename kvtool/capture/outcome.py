"""Outcome: what a capture did, for people and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.layer import Gradients
from kvtool.trace.gradients import drawn, gradient_attributes
from kvtool.words import size, spans


@dataclass(frozen=True)
class SequenceOutcome:
    """One captured sequence.

    Attributes:
        name: its id, or None.
        prompt_tokens, tokens: rows of the prompt and in all.
        stopped: why generation ended, `end-of-text` or `length`; None under teacher forcing.
        text: what was generated, or None.
        gradients: how gradients were drawn, or None.
    """

    name: str | None
    prompt_tokens: int
    tokens: int
    stopped: str | None
    text: str | None
    gradients: Gradients | None = None


@dataclass(frozen=True)
class Outcome:
    """A published trace.

    Attributes:
        path, digest, disk_bytes: of the trace.
        layers: ids of the stored layers.
        error, bound: worst relative error of the attention output recomputed in float64, and what it may be.
        run_dtype, stored_dtype: names.
    """

    path: Path
    digest: str
    disk_bytes: int
    layers: list[int]
    sequences: list[SequenceOutcome]
    error: float
    bound: float
    run_dtype: str
    stored_dtype: str

    def document(self) -> dict[str, Any]:
        """As JSON, schema kvtool.capture/1."""
        return {
            "schema": "kvtool.capture/1",
            "path": str(self.path),
            "digest": self.digest,
            "disk_bytes": self.disk_bytes,
            "layers": self.layers,
            "run_dtype": self.run_dtype,
            "stored_dtype": self.stored_dtype,
            "recomputed_error": self.error,
            "recomputed_bound": self.bound,
            "sequences": [
                {
                    "id": s.name,
                    "prompt_tokens": s.prompt_tokens,
                    "tokens": s.tokens,
                    "stopped": s.stopped,
                    "text": s.text,
                    "gradients": None if s.gradients is None else gradient_attributes(s.gradients),
                }
                for s in self.sequences
            ],
        }

    def text(self) -> str:
        """A few lines for people."""
        lines = [
            f"{self.path}  {size(self.disk_bytes)}, layers {spans(self.layers)} stored as {self.stored_dtype}, "
            f"digest {self.digest[:12]}"
        ]
        for index, s in enumerate(self.sequences):
            after = s.tokens - s.prompt_tokens
            how = "evaluated" if s.stopped is None else f"generated, stopped by {s.stopped}"
            lines.append(f"  {s.name or index}: {s.prompt_tokens:,} tokens of prompt + {after:,} {how}")
            if s.gradients is not None:
                lines.append(f"    gradients: {drawn(gradient_attributes(s.gradients))}")
            if s.text is not None:
                # A model may generate anything, terminal control characters included.
                shown = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(s.text.split()))
                lines.append(f"    {shown if len(shown) <= 200 else shown[:197] + '...'}")
        return "\n".join(lines)

    def check_line(self) -> str:
        """The figure of the recomputation with its bound."""
        return (
            f"attention recomputed in float64 agrees with the model's to {self.error:.2g} "
            f"(bound {self.bound:g}: {self.run_dtype} run stored as {self.stored_dtype})"
        )
