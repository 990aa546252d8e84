"""Planted regressions: a policy edited between two runs, and what `kvtool diff` says of the two results.

What really moved is computed here from the evict steps of both results, by plain comparison.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtool.cli.main import run
from kvtool.replay import replay
from kvtool.result import Result

TRACE = Path(__file__).resolve().parents[2] / "sample_traces" / "smollm2.zarr"
POLICY = '''
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.policies import Policy
from kvtool.view import View


@dataclass(frozen=True)
class Votes(Policy):
    """Mean attention of the newest queries, each token as loud as its loudest neighbour.

    Not from a paper: a test. Cost: O(H·window·N·D).
    """

    window: int = 24
    width: int = 1

    needs: ClassVar[tuple[str, ...]] = ("recent-queries",)

    def queries_back(self, step: int) -> int:
        return min(self.window, step)

    def score(self, state: None, view: View) -> Tensor:
        window = min(self.window, view.step)
        geometry = view.geometry
        queries = view.queries(view.step - window, view.step).unflatten(0, (geometry.kv_heads, -1))  # [Hk, G, w, D]
        logits = geometry.scale * torch.einsum("hgwd,hnd->hgwn", queries, view.keys)
        steps = torch.arange(view.step - window, view.step)
        logits = logits.masked_fill(view.tokens[:, None, None] > steps[:, None], -torch.inf)
        votes = logits.softmax(-1).mean((1, 2))  # [Hk, N]
        scores = functional.max_pool1d(votes[:, None], self.width, 1, self.width // 2)[:, 0]
        return scores
'''
EDITS = {
    "sound": ("", ""),
    "sign flipped": ("return scores", "return -scores"),
    "sign flipped in layer 15": ("return scores", "return -scores if geometry.layer == 15 else scores"),
    "window off by one": ("        window = min(self.window,", "        window = min(self.window - 1,"),
    "scores cast to bfloat16": ("return scores", "return scores.bfloat16().float()"),
    "sum in another order": (".mean((1, 2))", ".flip(2).sum(2).mean(1) / window"),
    "scores with noise of 1e-7": (
        "return scores",
        "return scores * (1 + 1e-7 * torch.sin(7 * torch.arange(scores.shape[1])))",
    ),
}
Head = tuple[float, int, int, int]  # ratio, sequence, layer, KV head


class Outcome(NamedTuple):
    """What one run of `kvtool diff A B --json` gave."""

    code: int
    document: dict
    heads: dict[Head, tuple[list[int], list[int]]]  # evict steps of both sides

    @property
    def moved(self) -> dict[Head, tuple[list[int], list[int]]]:
        return {head: (a, b) for head, (a, b) in self.heads.items() if a != b}


def evict_steps(result: Result) -> dict[Head, list[int]]:
    return {
        (row["ratio"], row["sequence"], row["layer"], row["kv_head"]): row["evict_step"]
        for row in result.entries("evict_steps")
        if row["policy"].endswith("Votes") or ":Votes:" in row["policy"]
    }


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`kvtool diff` in this process: exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(["diff", *arguments])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """The folder of a run after an edit, each replayed once; the policy's file keeps its name."""
    folder = tmp_path_factory.mktemp("planted")
    done: dict[str, Result] = {}

    def replayed(edit: str, width: int = 1, precision: str = "float32") -> tuple[Path, Result]:
        name = f"{edit.replace(' ', '-')}-{width}-{precision}"
        if name not in done:
            old, new = EDITS[edit]
            assert not old or POLICY.count(old) == 1
            (folder / "mine.py").write_text(POLICY.replace(old, new) if old else POLICY)
            spec = f"{folder / 'mine.py'}:Votes" + (f":width={width}" if width > 1 else "")
            done[name] = replay(TRACE, [spec], ratios=["0.5", "0.9"], precision=precision, output=folder / name)
        return folder / name, done[name]

    return replayed


