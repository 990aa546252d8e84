"""Traces that were written to deceive: sealed properly, so that only the metadata checks stand between."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtool.errors import KvtoolError
from kvtool.trace import open_trace
from kvtool.trace.commit import Entry, file_entry, seal
from kvtool.trace.metadata import list_files

KEYS = "sequences/0000/layers/03/keys/zarr.json"
LAYER = "sequences/0000/layers/03/zarr.json"
SEQUENCE = "sequences/0000/zarr.json"


def reseal(path: Path) -> None:
    entries = {name: file_entry(path / name) for name in list_files(path)}
    (path / "COMMIT.json").write_bytes(seal(entries)[0])


def edit(path: Path, name: str, change: Callable[[Any], Any]) -> None:
    document = json.loads((path / name).read_text())
    changed = change(document)
    (path / name).write_text(json.dumps(document if changed is None else changed))
    reseal(path)


def expect_refused(path: Path, words: str, code: str = "trace-unsafe") -> None:
    with pytest.raises(KvtoolError, match=words) as caught:
        open_trace(path)
    assert caught.value.code == code


def test_resealing_alone_changes_nothing(make_trace: Callable[..., Path]) -> None:
    path = make_trace()
    digest = open_trace(path).digest
    reseal(path)
    assert open_trace(path).digest == digest


def test_seventy_terabytes_are_refused_before_anything_is_allocated(make_trace: Callable[..., Path]) -> None:
    path = make_trace()
    huge = 70 * 10**12 // (6 * 4)
    edit(path, KEYS, lambda d: d.update(shape=[2, huge, 6]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    expect_refused(path, "expected 3 dimensions, none above")
    huge = 10**12
    edit(path, KEYS, lambda d: d.update(shape=[2, huge, 6]))
    expect_refused(path, "chunks other than")
    rows = -(-huge // (-(-huge // 16384)))
    edit(path, KEYS, lambda d: d["chunk_grid"]["configuration"].update(chunk_shape=[1, rows, 6]))
    expect_refused(path, "but has 2 chunk files")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # kB


def test_wide_rows_do_not_fit_their_files(make_trace: Callable[..., Path]) -> None:
    path = make_trace()

    def widen(document: dict[str, Any]) -> None:
        document["shape"] = [2, 40, 1 << 38]
        document["chunk_grid"]["configuration"]["chunk_shape"] = [1, 40, 1 << 38]

    edit(path, KEYS, widen)
    expect_refused(path, "does not fit the shape")


def test_a_frame_that_unpacks_to_more_than_metadata_says(make_trace: Callable[..., Path]) -> None:
    path = make_trace(archive=True)

    def lengthen(document: dict[str, Any]) -> None:
        document["shape"] = [2, 40, 600]
        document["chunk_grid"]["configuration"]["chunk_shape"] = [1, 40, 600]

    edit(path, KEYS, lengthen)
    edit(path, LAYER, lambda d: d["attributes"]["kvtool"].update(key_dim=600))
    for layer in ("03", "11"):
        name = f"sequences/0000/layers/{layer}/queries/zarr.json"
        edit(path, name, lambda d: (lengthen(d), d.update(shape=[4, 40, 600]))[0])
    edit(path, "sequences/0000/layers/11/zarr.json", lambda d: d["attributes"]["kvtool"].update(key_dim=600))
    layer = open_trace(path).sequences[0].layer(3)
    with pytest.raises(KvtoolError, match="unpacks to 960 bytes, expected 96000"):
        _ = layer.keys


class Canary:
    """What a pickle codec would run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pickle", "numcodecs.pickle", "vlen-utf8", "blosc", "gzip", "sharding_indexed", "x"])
