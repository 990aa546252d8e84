"""Floor 2: trace format 1, written so that it is whole or absent and read without trusting it."""

from kvtool.trace.opening import open_trace
from kvtool.trace.reader import Sequence, Trace
from kvtool.trace.sequence_writer import SequenceWriter
from kvtool.trace.writer import TraceWriter

__all__ = ["Sequence", "SequenceWriter", "Trace", "TraceWriter", "open_trace"]
