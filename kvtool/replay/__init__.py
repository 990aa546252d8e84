"""Replay: run policies on a trace and measure what eviction does. Never imports transformers."""

from kvtool.replay.run import replay

__all__ = ["replay"]