def test_codecs_outside_the_list_are_refused_and_nothing_runs(
    make_trace: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    import pickle

    path, canary = make_trace(), tmp_path / "canary"
    (path / "sequences/0000/layers/03/keys/c/1/0/0").write_bytes(pickle.dumps(Canary(canary)))
    edit(path, KEYS, lambda d: d.update(codecs=[{"name": name, "configuration": {}}]))
    expect_refused(path, f"the codec '{name}'")
    edit(path, KEYS, lambda d: d.update(codecs=[{"name": "bytes", "configuration": {"endian": "little"}}, name]))
    expect_refused(path, f"the codec '{name}'")
    assert not canary.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"codecs": []}, "chains the codecs"),
        ({"codecs": [{"name": "crc32c"}, {"name": "bytes", "configuration": {"endian": "little"}}]}, "chains"),
        ({"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]}, "configures the codec bytes"),
        ({"codecs": [{"name": "bytes"}]}, "configures the codec bytes"),
        ({"codecs": "bytes"}, "chains the codecs"),
        ({"codecs": [["bytes"]]}, "the codec"),
        ({"data_type": "object"}, "data type 'object'"),
        ({"data_type": "|O"}, "data type"),
        ({"data_type": {"name": "numpy.datetime64"}}, "data type"),
        ({"data_type": "float64"}, "data type 'float64'"),
        ({"data_type": "int32"}, "is int32, expected a float type"),
        ({"data_type": "uint16"}, "kvtool_dtype"),
        ({"attributes": {"kvtool_dtype": "bfloat16"}}, "kvtool_dtype"),
        ({"attributes": {"kvtool_dtype": "pickle"}}, "kvtool_dtype"),
        ({"shape": [2, 40]}, "expected 3 dimensions"),
        ({"shape": [2, 40, 6, 1]}, "expected 3 dimensions"),
        ({"shape": [2, -40, 6]}, "expected 3 dimensions"),
        ({"shape": [2, 40.0, 6]}, "expected 3 dimensions"),
        ({"shape": [True, 40, 6]}, "expected 3 dimensions"),
        ({"shape": [3, 40, 6]}, "3 chunks, but has 2"),
        ({"shape": [1, 40, 6]}, "1 chunks, but has 2"),
        ({"shape": [2, 39, 6]}, "chunks other than"),
        ({"shape": [2, 0, 6]}, "chunks"),
        ({"chunk_grid": {"name": "rectangular"}}, "chunks other than"),
        ({"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 0, 6]}}}, "chunks other than"),
        ({"chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}}}, "chunks other than"),
        ({"chunk_key_encoding": {"name": "v2"}}, "chunks other than"),
        ({"storage_transformers": [{"name": "x"}]}, "does not allow"),
        ({"extra": 1}, "does not allow"),
        ({"zarr_format": 2}, "not Zarr format 3"),
        ({"node_type": "group"}, "a group that format 1 does not have"),
        ({"node_type": None}, "an array that format 1 does not have"),
    ],
)
def test_array_metadata_that_lies(make_trace: Callable[..., Path], change: dict[str, Any], words: str) -> None:
    path = make_trace(lengths=(40,))
    edit(path, KEYS, lambda d: d.update(change))
    expect_refused(path, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query_heads": 8}, "queries has shape"),
        ({"query_heads": 5}, "cannot share"),
        ({"kv_heads": 0}, "kv_heads 0"),
        ({"kv_heads": 4}, "keys has shape"),
        ({"key_dim": 7}, "queries has shape|keys has shape"),
        ({"value_dim": 4}, "values has shape"),
        ({"value_dim": "5"}, "value_dim '5'"),
        ({"scale": None}, "lacks scale"),
        ({"scale": "0.3"}, "scale '0.3'"),
        ({"scale": 10**400}, "scale"),
        ({"scale": True}, "scale True"),
        ({"softcap": 0}, "softcap 0"),
        ({"kind": "full", "window": 3}, "full but has a window"),
        ({"kind": "sliding"}, "sliding without a window"),
        ({"kind": "global"}, "kind 'global'"),
        ({"kind": ["full"]}, "kind"),
        ({"kv_source": 11}, "has keys beside a donor"),
        ({"keys_rotated": 1}, "keys_rotated 1"),
        ({"colour": "blue"}, "unknown key 'colour'"),
    ],
)
def test_layer_attributes_that_lie(make_trace: Callable[..., Path], change: dict[str, Any], words: str) -> None:
    path = make_trace(lengths=(40,))
    edit(path, LAYER, lambda d: d["attributes"]["kvtool"].update(change))
    expect_refused(path, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rotary_dims": 6}, "channels 2 to 7"),
        ({"rotary_dims": 3}, "channels"),
        ({"rotary_start": -1}, "rotary_start -1"),
        ({"rotary_dims": 2}, "2 frequencies for 2 rotated channels"),
        ({"inv_freq": None}, "lacks inv_freq"),
        ({"inv_freq": [1.0, "x"]}, "inv_freq"),
        ({"inv_freq": []}, "inv_freq"),
        ({"layout": "spiral"}, "layout 'spiral'"),
        ({"attention_scaling": 0.0}, "attention_scaling"),
        ({"speed": 1}, "unknown key 'speed'"),
    ],
)
def test_rotation_attributes_that_lie(make_trace: Callable[..., Path], change: dict[str, Any], words: str) -> None:
    path = make_trace(lengths=(40,))
    edit(path, LAYER, lambda d: d["attributes"]["kvtool"]["rotation"].update(change))
    expect_refused(path, words)


@pytest.mark.parametrize("source", [3, 4, 11, 10**9])
def test_donors_that_are_none(make_trace: Callable[..., Path], source: int) -> None:
    path = make_trace(lengths=(40,))
    edit(path, "sequences/0000/layers/11/zarr.json", lambda d: d["attributes"]["kvtool"].update(kv_source=source))
    if source == 3:
        assert open_trace(path).layer_ids == [3, 11]
    else:
        expect_refused(path, "which has none|kv_source")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": 41}, "tokens has shape"),
        ({"length": 0}, "length 0"),
        ({"prompt_length": 41}, "prompt_length 41"),
        ({"prompt_length": None}, "lacks prompt_length"),
        ({"prompt_digest": "../../etc"}, "64 hex digits"),
        ({"id": 5}, "an id that is no text"),
        ({"segments": "x"}, "segments"),
    ],
)
def test_sequence_attributes_that_lie(make_trace: Callable[..., Path], change: dict[str, Any], words: str) -> None:
    path = make_trace(lengths=(40,))
    edit(path, SEQUENCE, lambda d: d["attributes"]["kvtool"].update(change))
    expect_refused(path, words)


