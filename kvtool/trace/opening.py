"""Opening: the checks between a folder somebody names and a Trace whose arrays can be read."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.trace.attributes import parse_layer
from kvtool.trace.commit import read_commit, refuse_newer
from kvtool.trace.consistency import check_layer, check_sequence, sequence_fields
from kvtool.trace.gradients import check_gradients, parse_gradients
from kvtool.trace.landmarks import check_landmarks, check_synthetic
from kvtool.trace.layout import ATTRIBUTE, COMMIT, sequence_path
from kvtool.trace.metadata import MOST_METADATA_BYTES, check_lengths, read_tree
from kvtool.trace.publish import WRITING, siblings
from kvtool.trace.reader import Sequence, Trace
from kvtool.trace.remote import Mirror, is_address


def open_trace(path: str | os.PathLike[str], *, online: bool = False) -> Trace:
    """Open a trace: format, commit file, lengths of all files and safety of all metadata are checked.

    Contents of arrays are compared with their checksums when they are read, and all at once by
    `kvtool inspect --verify`.

    Args:
        path: a folder, or an address that fsspec knows, such as s3://bucket/run.zarr.
        online: whether addresses may be fetched from.

    Raises:
        KvtoolError: `file-missing`, `trace-not`, `trace-incomplete`, `trace-damaged`, `trace-unsafe`, `trace-format`;
            `usage` for an address without `online`.
    """
    if (address := os.fspath(path)) and is_address(address):
        mirror = mirror_of(address, online)
        with mirror.speaking():
            return load_trace(mirror.root, mirror)
    root = Path(path)
    refuse_incomplete(root)
    return load_trace(root)


def mirror_of(address: str, online: bool) -> Mirror:
    """What fetches from `address`.

    Raises:
        KvtoolError: `usage` without `online`, and as kvtool.trace.remote.Mirror.
    """
    if not online:
        raise KvtoolError("usage", f"{address} is an address, and nothing is fetched without --online", "add --online")
    return Mirror(address)


def load_trace(root: Path, mirror: Mirror | None = None) -> Trace:
    """`open_trace` for a folder that may still be unpublished: the writer's last check of its own work.

    Args:
        mirror: whose folder it is, where the trace lies elsewhere; then files are checked as they come.
    """
    commit = read_commit(root)
    if mirror is None:
        check_lengths(root, commit)
    else:
        mirror.admit(commit, MOST_METADATA_BYTES)
    tree = read_tree(root, commit)
    manifest = tree.groups.get("", {}).get(ATTRIBUTE)
    if not isinstance(manifest, dict):
        raise KvtoolError("trace-unsafe", f"{root} has no manifest in the attribute {ATTRIBUTE}")
    refuse_newer(manifest.get("format"), root)
    for name in ("model", "tokenizer", "capture"):
        if not isinstance(manifest.get(name, {}), dict | None):
            raise KvtoolError("trace-unsafe", f"{root} has a manifest whose {name} is no object")
    trace = Trace(root, commit, tree, manifest, mirror=mirror)
    numbers = sorted(int(found[1]) for group in tree.groups if (found := re.match(r"sequences/(\d+)\Z", group)))
    if not numbers or numbers != list(range(len(numbers))):
        raise KvtoolError("trace-unsafe", f"{root} has the sequences {numbers}, expected 0, 1, 2 and so on")
    for index in numbers:
        trace.sequences.append(_sequence(trace, index))
    if (
        len({info.logical for name, info in tree.arrays.items() if name.endswith(("/queries", "/keys", "/values"))})
        != 1
    ):
        raise KvtoolError("trace-unsafe", f"{root} stores queries, keys and values in more than one dtype")
    return trace


def _sequence(trace: Trace, index: int) -> Sequence:
    path = sequence_path(index)
    attributes, length, prompt_length = sequence_fields(trace.tree.groups[path].get(ATTRIBUTE), f"sequence {index}")
    check_sequence(trace.tree, path, length)
    check_landmarks(attributes.get("landmarks"), f"sequence {index}", length)
    check_synthetic(attributes.get("synthetic"), f"sequence {index}")
    gradients = parse_gradients(attributes.get("gradients"), f"sequence {index}", length, prompt_length)
    parsed: dict[int, tuple[Geometry, bool]] = {}
    prefix = f"{path}/layers/"
    for group, values in trace.tree.groups.items():
        if group.startswith(prefix):
            layer = int(group.removeprefix(prefix))
            recorded = f"{group}/rotation_cos" in trace.tree.arrays
            where = f"layer {layer} of sequence {index}"
            parsed[layer] = parse_layer(values.get(ATTRIBUTE), layer, where, recorded=recorded)
    for layer in parsed:
        check_layer(trace.tree, index, layer, {number: entry[0] for number, entry in parsed.items()}, length)
    if not parsed:
        raise KvtoolError("trace-unsafe", f"sequence {index} has no layers")
    check_gradients(trace.tree, index, sorted(parsed), gradients)
    return Sequence(trace, index, attributes, length, prompt_length, sorted(parsed), parsed, gradients)


def refuse_incomplete(root: Path) -> None:
    """Complain when there is no published trace at `root`, saying what is there instead.

    Raises:
        KvtoolError: `file-missing`, `trace-not` or `trace-incomplete`.
    """
    partials = [root] if (root / WRITING).is_dir() else [] if root.exists() else siblings(root, "partial")
    if partials:
        whole, planned = _progress(partials[-1])
        raise KvtoolError(
            "trace-incomplete",
            f"{root} is incomplete, {whole} of {planned} sequences whole: its writer was stopped or is still running",
            "write it again; what is left over is removed by that",
        )
    if not root.exists():
        older = siblings(root, "replaced")
        if older:
            raise KvtoolError(
                "trace-incomplete",
                f"{root} is incomplete: its writer was stopped while it replaced an older trace",
                f"the older one is whole: mv {older[-1]} {root}",
            )
        raise KvtoolError("file-missing", f"{root} does not exist", "kvtool capture and kvtool import write traces")
    if not (root / COMMIT).exists():
        what = (
            "has no COMMIT.json, so it was never completed" if (root / "zarr.json").exists() else "is no kvtool trace"
        )
        code = "trace-incomplete" if (root / "zarr.json").exists() else "trace-not"
        raise KvtoolError(code, f"{root} {what}", "a trace is a folder that kvtool capture or kvtool import wrote")


def _progress(partial: Path) -> tuple[int, int]:
    """Sequences that are whole, and how many there should be."""
    writing = partial / WRITING
    if not writing.is_dir():  # every sequence is whole, only the last rename is missing
        count = sum(1 for _ in (partial / "sequences").glob("[0-9]*")) if (partial / "sequences").is_dir() else 0
        return count, count
    whole = sum(1 for _ in writing.glob("*.whole"))
    planned = writing / "planned"
    written = planned.read_text().strip() if planned.is_file() else ""
    return whole, max(whole, int(written) if written.isdigit() else 0)
