"""heavy-sink: row 0 takes 60 % of all attention and brings nothing."""

from __future__ import annotations

from kvtool.synth.scene import Scene, Size

SHARE = 0.6


def heavy_sink(size: Size) -> Scene:
    """Row 0 gets 60 % of every query's attention with a value near zero; the rest goes to near rows mostly.

    Without it the softmax hands its share to the others, and every output grows by 1 / (1 - 0.6) = 2.5. The row
    holds no information, and losing it is still the worst that can happen.
    """
    return Scene(
        answer=f"keep row 0: it takes {SHARE:.0%} of attention with a value near zero, so that without it "
        f"outputs grow by a factor of {1 / (1 - SHARE):g}",
        landmarks={"sink": [0]},
        groups={},
        sink=SHARE,
        locality=9.0,
    )
