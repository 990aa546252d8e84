"""The package under docs/example_package, really installed by pip: its own tests pass, and its names can be used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "docs" / "example_package"
TINY = ROOT / "sample_traces" / "tiny-gqa.zarr"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip installed it into; the sources are copied, since building leaves files beside them."""
    place = tmp_path_factory.mktemp("example")
    shutil.copytree(SOURCE, place / "source", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-build-isolation", "--no-deps"]
    done = subprocess.run([*command, "--target", place / "site", place / "source"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return place / "site"


def kvtool(site: Path, *words: str, code: int = 0) -> str:
    """What a command says where the package is installed."""
    path = os.pathsep.join(str(p) for p in (site, ROOT, os.environ.get("PYTHONPATH")) if p)
    program = "from kvtool.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *words], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_its_own_tests_pass(installed: Path) -> None:
    path = os.pathsep.join(str(p) for p in (installed, ROOT))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-c",
        os.devnull,
    ]
    done = subprocess.run(
        [*command, "--import-mode=importlib", SOURCE / "tests"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


def test_its_names_are_listed_and_used(installed: Path) -> None:
    listed = {p["name"]: p for p in json.loads(kvtool(installed, "policies", "--json"))["policies"]}
    assert listed["novel-keys"]["from"] == "kvtool-example 0.1.0"
    assert listed["novel-keys"]["fault"] is None
    assert listed["snapkv"]["from"] == "kvtool 0.1.0"
    words = ["replay", str(TINY), "-p", "novel-keys:memory=2", "-r", "0.5", "--layers", "0"]
    document = json.loads(kvtool(installed, *words, "--metric", "tail_error", "--json"))
    assert document["manifest"]["metrics"]["tail_error"] == 1
    assert document["manifest"]["replay"]["metrics"][0]["package"] == {"name": "kvtool-example", "version": "0.1.0"}
    packages = {p["label"]: p["package"]["name"] for p in document["manifest"]["replay"]["policies"]}
    assert packages["novel-keys:memory=2"] == "kvtool-example"
    rows = [row for row in document["rows"] if row["policy"] == "novel-keys:memory=2" and row["sequence"] == 0]
    cell = next(c for c in document["cells"] if c["policy"] == "novel-keys:memory=2" and c["sequence"] == 0)
    # of 32 evaluated steps the worst 5 % are two: at least the 95th percentile, at most the worst
    assert rows
    for row in rows:
        assert row["output_error_p95"] <= row["tail_error"] <= row["output_error_max"]
    assert cell["mean_tail_error"] == pytest.approx(sum(r["tail_error"] for r in rows) / len(rows), rel=1e-12)
    assert "mean_tail_error" in kvtool(installed, *words, "--metric", "tail_error:share=0.5")


def test_without_plug_ins_its_names_are_unknown(installed: Path) -> None:
    words = ["replay", str(TINY), "-p", "novel-keys", "-r", "0.5"]
    assert "[policy-unknown]" in kvtool(installed, "--no-plugins", *words, code=2)
    assert "novel-keys" not in kvtool(installed, "--no-plugins", "policies")
