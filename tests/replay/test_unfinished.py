"""Work that a stopped run left: gone on from by the same run, never dropped unasked by another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtool.ablate import ablate
from kvtool.errors import KvtoolError
from kvtool.replay import replay
from kvtool.replay import run as run_module

TINY = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-gqa.zarr"


def stopped(out: Path, monkeypatch: pytest.MonkeyPatch, units: int, **options: Any) -> None:
    """A replay that is interrupted behind `units` units."""
    real, seen = run_module.run_unit, []

    def unit(*given: Any, **more: Any) -> Any:
        if len(seen) == units:
            raise KeyboardInterrupt
        seen.append(given[1])
        return real(*given, **more)

    with monkeypatch.context() as patched:
        patched.setattr(run_module, "run_unit", unit)
        with pytest.raises(KeyboardInterrupt):
            replay(TINY, ["h2o"], output=out, **options)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("other", [{"window": 4}, {"ratios": ["0.75"]}, {"precision": "float64"}, {"metrics": ()}])
def test_another_run_does_not_drop_it_unasked(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, options = tmp_path / "r", {"ratios": ["0.5"], "window": 8}
    stopped(out, monkeypatch, 2, **options)
    left = files(out)
    assert sum(name.endswith("part.json") for name in left) == 2
    if other == {"metrics": ()}:  # nothing differs: it goes on
        replay(TINY, ["h2o"], output=out, **options)
        assert (out / "manifest.json").is_file()
        return
    with pytest.raises(KvtoolError, match="unfinished work of a run with other options") as caught:
        replay(TINY, ["h2o"], output=out, **{**options, **other})
    assert caught.value.code == "output-exists"
    assert files(out) == left
    assert not (tmp_path / "r.lock").exists()
    replay(TINY, ["h2o"], output=out, force=True, **{**options, **other})
    assert not (out / "parts").exists()


def test_fewer_layers_of_the_same_run_go_on_with_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, options = tmp_path / "r", {"ratios": ["0.5"], "window": 8}
    stopped(out, monkeypatch, 2, **options)
    computed: list[int] = []
    real = run_module.run_unit
    monkeypatch.setattr(run_module, "run_unit", lambda *a, **k: computed.append(a[1]) or real(*a, **k))
    replay(TINY, ["h2o"], output=out, layers=[0, 5], sequences=[0], **options)
    assert computed == [5]


def test_a_run_that_finished_nothing_leaves_nothing_to_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r"
    stopped(out, monkeypatch, 0, ratios=["0.5"])
    result = replay(TINY, ["h2o"], output=out, ratios=["0.75"])
    assert {cell["ratio"] for cell in result.entries("cells")} == {0.75}


def test_neither_does_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r"
    stopped(out, monkeypatch, 2, ratios=["0.5"])
    with pytest.raises(KvtoolError, match="unfinished work of a run with other options"):
        ablate(TINY, axes="leverage", output=out, window=8, sinks=1)
    assert len(list((out / "parts").iterdir())) == 3
