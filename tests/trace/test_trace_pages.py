"""The pages about traces say what the code does: names agree, and their Python runs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kvtool.cli.main import app
from kvtool.trace import dump, layout, open_trace
from kvtool.trace.attributes import parse_rotation
from kvtool.trace.recompute import error_bound

DOCS = Path(__file__).resolve().parents[2] / "docs"
FORMAT, IMPORT = (DOCS / "trace-format.md").read_text(), (DOCS / "import.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def section(page: str, start: str, stop: str) -> str:
    return page[page.index(start) : page.index(stop, page.index(start) + 1)]


def first_column(text: str) -> set[str]:
    rows = re.findall(r"^\| (`[^|]+`) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_arrays_of_the_page_and_of_the_code_are_the_same() -> None:
    arrays = section(FORMAT, "## Arrays", "## Attributes")
    tables = {**layout.SEQUENCE_ARRAYS, **layout.LAYER_ARRAYS, **layout.MODEL_ARRAYS}
    assert first_column(arrays) == set(tables)
    for name, (dtype, dims) in tables.items():
        row = next(line for line in arrays.splitlines() if line.startswith(f"| `{name}` |"))
        shape, stated = (cell.strip() for cell in row.split("|")[2:4])
        assert shape == ("[bytes]" if name == "text" else "[" + ", ".join(dims.split()) + "]"), name
        assert stated.startswith("float" if dtype == "float" else dtype), name


def test_attributes_of_the_page_and_of_the_code_are_the_same() -> None:
    parts = ("Of the trace itself", "Of a sequence", "Of a layer", "Of a rotation", "## Reading")
    fields = (layout.ROOT_FIELDS, layout.SEQUENCE_FIELDS, layout.LAYER_FIELDS, layout.ROTATION_FIELDS)
    for number, expected in enumerate(fields):
        assert first_column(section(FORMAT, parts[number], parts[number + 1])) == set(expected)


def test_the_writer_writes_what_the_page_lists(make_trace: Callable[..., Path]) -> None:
    tree = open_trace(make_trace()).tree
    words = set(re.findall(r"`([^`\n]+)`", FORMAT))
    for group, attributes in tree.groups.items():
        names = set(attributes.get("kvtool", {}))
        assert names - words <= ({"seed"} if group.count("/") == 1 else set()), group
    assert {path.rsplit("/", 1)[-1] for path in tree.arrays} <= words


def test_keys_of_the_import_page_and_of_the_code_are_the_same() -> None:
    tensors = first_column(section(IMPORT, "## Tensors", "## Metadata"))
    stem = "sequences.<n>.layers.<l>."
    assert {name.removeprefix(stem) for name in tensors if name.startswith(stem)} == set(dump.LAYER_TENSORS)
    assert {name for name in tensors if not name.startswith(stem)} == {
        "sequences.<n>.tokens",
        "sequences.<n>.positions",
        "model.layers.<l>.output_projection",
    }
    metadata = section(IMPORT, "## Metadata", "## A recipe")
    assert first_column(section(metadata, "| `model`", "Of a layer:")) == set(dump.TOP_KEYS)
    assert first_column(section(metadata, "Of a layer:", "Of a rotation")) == set(dump.LAYER_KEYS)
    rotation = metadata[metadata.index("Of a rotation") :]
    assert set(layout.ROTATION_FIELDS) <= set(re.findall(r"`([^`]+)`", rotation))


def test_the_metadata_example_parses() -> None:
    (example,) = blocks(IMPORT, "json")
    values = json.loads(example)
    assert set(values) == set(dump.TOP_KEYS)
    for layer in values["layers"].values():
        assert set(layer) <= set(dump.LAYER_KEYS)
        assert parse_rotation(layer["rotation"], 128, "layer", "dump") is not None


def test_bounds_on_the_page() -> None:
    sentence = section(FORMAT, "The relative error may be", "* **Untrusted")
    stated = [float(number) for number in re.findall(r"\de-\d", sentence)]
    assert stated == [error_bound("float32", s) for s in ("float32", "float16", "bfloat16")]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_recipe_and_the_command_give_a_trace(here: Path) -> None:
    (code,) = blocks(IMPORT, "python")
    names: dict[str, object] = {}
    exec(compile(code, "import.md", "exec"), names)
    (commands,) = blocks(IMPORT, "bash")
    for command in commands.splitlines():
        result = CliRunner().invoke(app, command.split()[1:])
        assert result.exit_code == 0, result.output
    trace = open_trace(here / "run.zarr")
    (sequence,) = trace.sequences
    assert (sequence.length, sequence.prompt_length, sequence.layer_ids) == (56, 48, [0, 1])
    recorded = names["recorded"]
    assert isinstance(recorded, dict)
    assert torch.equal(sequence.layer(1).keys, torch.cat(recorded[1, "keys"], dim=1))
    assert sequence.layer(0).queries.shape == (4, 56, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reading_example_runs(
    make_trace: Callable[..., Path], here: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    make_trace(dtype=dtype)
    assert os.listdir(here) == ["run.zarr"]
    names: dict[str, object] = {}
    (code,) = blocks(FORMAT, "python")
    code = code.replace("sample_traces/smollm2.zarr", "run.zarr")
    exec(compile(code, "trace-format.md", "exec"), names)
    layer = open_trace(here / "run.zarr").sequences[0].layer(3)
    assert capsys.readouterr().out == "{'name': 'toy'}\n(40, 40)\n"
    assert torch.allclose(torch.from_numpy(names["logits"]), layer.queries[0] @ layer.keys[0].T * 0.3, atol=1e-5)
