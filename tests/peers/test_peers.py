"""The scripts that compare with other packages run where those are not installed, as far as their help."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses_and_says_what_it_does(script: Path) -> None:
    assert ast.get_docstring(ast.parse(script.read_text()))
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "kvpress" in done.stdout


def test_the_peer_is_asked_for_what_the_bench_says() -> None:
    from kvtool.bench.goals import GOALS

    source = next(path for path in SCRIPTS if path.name == "kvpress_replay.py").read_text()
    names = {node.targets[0].id: node.value for node in ast.parse(source).body if isinstance(node, ast.Assign)}
    (goal,) = (goal for goal in GOALS if goal.name == "kvpress")
    assert ast.literal_eval(names["GOAL"]) == goal.goal
    assert len(ast.literal_eval(names["PRESSES"])) == len(ast.literal_eval(names["RATIOS"])) == 5
    assert "5 presses x 5 ratios" in goal.against
