"""Workers row: two worker processes against one, by wall clock."""

from __future__ import annotations

from kvtool.bench.goals import Measured
from kvtool.bench.situation import Situation
from kvtool.bench.whole_replay import finished, replay_arguments, subject

IDLE_LOAD = 0.5  # processes of others that spoil a comparison by wall clock


def two_workers(here: Situation) -> dict[str, Measured]:
    """Alone on the machine, or not at all."""
    if here.cores < 2:
        return {"workers": Measured.without("this process may use one core only")}
    if here.load is None or here.load > IDLE_LOAD:
        load = "is unknown" if here.load is None else f"was {here.load:.2f}"
        return {"workers": Measured.without(f"the machine was not idle: the load before the start {load}")}
    command = ["-c", "from kvtool.cli.main import main; main()", *replay_arguments(subject(here))]
    try:
        one, two = (finished([*command, "--workers", str(count)], here) for count in (1, 2))
    except RuntimeError as error:
        return {"workers": Measured.without(str(error))}
    return {"workers": Measured(one / two, (one / two, one / two), 1, detail={"wall_seconds": {"1": one, "2": two}})}
