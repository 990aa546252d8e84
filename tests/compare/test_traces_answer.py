"""What `kvtool diff --traces` prints and exits with, on traces from files and on a real model."""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path

import pytest
import torch
from toy_traces import write

from kvtool.cli.diff_traces import traces_answer
from kvtool.compare.traces import diff_traces


def test_exit_codes_and_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def plant(s: int, i: int, arrays: dict[str, torch.Tensor]) -> None:
        if (s, i) == (0, 3):
            arrays["keys"][1, 12, 0] += 0.5

    a, b, c = (tmp_path / f"{name}.zarr" for name in "abc")
    write(a)
    write(b, capture={"chunk": 512})
    write(c, plant=plant)
    assert traces_answer(a, b, False) == 0
    said = capsys.readouterr()
    assert "capture.chunk" in said.out
    assert "equal to the bit" in said.out
    assert traces_answer(a, c, False) == 1
    said = capsys.readouterr()
    assert "they part first in sequence 0, layer 3, at row 12 'w12\\n' (position 19), KV head 1" in said.out
    assert said.err.startswith("next: ")
    assert traces_answer(a, c, True) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "kvtool.diff-traces/1"
    assert (document["parted"], document["first"]["token"]) == (True, 12)
    assert traces_answer(a, c, True, relative=2.0) == 0


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_give_the_same_run_as_one_pass(tmp_path: Path, dtype: str) -> None:
    """Within rounding, and not equal to the bit: the two are really different computations."""
    from kvtool.capture import capture

    text = tmp_path / "topics.txt"
    text.write_text("\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)))
    options = {"text_file": text, "prompt_tokens": 200, "eval_tokens": 8, "model_dtype": dtype, "threads": 1}
    layers = "0,1,6,15,29"
    one = capture("smollm2", tmp_path / "one.zarr", layers=layers, **options)
    chunks = capture("smollm2", tmp_path / "chunks.zarr", layers=layers, chunk=64, **options)
    diff = diff_traces(one, chunks)
    assert not diff.parted
    assert {"name": "capture.chunk", "a": None, "b": 64} in diff.settings
    assert sum(line["unequal"] for line in diff.layers) > 0
    assert diff.bound == {"float32": 1e-5, "bfloat16": 1e-2}[dtype]
    # and it sees more than rounding: other weights, here the run in the other dtype
    if dtype == "float32":
        other = capture("smollm2", tmp_path / "other.zarr", layers="0,1,6", **{**options, "model_dtype": "bfloat16"})
        assert diff_traces(one, other, relative=1e-4).first["layer"] == 0