@pytest.mark.parametrize(
    "name",
    ["../escape", "/etc/passwd", "a/../../b", "a//b", "a\\b", ".hidden", "sequences/./x", "COMMIT.json", "", "a\n"],
)
def test_names_that_lead_out_of_the_trace(make_trace: Callable[..., Path], name: str) -> None:
    path = make_trace(lengths=(6,))
    entries = {n: file_entry(path / n) for n in list_files(path)}
    entries[name] = Entry(0, "0" * 64)
    (path / "COMMIT.json").write_bytes(seal(entries)[0])
    expect_refused(path, "no path inside a trace")


@pytest.mark.parametrize(
    "pair",
    [
        [1],
        [1, "0" * 64, 3],
        [-1, "0" * 64],
        [1, "0" * 63],
        [1, "G" * 64],
        [1.0, "0" * 64],
        [True, "0" * 64],
        "ab",
        None,
    ],
)
def test_commit_entries_that_are_none(make_trace: Callable[..., Path], pair: Any) -> None:
    import hashlib

    path = make_trace(lengths=(6,))
    body = json.dumps({"files": {"zarr.json": pair}, "format": 1}, separators=(",", ":"))[:-1].encode()
    digest = hashlib.sha256(body).hexdigest()
    (path / "COMMIT.json").write_bytes(body + f',"sha256":"{digest}"}}\n'.encode())
    expect_refused(path, "does not give length and SHA-256 of zarr.json")


def test_foreign_files_are_refused(make_trace: Callable[..., Path]) -> None:
    path = make_trace(lengths=(6,))
    (path / "run.py").write_text("print('hello')")
    reseal(path)
    expect_refused(path, "run.py is no part of format 1")


def test_foreign_arrays_and_chunks_are_refused(make_trace: Callable[..., Path]) -> None:
    path = make_trace(lengths=(6,))
    (path / "sequences/0000/extra").mkdir()
    source = (path / "sequences/0000/tokens/zarr.json").read_text()
    (path / "sequences/0000/extra/zarr.json").write_text(source)
    reseal(path)
    expect_refused(path, "an array that format 1 does not have")
    (path / "sequences/0000/extra/zarr.json").rename(path / "sequences/0000/extra/c")
    (path / "sequences/0000/extra/c").unlink()
    (path / "sequences/0000/extra/c").mkdir()
    (path / "sequences/0000/extra/c/0").write_text(source)
    reseal(path)
    expect_refused(path, "chunks but no metadata")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100000, "nested deeper than 32"),
        ('{"a":' * 100000, "nested deeper than 32"),
        ("[" * 40 + "]" * 40, "nested deeper than 32"),
        ('{"zarr_format":3,"zarr_format":3}', "appears twice"),
        ('{"zarr_format":NaN}', "NaN is not JSON"),
        ('{"zarr_format":' + "9" * 5000 + "}", "not sound JSON"),
        ("[1]", "not Zarr format 3"),
        ("", "not sound JSON"),
        ("\ufeff{}", "not sound JSON"),
        ("null", "not Zarr format 3"),
    ],
)
def test_absurd_json(make_trace: Callable[..., Path], text: str, words: str) -> None:
    path = make_trace(lengths=(6,))
    (path / KEYS).write_text(text)
    reseal(path)
    expect_refused(path, words)


