"""A suite of two policies on two layers of the synthetic sample trace, in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
DIGESTS = dict(line.split() for line in (SAMPLES / "DIGESTS").read_text().splitlines())

Suite = Callable[..., Path]

HEAD = f"""
baseline = "check.json"
[traces.tiny]
path = "{SAMPLES / "tiny-gqa.zarr"}"
digest = "{DIGESTS["tiny-gqa"]}"
"""
DEFAULTS = """
[defaults]
trace = "tiny"
ratios = [0.5]
sinks = 1
window = 8
layers = [0, 3]
sequences = [0]
precision = "float64"
"""
JOB = """
[[jobs]]
name = "first"
policies = ["knorm", "snapkv:window=8"]
metrics = ["mean_layer_error", "mean_output_error"]
"""


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    """`suite(further text, jobs=…, head=…, defaults=…)` writes check.toml and returns its path."""

    def write(further: str = "", *, head: str = HEAD, defaults: str = DEFAULTS, jobs: str = JOB) -> Path:
        path = tmp_path / "check.toml"
        path.write_text(head + defaults + jobs + further)
        return path

    return write
