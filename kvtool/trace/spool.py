"""Spool: one array of unknown length, appended block by block to one raw file per head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.trace.layout import dtype_name, to_numpy

BLOCK_TOKENS = 1024


class Spool:
    """Rows of a [heads, n, width] array, on disk but for the newest block of fewer than 1,024.

    Args:
        stem: path of the spool files without the head number.
        dtype: stored dtype; wider input is rounded to it once.
        where: said in errors, such as `layer 7 keys`.
    """

    def __init__(self, stem: Path, dtype: torch.dtype, where: str) -> None:
        self._stem, self._dtype, self._where = stem, dtype, where
        self._shape: tuple[int, int] | None = None
        self._pending: list[Tensor] = []
        self._pending_rows = 0
        self._spooled_rows = 0

    @property
    def rows(self) -> int:
        """Tokens appended so far."""
        return self._spooled_rows + self._pending_rows

    @property
    def shape(self) -> tuple[int, int] | None:
        """(heads, width), None before the first block."""
        return self._shape

    def append(self, block: Tensor) -> None:
        """Append [heads, n, width].

        Raises:
            KvtoolError: `not-finite` naming head and row, `overflow`, `shape`.
        """
        heads, rows, width = block.shape
        if self._shape not in (None, (heads, width)):
            raise KvtoolError("shape", f"{self._where} changed from {self._shape} to {(heads, width)} heads and width")
        self._shape = (heads, width)
        if not rows:
            return
        block = block.detach()
        self._refuse_not_finite(block)
        stored = block.to(device="cpu", dtype=self._dtype, copy=True)
        if stored.dtype != block.dtype:
            self._refuse_overflow(block, stored)
        self._pending.append(stored)
        self._pending_rows += rows
        if self._pending_rows >= BLOCK_TOKENS:
            self._flush()

    def _refuse_not_finite(self, block: Tensor) -> None:
        low, high = torch.aminmax(block)
        if bool(torch.isfinite(low)) and bool(torch.isfinite(high)):
            return
        head, row, channel = (int(x) for x in (~torch.isfinite(block)).nonzero()[0])
        raise KvtoolError(
            "not-finite",
            f"{self._where} holds {float(block[head, row, channel])} in head {head}, row {self.rows + row}",
            "a run that produced NaN or infinity cannot be replayed; try a wider --model-dtype",
        )

    def _refuse_overflow(self, block: Tensor, stored: Tensor) -> None:
        low, high = torch.aminmax(stored)
        if bool(torch.isfinite(low)) and bool(torch.isfinite(high)):
            return
        head, row, channel = (int(x) for x in (~torch.isfinite(stored)).nonzero()[0])
        raise KvtoolError(
            "overflow",
            f"{self._where} holds {float(block[head, row, channel]):.6g} in head {head}, row {self.rows + row}, "
            f"more than {dtype_name(self._dtype)} can hold",
            "store a wider dtype: --dtype float32 or bfloat16",
        )

    def _flush(self) -> None:
        block = torch.cat(self._pending, dim=1)
        for head in range(block.shape[0]):
            with self._file(head).open("ab") as file:
                file.write(to_numpy(block[head])[0].data)
        self._spooled_rows += self._pending_rows
        self._pending, self._pending_rows = [], 0

    def _file(self, head: int) -> Path:
        return self._stem.with_name(f"{self._stem.name}.{head}")

    def head(self, head: int) -> np.ndarray:
        """All rows of one head, [n, width] as stored (bf16 as bits)."""
        assert self._shape is not None
        pending = [block[head] for block in self._pending]
        tail, _ = to_numpy(torch.cat(pending) if pending else torch.empty(0, self._shape[1], dtype=self._dtype))
        if not self._spooled_rows:
            return tail
        spooled = np.memmap(self._file(head), dtype=tail.dtype, mode="r", shape=(self._spooled_rows, self._shape[1]))
        return np.concatenate([spooled, tail]) if len(tail) else spooled

    def remove(self) -> None:
        """Delete the spool files; the space is needed for the chunks of the next array."""
        if self._shape is not None and self._spooled_rows:
            for head in range(self._shape[0]):
                self._file(head).unlink()
        self._pending, self._pending_rows = [], 0
