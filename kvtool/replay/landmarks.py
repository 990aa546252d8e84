"""What the table `landmarks` says of a sequence beside its rows."""

from __future__ import annotations

from typing import Any

from kvtool.trace import Sequence


def about(sequence: Sequence) -> dict[str, Any]:
    """`synthetic` (the construction's name), `depth` and `prompt_length`; the first two None for a model's run."""
    synthetic = sequence.synthetic or {}
    return {
        "synthetic": synthetic.get("name"),
        "depth": synthetic.get("depth"),
        "prompt_length": sequence.prompt_length,
    }
