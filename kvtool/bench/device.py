"""Device rows: every Triton kernel on this machine's card, first right, then timed.

A kernel whose worst row is off is not timed: a wrong number is quick. Times are of calls in a row with one wait for
the card at the end, so the host's part is in them only where the card had to wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvtool.bench import card_operations as operations
from kvtool.bench.goals import Goal, Measured
from kvtool.bench.situation import Situation
from kvtool.bench.timing import Stopwatch
from kvtool.errors import KvtoolError
from kvtool.kernels.device import DeviceError, find_card

SECONDS = 15.0
COPIED_NUMBERS = 1 << 28
PRODUCT = 8192
_FLOOR = "the larger of bytes over this card's measured copy rate and flops over its measured matmul rate"

GOALS: tuple[Goal, ...] = (
    Goal("cuda_cell_errors_against_floor", None, True, _FLOOR, 1.0),
    Goal("cuda_cell_errors_against_dense", None, True, "one dense SDPA pass of the same queries, on the card"),
    Goal(
        "cuda_cell_errors_against_gathered",
        None,
        False,
        "SDPA over gathered keys and values for each cell, on the card",
    ),
    Goal("cuda_attention_mass_against_floor", None, True, _FLOOR, 1.0),
    Goal(
        "cuda_attention_mass_against_softmax", None, False, "matmul, softmax and sum, in blocks of queries, on the card"
    ),
    Goal("cuda_leverage_against_floor", None, True, _FLOOR, 1.0),
    Goal("cuda_leverage_against_linalg", None, False, "torch.linalg.cholesky_ex and solve_triangular, on the card"),
    Goal("cuda_tangent_against_floor", None, True, _FLOOR, 1.0),
    Goal("cuda_tangent_against_plain", None, False, "the same formula in plain torch, on the card"),
)


@dataclass(frozen=True)
class Rates:
    """What this card reaches on plain work.

    Attributes:
        bytes_per_second: read and written by a copy.
        flops_per_second: of a large matmul, by dtype; float32 without TF32.
    """

    bytes_per_second: float
    flops_per_second: dict[torch.dtype, float]

    def floor(self, work: operations.Work) -> float:
        """Seconds below which no kernel of this work can get, if plain work is as fast as the card is."""
        return max(work.bytes / self.bytes_per_second, work.flops / self.flops_per_second[work.dtype])


def refuse_without_card() -> None:
    """Raises KvtoolError `device` where there is no card that Triton's kernels run on."""
    try:
        find_card("cuda")
    except DeviceError as error:
        raise KvtoolError("device", str(error), "--device cpu measures this machine, and needs none") from None


def synchronised() -> float:
    """Seconds, once the card has done what it was given."""
    torch.cuda.synchronize()
    return time.perf_counter()


def measured_rates(watch: Stopwatch, place: str) -> Rates:
    """Copy and matmul, as torch does them here."""
    source = torch.zeros(COPIED_NUMBERS, device=place)
    target = torch.empty_like(source)
    copied = watch.paired({"copy": lambda: target.copy_(source)}, 2.0).median("copy")
    flops = {}
    for dtype in (torch.bfloat16, torch.float32):
        square = torch.zeros(PRODUCT, PRODUCT, dtype=dtype, device=place)
        out = torch.empty_like(square)
        took = watch.paired({"matmul": lambda a=square, out=out: torch.mm(a, a, out=out)}, 2.0).median("matmul")  # type: ignore[misc]
        flops[dtype] = 2 * PRODUCT**3 / took
    return Rates(2 * source.numel() * source.element_size() / copied, flops)


def refused(check: operations.Check) -> Measured | None:
    """What stands instead of a time where a kernel is wrong."""
    if check.worst <= check.allowed:
        return None
    return Measured.without(
        f"not timed, because it is wrong: a row is off by {check.worst:.2g} of its size, allowed {check.allowed:g}"
    )


def _timed(
    here: Situation, name: str, others: tuple[str, ...], make: Callable[[str], operations.Work]
) -> dict[str, Measured]:
    """The rows of one operation: against the floor, and against each of `others`."""
    place = "cuda"
    rows = [f"cuda_{name}_against_floor", *(f"cuda_{name}_against_{other}" for other in others)]
    try:
        wrong = refused(operations.CHECKS[name](place))
        work = make(place)
    except ImportError as error:
        return dict.fromkeys(rows, Measured.without(f"this version has no Triton kernel for it: {error}"))
    if wrong is not None:
        return dict.fromkeys(rows, wrong)
    watch = Stopwatch(here.watch.left, cpu=synchronised)
    rates = measured_rates(watch, place)
    rounds = watch.paired({"kvtool": work.kernel, **work.others}, SECONDS)
    floor = rates.floor(work)
    known: dict[str, Any] = {
        "card": torch.cuda.get_device_properties(place).name,
        "floor_seconds": floor,
        "bytes": work.bytes,
        "flops": work.flops,
        "dtype": str(work.dtype).removeprefix("torch."),
    }
    found = {rows[0]: rounds.alone("kvtool", 1 / floor, seconds=rounds.median("kvtool"), **known)}
    goals = {goal.name: goal for goal in GOALS}
    for row, other in zip(rows[1:], others, strict=True):
        above, below = ("kvtool", other) if goals[row].at_most else (other, "kvtool")
        found[row] = rounds.ratio(above, below, **known)
    return found


def cell_errors(here: Situation) -> dict[str, Measured]:
    """50 cells of a whole Llama-8B-like layer, bfloat16."""
    return _timed(here, "cell_errors", ("dense", "gathered"), operations.cell_errors_work)


def attention_mass(here: Situation) -> dict[str, Measured]:
    """Column sums of the same layer's attention."""
    return _timed(here, "attention_mass", ("softmax",), operations.attention_mass_work)


def leverage(here: Situation) -> dict[str, Measured]:
    """Leverage of 32 query heads over 32,768 tokens, float32."""
    return _timed(here, "leverage", ("linalg",), operations.leverage_work)


def tangent(here: Situation) -> dict[str, Measured]:
    """Full and diagonal tangents of 4 query heads over 32,768 tokens for 512 shifts, float32."""
    return _timed(here, "tangent", ("plain",), operations.tangent_work)


GROUPS = tuple(
    (tuple(goal.name for goal in GOALS if goal.name.startswith(f"cuda_{measure.__name__}_")), measure)
    for measure in (cell_errors, attention_mass, leverage, tangent)
)