@pytest.fixture(scope="module")
def outcome(runs):
    @functools.cache
    def compare(edit: str, width: int = 1, precision: str = "float32", options: tuple[str, ...] = ()) -> Outcome:
        (a, sound), (b, edited) = runs("sound", width), runs(edit, width, precision)
        ran = command(a.name, b.name, "--json", "--tokens", "3", *options, folder=a.parent)
        assert ran.returncode in (0, 1), ran.stderr
        left, right = evict_steps(sound), evict_steps(edited)
        assert left.keys() == right.keys()
        return Outcome(ran.returncode, json.loads(ran.stdout), {head: (left[head], right[head]) for head in left})

    return compare


REGRESSIONS = [
    "sign flipped",
    "sign flipped in layer 15",
    "window off by one",
    "scores cast to bfloat16",
]


@pytest.mark.parametrize("edit", REGRESSIONS)
def test_a_planted_regression_is_named_with_its_layers_and_tokens(edit: str, outcome):
    found = outcome(edit)
    assert found.moved, "the edit should change decisions"
    assert found.document["kind"] == "behaviour"
    (setting,) = [entry["name"] for entry in found.document["settings"] if entry["decides"]]
    assert setting.endswith("mine.py:Votes].source")
    by_ratio = defaultdict(dict)
    for head, sides in found.moved.items():
        by_ratio[head[0]][head] = sides
    groups = {group["ratio"]: group for group in found.document["groups"]}
    assert by_ratio.keys() == {ratio for ratio, group in groups.items() if group["kept"]}
    for ratio in by_ratio:
        group = groups[ratio]
        moved = {head[2] for head in by_ratio[ratio]}
        assert {entry["layer"] for entry in group["kept"]["by_layer"] if entry["moved_tokens"]} == moved
        kinds = {entry["layer"]: entry["kind"] for entry in group["layers"]}
        assert {layer for layer, kind in kinds.items() if kind == "behaviour"} <= moved
        assert {kinds[layer] for layer in moved} <= {
            "behaviour",
            "numerics",
        }  # numerics: rounding decides
        if edit != "scores cast to bfloat16":
            assert {layer for layer, kind in kinds.items() if kind != "identical"} == moved
        first = min(by_ratio[ratio])
        a, b = by_ratio[ratio][first]
        row = next(row for row in range(len(a)) if b[row] < a[row])
        assert group["first"].startswith(
            f"sequence {first[1]}, layer {first[2]}, KV head {first[3]} loses token {row} "
        )
        assert group["kept"]["heads_moved"] == len(by_ratio[ratio])
        told = [(token, True) for token in group["tokens"]["lost"]]
        told += [(token, False) for token in group["tokens"]["gained"]]
        assert told
        for token, lost in told:
            row = token["token"]
            heads = [
                head
                for head, (a, b) in by_ratio[ratio].items()
                if head[1] == token["sequence"] and (b[row] < a[row] if lost else a[row] < b[row])
            ]
            assert token["heads"] == len(heads)
            assert token["layers"] == sorted({head[2] for head in heads})
            assert token["text"]
    worse = any(entry["verdict"] == "worse" for group in groups.values() for entry in group["metrics"])
    assert found.document["worse"] == worse
    assert found.code == int(worse)


@pytest.mark.parametrize("edit", ["sign flipped", "sign flipped in layer 15", "window off by one"])
def test_a_regression_that_costs_exits_1(edit: str, outcome):
    found = outcome(edit)
    assert found.code == 1
    assert found.document["worse"]


def test_a_flip_in_one_layer_is_found_in_that_layer_alone(outcome):
    found = outcome("sign flipped in layer 15")
    for group in found.document["groups"]:
        assert [entry["layer"] for entry in group["layers"] if entry["kind"] != "identical"] == [15]
        assert {entry["layer"] for entry in group["worst_heads"] if entry["difference"]} == {15}


