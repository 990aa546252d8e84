"""Every construction, written once per seed for all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
import torch

from kvtool.layer import Layer
from kvtool.replay import replay
from kvtool.result import Result
from kvtool.synth import synth
from kvtool.trace import Trace, open_trace


@pytest.fixture(params=[0, 1, 2])
def seed(request: pytest.FixtureRequest) -> int:
    """What must hold holds whatever the noise."""
    return int(request.param)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Trace]:
    """name, seed -> the trace of default size."""
    folder = tmp_path_factory.mktemp("synth")

    def get(name: str, seed: int) -> Trace:
        path: Path = folder / f"{name}-{seed}.zarr"
        return open_trace(path) if path.exists() else synth(name, path, seed=seed)

    return get


class Found:
    """What a replay says of each policy, over all layers and heads."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def error(self, policy: str) -> float:
        """mean_layer_error."""
        (cell,) = (
            c
            for c in self.result.entries("cells")
            if c["policy"] == policy and c["sequence"] is None and c["event"] is None
        )
        return float(cell["mean_layer_error"])

    def mass(self, policy: str) -> float:
        """Mean evicted mass over heads."""
        rows = [r for r in self.result.entries("rows") if r["policy"] == policy and r["event"] is None]
        return fmean(r["evicted_mass"] for r in rows)

    def kept(self, policy: str, landmark: str) -> float:
        """Share of the landmark's rows that are there at the end."""
        found = [e for e in self.result.entries("landmarks") if (e["policy"], e["landmark"]) == (policy, landmark)]
        return sum(e["kept"] for e in found) / sum(e["rows"] for e in found)


def _look(
    trace: Trace, *policies: str, ratio: str = "0.75", sinks: int = 4, window: int = 32, prefix: int = 0
) -> Found:
    """Evict at the end of the prompt."""
    return Found(replay(trace, policies, ratios=[ratio], sinks=sinks, window=window, prefix=prefix))


def _weights(layer: Layer, head: int, step: int) -> list[float]:
    """Attention of one query, one number at a time in float64."""
    geometry = layer.geometry
    query = layer.queries[head, step].tolist()
    keys = layer.keys[head // geometry.group, : step + 1].tolist()
    logits = [geometry.scale * sum(x * y for x, y in zip(query, key, strict=True)) for key in keys]
    highest = max(logits)
    powers = [2.718281828459045 ** (z - highest) for z in logits]
    total = sum(powers)
    return [p / total for p in powers]


@pytest.fixture
def look() -> Callable[..., Found]:
    """trace, policies, ratio, sinks, window, prefix -> what a replay found."""
    return _look


@pytest.fixture
def weights() -> Callable[[Layer, int, int], list[float]]:
    """layer, query head, step -> attention by a plain loop."""
    return _weights
