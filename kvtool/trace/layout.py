"""Layout: where everything of trace format 1 lies, what it is called, and how wide it is.

docs/trace-format.md describes the same for readers; a test holds the two together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtool.errors import KvtoolError

FORMAT = 1
COMMIT = "COMMIT.json"
ATTRIBUTE = "kvtool"
DTYPE_ATTRIBUTE = "kvtool_dtype"
CHUNK_TOKENS = 16384
CHECKSUM_BYTES = 4  # crc32c, little-endian, at the end of every chunk

ROOT_FIELDS = ("format", "model", "tokenizer", "capture")
SEQUENCE_FIELDS = ("id", "length", "prompt_length", "prompt_digest", "segments", "gradients", "landmarks", "synthetic")
LAYER_FIELDS = (
    "query_heads",
    "kv_heads",
    "key_dim",
    "value_dim",
    "scale",
    "softcap",
    "kind",
    "window",
    "kv_source",
    "keys_rotated",
    "rotation",
)
ROTATION_FIELDS = ("rotary_dims", "layout", "rotary_start", "attention_scaling", "inv_freq")

# Stored arrays: name -> dimension names. "float" is the trace's own two- or four-byte dtype.
SEQUENCE_ARRAYS = {
    "tokens": ("int32", "T"),
    "positions": ("int64", "T"),
    "text": ("uint8", "B"),
    "text_offsets": ("int64", "T+1"),
}
LAYER_ARRAYS = {
    "queries": ("float", "H Tq D"),
    "keys": ("float", "Hk T D"),
    "values": ("float", "Hk T Dv"),
    "query_steps": ("int64", "Tq"),
    "sink_logits": ("float32", "H"),
    "rotation_cos": ("float32", "T R/2"),
    "rotation_sin": ("float32", "T R/2"),
    "output_sample": ("float32", "H n Dv"),
    "output_gradients": ("float", "S H Tg Dv"),
    "gradient_steps": ("int64", "Tg"),
}
MODEL_ARRAYS = {"output_projection": ("float", "H Dv M")}
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# What a lost chunk would read as: values that cannot be mistaken for data.
FILL: dict[str, int | float] = {
    "float32": float("nan"),
    "float16": float("nan"),
    "uint16": 0x7FC0,
    "uint8": 0,
    "int32": int(np.iinfo(np.int32).min),
    "int64": int(np.iinfo(np.int64).min),
}
ITEM_BYTES = {"float32": 4, "float16": 2, "uint16": 2, "uint8": 1, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class ArrayInfo:
    """One stored array, read from its metadata and held against its files.

    Attributes:
        path: folder below the trace, such as `sequences/0000/layers/07/keys`.
        dtype: the Zarr data type (`uint16` for bfloat16 bits).
        logical: `float32`, `float16`, `bfloat16` or the integer type.
        shape, chunk: sizes in elements.
        compressed: whether chunks are zstd frames; each ends in four bytes of crc32c either way.
    """

    path: str
    dtype: str
    logical: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    compressed: bool

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each dimension."""
        return tuple(-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk's payload; edge chunks are stored at full size."""
        return math.prod(self.chunk) * ITEM_BYTES[self.dtype]


def chunk_rows(tokens: int) -> int:
    """Tokens per chunk: as few chunks of at most 16,384 tokens as possible, evenly filled."""
    chunks = max(1, -(-tokens // CHUNK_TOKENS))
    return max(1, -(-tokens // chunks))


def chunk_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The chunk of array `name`: one head and `chunk_rows` tokens, unless the format says otherwise."""
    if name == "output_projection":
        return tuple(max(1, size) for size in shape)
    if name == "output_gradients":
        return (1, *(max(1, size) for size in shape[1:]))
    if len(shape) == 3:
        return (1, chunk_rows(shape[1]), max(1, shape[2]))
    return (chunk_rows(shape[0]), *(max(1, size) for size in shape[1:]))


def sequence_path(index: int) -> str:
    """Folder of sequence `index` below the trace."""
    return f"sequences/{index:04d}"


def layer_path(index: int, layer: int) -> str:
    """Folder of one layer of one sequence below the trace."""
    return f"{sequence_path(index)}/layers/{layer:02d}"


def projection_path(layer: int) -> str:
    """Folder of one layer's output projection below the trace."""
    return f"model/layers/{layer:02d}/output_projection"


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32, and so on."""
    return str(dtype).removeprefix("torch.")


def to_numpy(tensor: Tensor) -> tuple[np.ndarray, str]:
    """`tensor` as the numpy array that is stored, and its logical dtype. No value changes: bf16 becomes its bits."""
    tensor = tensor.detach().cpu().contiguous()
    logical = dtype_name(tensor.dtype)
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy(), logical
    if logical not in ITEM_BYTES:
        raise KvtoolError("dtype", f"{logical} cannot be stored in a trace", "store float32, float16 or bfloat16")
    return tensor.numpy(), logical


def to_torch(array: np.ndarray, logical: str) -> Tensor:
    """The inverse of `to_numpy`; shares memory with `array`, which must be writable."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if logical == "bfloat16" else tensor
