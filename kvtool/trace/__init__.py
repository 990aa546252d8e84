"""Floor 2: trace format 1, written so that it is whole or absent and read without trusting it."""

from kvtool.trace.reader import Sequence, Trace, open_trace
from kvtool.trace.writer import SequenceWriter, TraceWriter

__all__ = ["Sequence", "SequenceWriter", "Trace", "TraceWriter", "open_trace"]