@pytest.mark.parametrize("edit", REGRESSIONS)
def test_the_terminal_names_kind_layers_and_first_token(edit: str, runs, outcome):
    found = outcome(edit)
    (a, _), (b, _) = runs("sound"), runs(edit)
    ran = command(a.name, b.name, folder=a.parent)
    assert ran.returncode == found.code
    text = " ".join(ran.stdout.split())
    first = min(found.moved)
    layers = sorted(
        {
            entry["layer"]
            for group in found.document["groups"]
            for entry in group["layers"]
            if entry["kind"] == "behaviour"
        }
    )
    spelled = ", ".join(str(layer) for layer in layers)
    told = found.document["kept_sets"]["of"]
    assert told >= sum(group["kept"]["heads"] for group in found.document["groups"] if group["kept"])
    assert f"Behaviour: B keeps other tokens than A in {len(found.moved)} of {told} kept sets" in text
    assert f"layer{'s' * (len(layers) != 1)} {spelled}; first: " in text
    lost = sum(b < a for a, b in zip(*found.moved[first], strict=True))
    assert lost > 0
    assert ("B is worse" in text) == (found.code == 1)
    assert ran.stderr.rstrip().splitlines()[-1].startswith("next: kvtool diff ")


def test_ties_that_fall_otherwise_are_numerics(outcome, runs):
    """Neighbours share one score where the loudest of five counts; noise decides between them."""
    found = outcome("scores with noise of 1e-7", 5, options=("--relative", "0.05"))
    assert found.moved, "the noise should break some tie otherwise"
    assert found.document["kind"] == "numerics"
    assert found.document["ties"] == len(found.moved)
    assert {group["kind"] for group in found.document["groups"]} == {"numerics"}
    assert found.code == 0
    (a, _), (b, _) = runs("sound", 5), runs("scores with noise of 1e-7", 5)
    ran = command(a.name, b.name, "--relative", "0.05", folder=a.parent)
    text = " ".join(ran.stdout.split())
    assert ran.returncode == 0
    assert f"Numerics only: B keeps other tokens than A where rounding decides ({len(found.moved)} kept sets)" in text
    assert "within the tolerance (relative 0.05" in text


@pytest.mark.parametrize("edit", ["sum in another order", "scores with noise of 1e-7"])
def test_rounding_that_moves_no_decision_is_no_finding(edit: str, outcome):
    found = outcome(edit)
    assert not found.moved
    assert found.code == 0
    assert found.document["kind"] in ("identical", "numerics")


def test_other_precision_is_numerics(outcome, runs):
    found = outcome("sound", precision="float64")
    assert not found.moved
    assert found.code == 0
    assert found.document["kind"] == "numerics"
    assert "replay.precision" in [entry["name"] for entry in found.document["settings"] if entry["decides"]]
    (a, _), (b, _) = runs("sound"), runs("sound", precision="float64")
    ran = command(a.name, b.name, folder=a.parent)
    assert ran.returncode == 0
    assert "Numerics only: B keeps the same tokens as A, and only numbers moved." in " ".join(ran.stdout.split())
    assert "B is worse" not in ran.stdout


def test_a_result_against_itself_takes_one_line(runs):
    folder, _ = runs("sound")
    ran = command(folder.name, folder.name, folder=folder.parent)
    assert ran.returncode == 0
    assert len(ran.stdout.splitlines()) == 1
    assert ran.stdout.startswith("no difference: ")


def test_a_process_of_its_own_exits_the_same(runs, outcome):
    (a, _), (b, _) = runs("sound"), runs("sign flipped in layer 15")
    program = [
        sys.executable,
        "-c",
        "from kvtool.cli.main import main; main()",
        "diff",
        a.name,
        b.name,
        "--tokens",
        "0",
    ]
    ran = subprocess.run(program, cwd=a.parent, capture_output=True, text=True, timeout=300)
    assert ran.returncode == outcome("sign flipped in layer 15").code == 1
    assert "B is worse" in ran.stdout
