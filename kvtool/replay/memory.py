"""Memory: stub to be measured."""

from __future__ import annotations

from typing import Any


def stated_memory(plan: Any, work: Any, workers: int) -> str:
    return ""