def test_brackets_inside_text_do_not_count_as_nesting(make_trace: Callable[..., Path]) -> None:
    path = make_trace(lengths=(6,))
    edit(path, SEQUENCE, lambda d: d["attributes"]["kvtool"].update(prompt='[[[{{{"\\' * 50))
    assert open_trace(path).sequences[0].attributes["prompt"].startswith("[[[")


def test_a_newer_format_is_named(make_trace: Callable[..., Path]) -> None:
    import hashlib

    path = make_trace(lengths=(6,))
    body = b'{"files":{},"format":3'
    seal3 = body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    (path / "COMMIT.json").write_bytes(seal3)
    expect_refused(path, "was written by format 3, this version reads up to 1", "trace-format")


def test_a_newer_format_in_the_manifest_is_named(make_trace: Callable[..., Path]) -> None:
    path = make_trace(lengths=(6,))
    edit(path, "zarr.json", lambda d: d["attributes"]["kvtool"].update(format=2))
    expect_refused(path, "was written by format 2, this version reads up to 1", "trace-format")


@pytest.mark.parametrize("value", [None, "1", 0, True, 1.0])
def test_no_format_number(make_trace: Callable[..., Path], value: Any) -> None:
    path = make_trace(lengths=(6,))
    edit(path, "zarr.json", lambda d: d["attributes"]["kvtool"].update(format=value))
    expect_refused(path, "states no format number")


def test_consolidated_metadata_is_refused_and_null_is_not(make_trace: Callable[..., Path]) -> None:
    path = make_trace(lengths=(6,))
    edit(path, "zarr.json", lambda d: d.update(consolidated_metadata=None))
    assert open_trace(path).layer_ids == [3, 11]
    edit(path, "zarr.json", lambda d: d.update(consolidated_metadata={"kind": "inline", "metadata": {}}))
    expect_refused(path, "holds more than the attributes of a group")


def test_missing_sequence_number(make_trace: Callable[..., Path]) -> None:
    path = make_trace()
    (path / "sequences/0000").rename(path / "sequences/0005")
    reseal(path)
    expect_refused(path, r"has the sequences \[1, 5\]")


def test_text_offsets_that_lie(make_trace: Callable[..., Path]) -> None:
    import numpy as np
    import zarr

    path = make_trace(lengths=(6,))
    array = zarr.open_array(str(path / "sequences/0000/text_offsets"), mode="r+")
    array[3] = np.int64(10**15)
    reseal(path)
    with pytest.raises(KvtoolError, match="do not divide its text"):
        open_trace(path).sequences[0].texts()


@pytest.mark.parametrize("how", ["twice", "negative", "descending", "beyond", "enormous"])
def test_query_steps_that_lie(make_trace: Callable[..., Path], how: str) -> None:
    import numpy as np
    import zarr

    path = make_trace()
    array = zarr.open_array(str(path / "sequences/0000/layers/03/query_steps"), mode="r+")
    steps = np.asarray(array[:])
    changed = {
        "twice": np.full_like(steps, steps[0]),
        "negative": steps - steps[0] - 1,
        "descending": steps[::-1].copy(),
        "beyond": steps + 10_000,
        "enormous": np.concatenate([steps[:-1], [2**62]]),
    }[how]
    array[:] = changed
    reseal(path)
    sequence = open_trace(path).sequences[0]
    with pytest.raises(KvtoolError, match="do not ascend within") as caught:
        sequence.layer(3)
    assert caught.value.code == "trace-unsafe"


@pytest.mark.parametrize("name", ["model", "tokenizer", "capture"])
def test_a_manifest_that_is_no_object(make_trace: Callable[..., Path], name: str) -> None:
    path = make_trace()
    edit(path, "zarr.json", lambda d: d["attributes"]["kvtool"].update({name: 7}))
    expect_refused(path, f"whose {name} is no object")
