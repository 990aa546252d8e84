"""Recording: what the model has computed so far of one sequence, as layers that policies may score."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvtool.capture.hook import AttentionCall
from kvtool.layer import Layer
from kvtool.replay.plan import Plan
from kvtool.trace import Sequence


@dataclass(frozen=True, eq=False)
class _Rows:
    """The arrays of one layer; NaN where nothing was computed yet, so that whoever reads ahead is found out.

    Attributes:
        steps: [Tq] int64 rows of `queries`, those that the trace holds.
        queries, keys, values: [H, Tq, D], [Hk, T, D], [Hk, T, Dv].
    """

    steps: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor


class Recording:
    """The queries, keys and values of one sequence in the layers that have a cache of their own.

    Every one of `layers` is the trace's layer with these arrays in place of the stored ones. It is filled while the
    model runs, so a policy that is shown a view of it sees what the model itself had computed. Which steps have a
    query is taken over from the trace: a policy must find the same ones in both.

    Args:
        sequence: whose tokens are run.
        donors: layers with a cache of their own.
        plan: dtype of decisions, and calibration traces.

    Attributes:
        layers: by id.
    """

    def __init__(self, sequence: Sequence, donors: Iterable[int], plan: Plan) -> None:
        self._rows: dict[int, _Rows] = {}
        self.layers: dict[int, Layer] = {}
        for layer_id in donors:
            stored = sequence.layer(layer_id, dtype=plan.dtype)
            geometry, tokens, steps = stored.geometry, stored.tokens, stored.query_steps
            sizes = {
                "queries": (geometry.query_heads, steps.numel(), geometry.key_dim),
                "keys": (geometry.kv_heads, tokens, geometry.key_dim),
                "values": (geometry.kv_heads, tokens, geometry.value_dim),
            }
            arrays = {name: torch.full(size, torch.nan, dtype=plan.dtype) for name, size in sizes.items()}
            self._rows[layer_id] = _Rows(steps, **arrays)
            # The layer's arrays are these very tensors: it loads them once, in their own dtype.
            loaders: dict[str, Callable[[], Tensor]] = {
                **stored.loaders,
                **{name: partial(_itself, array) for name, array in arrays.items()},
            }
            self.layers[layer_id] = plan.calibrated(replace(stored, loaders=loaders))

    def see(self, call: AttentionCall, start: int) -> None:
        """The rows of a forward that began at row `start`; rows behind the sequence's last are left out."""
        rows = self._rows.get(call.layer)
        if rows is None:
            return
        count = call.queries.shape[1]
        stop = min(start + count, rows.keys.shape[1])
        if stop <= start:
            return
        new = slice(call.keys.shape[1] - count, call.keys.shape[1] - count + stop - start)
        rows.keys[:, start:stop] = call.keys[:, new]
        rows.values[:, start:stop] = call.values[:, new]
        low, high = (int(torch.searchsorted(rows.steps, bound)) for bound in (start, stop))
        rows.queries[:, low:high] = call.queries[:, rows.steps[low:high] - start]

    def rewind(self, step: int) -> None:
        """Forget the rows from `step` on."""
        for rows in self._rows.values():
            rows.keys[:, step:] = torch.nan
            rows.values[:, step:] = torch.nan
            rows.queries[:, int(torch.searchsorted(rows.steps, step)) :] = torch.nan


def _itself(array: Tensor) -> Tensor:
    return array
