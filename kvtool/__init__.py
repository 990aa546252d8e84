"""kvtool: offline KV-trace analysis. The Python API says the same words as the command line.

Everything is imported on first use: `import kvtool` itself loads neither torch nor zarr.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtool.ablate import ablate as ablate
    from kvtool.bench import bench as bench
    from kvtool.capture import capture as capture
    from kvtool.check import check as check
    from kvtool.compare import Diff as Diff
    from kvtool.compare import diff as diff
    from kvtool.errors import KvtoolError as KvtoolError
    from kvtool.live import live as live
    from kvtool.replay import replay as replay
    from kvtool.result import Result as Result
    from kvtool.synth import synth as synth
    from kvtool.trace import open_trace as open_trace

__version__ = "0.1.0"

_HOMES = {
    "Diff": "kvtool.compare",
    "KvtoolError": "kvtool.errors",
    "Result": "kvtool.result",
    "ablate": "kvtool.ablate",
    "bench": "kvtool.bench",
    "capture": "kvtool.capture",
    "check": "kvtool.check",
    "diff": "kvtool.compare",
    "live": "kvtool.live",
    "open_trace": "kvtool.trace",
    "replay": "kvtool.replay",
    "synth": "kvtool.synth",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvtool' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_HOMES, *(name for name in globals() if name.startswith("__"))])
