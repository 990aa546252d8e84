"""The Python API: functions stay functions however and in whatever order they are reached."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TINY = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"
CALL = f"('{TINY}', ['knorm'], ratios=['0.5'], layers=[0])"


@pytest.mark.parametrize(
    "code",
    [
        f"import kvtool; kvtool.replay{CALL}; kvtool.replay{CALL}",
        f"from kvtool import replay; replay{CALL}; replay{CALL}",
        f"import kvtool; print(kvtool.replay); kvtool.replay{CALL}",
        f"import kvtool.replay, kvtool; kvtool.replay{CALL}",
        f"import kvtool.testing, kvtool; kvtool.replay{CALL}",
        f"from kvtool.replay import replay; replay{CALL}",
        "import kvtool; assert callable(kvtool.capture) and callable(kvtool.capture) and callable(kvtool.live)",
        "from kvtool import capture, live, open_trace, Result; assert callable(capture) and callable(live)",
        "import kvtool.synth.scene, kvtool; assert callable(kvtool.synth)",
        "import kvtool.capture.request, kvtool; assert callable(kvtool.capture)",
        "import kvtool.check.judge, kvtool; assert callable(kvtool.check)",
        "import kvtool.bench.goals, kvtool; assert callable(kvtool.bench)",
    ],
)
def test_every_way_in_calls_the_function(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_dir_lists_the_doors_and_nothing_else() -> None:
    import kvtool

    assert [name for name in dir(kvtool) if not name.startswith("_")] == sorted(
        [
            *("Diff", "KvtoolError", "Result", "ablate", "bench", "capture", "check", "diff"),
            *("live", "open_trace", "replay", "synth"),
        ]
    )
