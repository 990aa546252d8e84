"""What is written comes back bit by bit, through kvtool and through plain Zarr."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.rotation import Rotation
from kvtool.trace import TraceWriter, open_trace
from kvtool.trace.array import read_array, write_array, write_heads
from kvtool.trace.layout import chunk_rows


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 bit patterns of a two-byte float as [2, 4096, 8]."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    return bits.view(dtype).view(2, 4096, 8)


def store_and_read(root: Path, tensor: torch.Tensor, archive: bool) -> torch.Tensor:
    """Through an array named as one that the format knows, in a trace sealed around it."""
    from kvtool.trace.commit import Commit, file_entry
    from kvtool.trace.metadata import list_files, read_tree

    write_array(root, "sequences/0000/layers/00/keys", tensor, archive=archive)
    entries = {name: file_entry(root / name) for name in list_files(root)}
    tree = read_tree(root, Commit(entries, ""))
    return read_array(root, tree.arrays["sequences/0000/layers/00/keys"], entries)


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_two_byte_pattern_survives(tmp_path: Path, dtype: torch.dtype, archive: bool) -> None:
    tensor = every_pattern(dtype)
    back = store_and_read(tmp_path / "t", tensor, archive)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.int16), tensor.view(torch.int16))


def test_float32_patterns_survive(tmp_path: Path) -> None:
    special = [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 0x00000001, 0x7F7FFFFF]
    bits = np.random.default_rng(0).integers(0, 2**32, size=4096 * 8, dtype=np.uint32)
    bits[: len(special)] = special
    tensor = torch.from_numpy(bits.view(np.float32).copy()).view(4, 1024, 8)
    back = store_and_read(tmp_path / "t", tensor, archive=False)
    assert torch.equal(back.view(torch.int32), tensor.view(torch.int32))


def test_bfloat16_is_readable_without_kvtool(tmp_path: Path) -> None:
    write_array(tmp_path, "keys", every_pattern(torch.bfloat16))
    array = zarr.open_array(str(tmp_path / "keys"), mode="r")
    assert array.attrs["kvtool_dtype"] == "bfloat16"
    assert array[...].dtype == np.uint16
    assert np.array_equal(array[...].ravel(), np.arange(65536, dtype=np.uint16))
    assert (tmp_path / "keys" / "c" / "1" / "0" / "0").stat().st_size == 2 * 32768 + 4  # 2 bytes a value, crc32c


@pytest.mark.parametrize(
    ("tokens", "rows"), [(1, 1), (16384, 16384), (16385, 8193), (32768, 16384), (32769, 10923), (100000, 14286)]
)
def test_chunk_rows_fill_evenly(tokens: int, rows: int) -> None:
    assert chunk_rows(tokens) == rows


def test_several_chunks_of_a_head(tmp_path: Path) -> None:
    tensor = torch.randn(2, 16385, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(store_and_read(tmp_path / "t", tensor, archive=False), tensor)
    chunks = sorted(p.stat().st_size for p in (tmp_path / "t").rglob("c/*/*/*"))
    assert chunks == [8193 * 3 * 4 + 4] * 4  # edge chunks are stored at full size


def test_fill_values_cannot_be_mistaken_for_data(make_trace: Callable[..., Path]) -> None:
    path = make_trace(dtype=torch.bfloat16)
    group = zarr.open_group(str(path), mode="r")
    assert group["sequences/0000/layers/03/keys"].fill_value == 0x7FC0
    assert np.isnan(group["sequences/0000/layers/03/output_sample"].fill_value)
    assert group["sequences/0000/tokens"].fill_value == -(2**31)
    assert group["sequences/0000/positions"].fill_value == -(2**63)


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_trace_round_trip(make_trace: Callable[..., Path], dtype: torch.dtype, archive: bool) -> None:
    trace = open_trace(make_trace(dtype=dtype, archive=archive))
    assert trace.layer_ids == [3, 11]
    assert trace.manifest["model"] == {"name": "toy"}
    assert trace.manifest["capture"]["stored_dtype"] == str(dtype).removeprefix("torch.")
    assert len(trace.digest) == 64
    assert [s.length for s in trace.sequences] == [40, 23]
    for index, sequence in enumerate(trace.sequences):
        random = torch.Generator().manual_seed(index)
        keys = torch.randn(2, sequence.length, 6, generator=random)
        values = torch.randn(2, sequence.length, 5, generator=random)
        own, sharing = sequence.layer(3), sequence.layer(11, torch.float64)
        for layer in (own, sharing):
            queries = torch.randn(4, sequence.length, 6, generator=random)
            assert torch.equal(layer.keys, keys.to(dtype).to(layer.dtype))
            assert torch.equal(layer.values, values.to(dtype).to(layer.dtype))
            assert torch.equal(layer.queries, queries.to(dtype).to(layer.dtype))
            assert torch.equal(layer.query_steps, torch.arange(sequence.length))
        assert own.output_projection is not None
        assert own.output_projection.shape == (4, 5, 7)
        assert sharing.output_projection is None
        assert sequence.id == f"s{index}"
        assert sequence.attributes["seed"] == index
        assert sequence.prompt_length == own.prompt_length == sequence.length - 5
        assert sequence.tokens.dtype == torch.int32
        assert torch.equal(sequence.tokens, torch.arange(sequence.length, dtype=torch.int32) + 100 * index)
        assert torch.equal(sequence.positions, torch.arange(sequence.length) + 7)
        assert sequence.texts()[:2] == ["w0 ", "w1 "]
        assert sequence.text(22) == "w22 "
        assert sequence.stored_dtype == dtype


def test_geometry_round_trip(make_trace: Callable[..., Path]) -> None:
    sequence = open_trace(make_trace()).sequences[0]
    full, sharing = sequence.layer(3).geometry, sequence.layer(11).geometry
    assert (full.query_heads, full.kv_heads, full.key_dim, full.value_dim) == (4, 2, 6, 5)
    assert (full.scale, full.softcap, full.kind, full.window, full.kv_source) == (0.3, 20.0, "full", None, None)
    assert isinstance(full.rotation, Rotation)
    assert torch.equal(full.rotation.inv_freq, torch.tensor([1.0, 0.1]))
    assert (full.rotation.rotary_dims, full.rotation.rotary_start, full.rotation.layout) == (4, 2, "half")
    assert full.rotation.attention_scaling == 1.25
    assert (sharing.kind, sharing.window, sharing.kv_source, sharing.rotation) == ("sliding", 9, 3, "none")
    assert torch.equal(sharing.sink_logits, torch.tensor([0.5, -1.0, 2.0, 0.25]))


def small_writer(path: Path, dtype: torch.dtype = torch.float32, **options: object) -> TraceWriter:
    return TraceWriter(path, model={}, tokenizer=None, capture={}, dtype=dtype, **options)


def one_layer(path: Path, geometry: Geometry, keys: torch.Tensor, **options: object) -> None:
    count = keys.shape[1]
    with small_writer(path) as writer:
        sequence = writer.sequence({geometry.layer: geometry}, prompt_length=count, **options)
        sequence.append(geometry.layer, keys=keys, values=keys)
        sequence.append(geometry.layer, queries=keys[:, -2:], query_steps=torch.arange(count - 2, count))
        sequence.finish(tokens=torch.zeros(count), positions=torch.arange(count) * 3)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_unrotated_keys_are_rotated_on_load(tmp_path: Path, layout: str) -> None:
    rotation = Rotation(4, layout, inv_freq=torch.tensor([0.7, 0.03]), rotary_start=1, attention_scaling=1.5)
    keys = torch.randn(1, 9, 6, generator=torch.Generator().manual_seed(1))
    one_layer(tmp_path / "t", Geometry(0, 1, 1, 6, 6, 1.0, rotation=rotation), keys, keys_rotated=False)
    loaded = open_trace(tmp_path / "t").sequences[0].layer(0).keys
    expected = keys.clone()
    for row in range(9):
        for pair, freq in enumerate((0.7, 0.03)):
            a, b = (1 + pair, 3 + pair) if layout == "half" else (1 + 2 * pair, 2 + 2 * pair)
            angle = torch.tensor(3.0 * row) * torch.tensor(freq)
            cos, sin = angle.cos() * 1.5, angle.sin() * 1.5
            expected[0, row, a] = keys[0, row, a] * cos - keys[0, row, b] * sin
            expected[0, row, b] = keys[0, row, b] * cos + keys[0, row, a] * sin
    assert torch.allclose(loaded, expected, atol=1e-6)
    assert not torch.allclose(loaded, keys, atol=1e-2)
    assert torch.equal(loaded[..., [0, 5]], keys[..., [0, 5]])


def test_unrotated_keys_of_unknown_rotation_are_refused(tmp_path: Path) -> None:
    keys = torch.ones(1, 3, 2)
    one_layer(tmp_path / "t", Geometry(0, 1, 1, 2, 2, 1.0), keys, keys_rotated=False)
    layer = open_trace(tmp_path / "t").sequences[0].layer(0)
    with pytest.raises(KvtoolError, match="unknown") as caught:
        _ = layer.keys
    assert caught.value.code == "trace-lacks"


def test_recorded_rotation_round_trip(tmp_path: Path) -> None:
    cos, sin = torch.rand(5, 2), torch.rand(5, 2)
    rotation = Rotation(4, "interleaved", cos=cos, sin=sin)
    one_layer(tmp_path / "t", Geometry(0, 1, 1, 4, 4, 1.0, rotation=rotation), torch.ones(1, 5, 4))
    back = open_trace(tmp_path / "t").sequences[0].layer(0).geometry.rotation
    assert isinstance(back, Rotation)
    assert not back.by_position
    assert torch.equal(back.cos, cos)
    assert torch.equal(back.sin, sin)
    assert back.layout == "interleaved"


def test_blocks_of_any_size_give_the_same_trace(tmp_path: Path) -> None:
    count, geometry = 2500, Geometry(5, 2, 1, 3, 2, 1.0, kind="chunked", window=64)
    random = torch.Generator().manual_seed(2)
    keys, values = torch.randn(1, count, 3, generator=random), torch.randn(1, count, 2, generator=random)
    queries = torch.randn(2, count, 3, generator=random)
    digests = set()
    for number, step in enumerate((1, 63, 1024, 1500, 2500)):
        with small_writer(tmp_path / f"t{number}") as writer:
            sequence = writer.sequence({5: geometry}, prompt_length=1)
            for start in range(0, count, step):
                part = slice(start, start + step)
                rows = torch.arange(count)[part]
                sequence.append(
                    5, keys=keys[:, part], values=values[:, part], queries=queries[:, part], query_steps=rows
                )
            sequence.finish(tokens=torch.zeros(count), positions=torch.arange(count))
        trace = open_trace(tmp_path / f"t{number}")
        digests.add(trace.digest)
        layer = trace.sequences[0].layer(5)
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.queries, queries)
    assert len(digests) == 1  # same content, same digest: nothing in it depends on time or process


def test_append_copies_what_the_model_may_overwrite(tmp_path: Path) -> None:
    buffer = torch.ones(1, 4, 2)
    with small_writer(tmp_path / "t") as writer:
        sequence = writer.sequence({0: Geometry(0, 1, 1, 2, 2, 1.0)}, prompt_length=4)
        sequence.append(0, keys=buffer, values=buffer, queries=buffer, query_steps=torch.arange(4))
        buffer.fill_(7.0)
        sequence.finish(tokens=torch.zeros(4), positions=torch.arange(4))
    assert torch.equal(open_trace(tmp_path / "t").sequences[0].layer(0).keys, torch.ones(1, 4, 2))


def test_no_queries_and_no_text(tmp_path: Path) -> None:
    with small_writer(tmp_path / "t") as writer:
        sequence = writer.sequence({0: Geometry(0, 1, 1, 2, 2, 1.0)}, prompt_length=4)
        sequence.append(0, keys=torch.ones(1, 4, 2), values=torch.ones(1, 4, 2))
        sequence.append(0, queries=torch.ones(1, 0, 2), query_steps=torch.empty(0))
        sequence.finish(tokens=torch.zeros(4), positions=torch.arange(4))
    sequence = open_trace(tmp_path / "t").sequences[0]
    assert sequence.layer(0).queries.shape == (1, 0, 2)
    assert sequence.texts() == [""] * 4


def test_plain_zarr_reads_everything(make_trace: Callable[..., Path]) -> None:
    path = make_trace()
    group = zarr.open_group(str(path), mode="r")
    assert group.attrs["kvtool"]["format"] == 1
    layer = group["sequences/0001/layers/11"]
    assert layer.attrs["kvtool"]["kv_source"] == 3
    random = torch.Generator().manual_seed(1)
    keys = torch.randn(2, 23, 6, generator=random)
    assert np.array_equal(group["sequences/0001/layers/03/keys"][...], keys.numpy())
    offsets, text = group["sequences/0001/text_offsets"][...], group["sequences/0001/text"][...].tobytes()
    assert text[offsets[3] : offsets[4]] == b"w3 "
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sorted(group["sequences/0000/layers/03"].array_keys()) == [
            "keys",
            "output_sample",
            "queries",
            "query_steps",
            "values",
        ]


def write_blocks(path: Path, dtype: torch.dtype, blocks: dict[str, torch.Tensor]) -> None:
    with small_writer(path, dtype) as writer:
        sequence = writer.sequence({4: Geometry(4, 2, 2, 3, 3, 1.0)}, prompt_length=4)
        for start, stop in ((0, 1025), (1025, 1030)):
            part = {key: block[:, start:stop] for key, block in blocks.items()}
            sequence.append(4, **part, query_steps=torch.arange(start, stop))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["keys", "values", "queries"])
def test_not_finite_is_refused_by_place(tmp_path: Path, name: str, value: float) -> None:
    blocks = {key: torch.zeros(2, 1030, 3) for key in ("keys", "values", "queries")}
    blocks[name][1, 1027, 2] = value
    with pytest.raises(KvtoolError, match=f"layer 4 {name} holds {value} in head 1, row 1027") as caught:
        write_blocks(tmp_path / "t", torch.float32, blocks)
    assert caught.value.code == "not-finite"
    assert list(tmp_path.iterdir()) == []


def test_overflow_of_the_stored_dtype_is_refused(tmp_path: Path) -> None:
    blocks = {key: torch.zeros(2, 1030, 3) for key in ("keys", "values", "queries")}
    blocks["values"][1, 1, 2] = 70000.0
    with pytest.raises(KvtoolError, match="values holds 70000 in head 1, row 1, more than float16") as caught:
        write_blocks(tmp_path / "t", torch.float16, blocks)
    assert caught.value.code == "overflow"
    assert list(tmp_path.iterdir()) == []


def test_the_digest_depends_on_every_number(tmp_path: Path) -> None:
    keys = torch.ones(1, 5, 4)
    one_layer(tmp_path / "a", Geometry(0, 1, 1, 4, 4, 1.0), keys)
    one_layer(tmp_path / "b", Geometry(0, 1, 1, 4, 4, 1.0), keys)
    keys[0, 4, 3] = 1.0000001
    one_layer(tmp_path / "c", Geometry(0, 1, 1, 4, 4, 1.0), keys)
    a, b, c = (open_trace(tmp_path / name).digest for name in "abc")
    assert a == b != c


def wrong_finish(path: Path, case: str) -> None:
    geometry = {0: Geometry(0, 2, 2, 2, 2, 1.0), 1: Geometry(1, 2, 2, 2, 2, 1.0, kv_source=0)}
    if case == "donor":
        geometry[1] = Geometry(1, 2, 2, 2, 2, 1.0, kv_source=9)
    block = torch.ones(2, 4, 2)
    with small_writer(path) as writer:
        sequence = writer.sequence(geometry, prompt_length=9 if case == "prompt" else 3)
        sequence.append(0, keys=block, values=block)
        for layer in (0, 1):
            steps = torch.tensor([3, 2, 1, 0]) if case == "steps" else torch.arange(4)
            sequence.append(layer, queries=block, query_steps=steps)
        if case == "heads":
            sequence.append(0, keys=torch.ones(1, 1, 2), values=torch.ones(1, 1, 2))
        count = 5 if case == "count" else 4
        text = [b"a"] * (2 if case == "text" else count)
        sequence.finish(tokens=torch.zeros(count), positions=torch.arange(count), text=text)


@pytest.mark.parametrize("case", ["donor", "prompt", "steps", "heads", "count", "text"])
def test_what_does_not_fit_is_refused_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    with pytest.raises(KvtoolError) as caught:
        wrong_finish(tmp_path / "t", case)
    assert caught.value.code == "shape"
    assert list(tmp_path.iterdir()) == []


def test_what_could_not_be_opened_is_not_published(tmp_path: Path) -> None:
    rotation = Rotation(6, inv_freq=torch.tensor([1.0, 0.5, 0.1]))
    with pytest.raises(KvtoolError, match="turns channels 0 to 5, but keys have 4") as caught:
        one_layer(tmp_path / "t", Geometry(0, 1, 1, 4, 4, 1.0, rotation=rotation), torch.ones(1, 5, 4))
    assert caught.value.code == "shape"
    assert list(tmp_path.iterdir()) == []


def test_write_heads_asks_for_one_head_at_a_time(tmp_path: Path) -> None:
    asked = []

    def head(number: int) -> np.ndarray:
        asked.append(number)
        return np.full((5, 2), number, dtype=np.float32)

    write_heads(tmp_path, "keys", (3, 5, 2), "float32", "float32", head)
    assert asked == [0, 1, 2]
    assert zarr.open_array(str(tmp_path / "keys"), mode="r")[2, 4, 1] == 2.0


def test_unknown_layer_is_named(make_trace: Callable[..., Path]) -> None:
    with pytest.raises(KvtoolError, match="no layer 4") as caught:
        open_trace(make_trace()).sequences[0].layer(4)
    assert caught.value.hint == "its layers: 3, 11"


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_head_is_read_without_the_others(make_trace, archive, dtype):
    path = make_trace(archive=archive, dtype=dtype)
    sequence = open_trace(path).sequences[0]
    for name, heads in (("queries", 4), ("keys", 2), ("values", 2)):
        whole = sequence.array(name, 3)
        for head in range(heads):
            assert torch.equal(sequence.head(name, 3, head), whole[head])
    chunk = path / "sequences/0000/layers/03/values/c/0/0/0"
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    assert torch.equal(sequence.head("values", 3, 1), whole[1])
    with pytest.raises(KvtoolError, match="values"):
        sequence.head("values", 3, 0)
