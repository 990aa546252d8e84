"""Fisher directions from a trace of other texts: the information by hand, what reaches the policy, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvtool.errors import KvtoolError
from kvtool.layer import Geometry, Gradients
from kvtool.replay import replay
from kvtool.replay.calibration import Calibration
from kvtool.trace import TraceWriter, open_trace

HEADS, KEY_DIM, VALUE_DIM, PROMPT, COUNT, DRAWS = 3, 4, 5, 20, 26, 2
LAYERS = (1, 4)
PLAIN = "capacity:tau=1,leverage=false"
OPTIONS = {"ratios": ["0.5"], "sinks": 0, "window": 0, "precision": "float64"}


def write(
    path: Path, seed: int, *, gradients: bool = True, heads: int = HEADS, layers: tuple[int, ...] = LAYERS
) -> Path:
    g = torch.Generator().manual_seed(seed)
    shapes = {number: Geometry(number, heads, heads, KEY_DIM, VALUE_DIM, 0.5, rotation="none") for number in layers}
    with TraceWriter(
        path, model={"name": "toy"}, tokenizer=None, capture={"run_dtype": "float32"}, dtype=torch.float32
    ) as writer:
        for index in range(2):
            sequence = writer.sequence(shapes, prompt_length=PROMPT)
            drawn = {}
            for number in layers:
                keys, values = (torch.randn(heads, COUNT, d, generator=g) for d in (KEY_DIM, VALUE_DIM))
                sequence.append(number, keys=keys, values=values)
                queries = torch.randn(heads, COUNT, KEY_DIM, generator=g)
                sequence.append(number, queries=queries, query_steps=torch.arange(COUNT))
                spread = torch.tensor([3.0, 1.0, 0.3, 0.1, 0.0])  # channels that matter and one that does not
                drawn[number] = spread * torch.randn(DRAWS, heads, COUNT - PROMPT, VALUE_DIM, generator=g)
            steps = COUNT - PROMPT
            more = {
                "gradients": Gradients(DRAWS, steps, "continuation", (PROMPT, COUNT), steps, 0),
                "gradient_steps": torch.arange(PROMPT, COUNT),
                "output_gradients": drawn,
            }
            tokens = torch.arange(COUNT) + 100 * index + 1000 * seed
            sequence.finish(tokens=tokens, positions=torch.arange(COUNT), **(more if gradients else {}))
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("calibration")
    return write(place / "run.zarr", 1, gradients=False), write(place / "other.zarr", 2)


def information(path: Path, layer: int) -> torch.Tensor:
    """[H, Dv, Dv], one gradient after the other."""
    total, count = torch.zeros(HEADS, VALUE_DIM, VALUE_DIM, dtype=torch.float64), 0
    for sequence in open_trace(path).sequences:
        found = sequence.layer(layer, torch.float64).output_gradients
        assert found is not None
        for draw in found:
            for step in range(draw.shape[1]):
                count += 1
                for head in range(HEADS):
                    total[head] += torch.outer(draw[head, step], draw[head, step])
    return total / count


def test_the_information_is_the_mean_over_draws_steps_and_sequences(paths: tuple[Path, Path]) -> None:
    calibration = Calibration.open(str(paths[1]))
    for layer in LAYERS:
        expected = information(paths[1], layer)
        assert float((calibration.information(layer) - expected).abs().max()) < 1e-12
        assert torch.linalg.matrix_rank(expected[0]) == 4


def test_each_layer_is_judged_by_its_own_information(paths: tuple[Path, Path]) -> None:
    """Without leverage a score is w |u|^2, so that of fisher is that of values times v^T Gamma v / |v|^2."""
    run, other = paths
    found = replay(run, [f"{PLAIN},directions=fisher,calibration={other}", PLAIN], **OPTIONS)
    kept = {
        (e["policy"], e["sequence"], e["layer"], e["kv_head"]): e["evict_step"] for e in found.entries("evict_steps")
    }
    from kvtool.policies import policy_from_text
    from kvtool.view import View

    _, plain = policy_from_text(PLAIN)
    label = next(policy for policy, *_ in kept if "fisher" in policy)
    differ = 0
    for sequence in open_trace(run).sequences:
        for number in LAYERS:
            view = View.at(sequence.layer(number, torch.float64), PROMPT)
            scores = plain.score(None, view)
            gamma = information(other, number)
            for head in range(HEADS):
                values = view.values[head]
                weighed = (values @ gamma[head] * values).sum(1) / values.square().sum(1)
                best = (scores[head] * weighed).argsort(descending=True)[: PROMPT // 2].tolist()
                here = kept[label, sequence.index, number, head]
                assert sorted(best) == [row for row in range(PROMPT) if here[row] > PROMPT]
                differ += here != kept[plain_label(kept), sequence.index, number, head]
    assert differ > 6


def plain_label(kept: dict) -> str:
    return next(policy for policy, *_ in kept if policy.startswith("capacity") and "fisher" not in policy)


def test_the_result_says_which_trace_it_read(paths: tuple[Path, Path]) -> None:
    run, other = paths
    found = replay(run, [f"capacity:directions=fisher,calibration={other}"], **OPTIONS)
    (entry,) = [p for p in found.manifest["replay"]["policies"] if p["label"].startswith("capacity")]
    assert entry["calibration"] == open_trace(other).digest
    assert {p["calibration"] for p in found.manifest["replay"]["policies"]} == {entry["calibration"], None}


def test_what_cannot_calibrate_is_refused(paths: tuple[Path, Path], tmp_path: Path) -> None:
    run, other = paths
    wide, few = write(tmp_path / "wide.zarr", 3, heads=4), write(tmp_path / "few.zarr", 4, layers=(1,))
    for name, sentence, code in (
        (run, "has no gradients", "trace-lacks"),
        (wide, "layer 1 has another shape in the calibration trace", "trace-lacks"),
        (few, "has no gradients of layer 4", "trace-lacks"),
        (tmp_path / "none.zarr", "none.zarr", "file-missing"),
    ):
        with pytest.raises(KvtoolError, match=sentence) as caught:
            replay(run, [f"capacity:directions=fisher,calibration={name}"], **OPTIONS)
        assert caught.value.code == code
    with pytest.raises(KvtoolError, match="holds the same prompt, and its gradients know what follows"):
        replay(other, [f"capacity:directions=fisher,calibration={other}"], **OPTIONS)
    with pytest.raises(KvtoolError, match="calibration names the trace that directions=fisher reads"):
        replay(run, [f"capacity:calibration={other}"], **OPTIONS)


def test_a_policy_called_by_hand_says_what_it_misses(paths: tuple[Path, Path]) -> None:
    layer = open_trace(paths[0]).sequences[0].layer(1, torch.float64)
    with pytest.raises(KvtoolError, match=r"was not brought together with the calibration trace x\.zarr"):
        layer.information("x.zarr")
    brought = layer.with_information("x.zarr", lambda: torch.eye(VALUE_DIM).expand(HEADS, -1, -1))
    assert brought.with_dtype(torch.float32).information("x.zarr").dtype == torch.float64
