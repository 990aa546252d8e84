"""Retained attention and attention mass in Triton without a card: numbers under the interpreter, float32 arithmetic
on any storage, against the float64 reference fed the stored numbers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from interpreted import interpreted

FILE = "interpreted_attention"
ROUNDING = 1e-5  # float32 arithmetic, sums of a hundred terms, and weights of sixteen-bit values in two terms
PER_LOGIT = 2.4e-7  # four roundings of a logit; the weight moves by as much, relatively


def tolerance(case: dict[str, Any]) -> float:
    return ROUNDING + PER_LOGIT * (case.get("gap") or 0)


def check_parity(cases: list[dict[str, Any]], vectors: bool = False) -> None:
    answers = interpreted(FILE, "parity", cases)
    assert len(answers) == len(cases)
    for case, worst in zip(cases, answers, strict=True):
        assert len(worst) == 8 - 3 * (not case.get("vectors")) - 3 * (case.get("which") == "errors")
        for number, error in worst.items():
            assert error <= tolerance(case), (case, number, error)


def test_awkward_sizes() -> None:
    sizes = [
        {"tokens": 63, "steps": 1, "heads": 3, "kv": 3, "cells": 1},
        {"tokens": 1, "steps": 1, "heads": 2, "kv": 2, "cells": 2, "sets": "everything"},
        {"tokens": 111, "steps": 17, "heads": 6, "kv": 2, "dim": 80, "value_dim": 64, "cells": 3, "vectors": True},
        {"tokens": 63, "steps": 5, "heads": 4, "kv": 1, "dim": 192, "value_dim": 128, "cells": 2},
        {"tokens": 40, "steps": 5, "heads": 1, "kv": 1, "dim": 96, "value_dim": 96, "cells": 5},
        {"tokens": 63, "steps": 3, "heads": 2, "kv": 1, "dim": 256, "value_dim": 256, "cells": 2},
        {"tokens": 33, "steps": 9, "heads": 3, "kv": 1, "dim": 17, "value_dim": 5, "cells": 2, "block": 4},
        {"tokens": 63, "steps": 5, "which": "errors", "vectors": True},
    ]
    check_parity(sizes)
    assert {case["tokens"] for case in sizes} >= {1, 63, 111}


def test_what_a_query_sees() -> None:
    cases = [
        {"window": 40, "tokens": 111, "steps": 17},
        {"window": 1, "steps": 5},
        {"chunk": 16, "tokens": 111, "steps": 17},
        {"pool": True, "steps": 5},
        {"sinks": True, "window": 50, "steps": 5, "sets": "everything"},
        {"sets": "everything", "steps": 5, "vectors": True},
        {"softcap": 2.0, "sinks": True, "steps": 5},
        {"softcap": 50.0, "steps": 5},
    ]
    check_parity(cases)
    assert len(cases) == 8


@pytest.mark.parametrize("sinks", [False, True])
def test_no_set_underflows_under_the_logits_of_another(sinks: bool) -> None:
    cases = [{"sets": "heavy", "gap": gap, "sinks": sinks, "cells": 2} for gap in (60, 88, 95, 100, 104, 400)]
    check_parity(cases)
    assert len(cases) == 6


def test_sixteen_bits_are_storage_only() -> None:
    cases = [{"dtype": kind, "tokens": 111, "steps": 5, "sinks": True, "vectors": True, "heads": 3, "kv": 1}
             for kind in ("float16", "bfloat16")]  # fmt: skip
    cases += [{"dtype": "float16", "sets": "heavy", "gap": gap, "cells": 2} for gap in (88, 100, 400)]
    check_parity(cases)
    assert len(cases) == 5


def test_one_wrong_number_would_show() -> None:
    moved = interpreted(FILE, "one_wrong_number")
    assert len(moved) == 9
    assert all(error > 10 * ROUNDING for error in moved.values()), moved


def test_nothing_asked_and_what_is_no_number() -> None:
    found = interpreted(FILE, "special")
    assert found["repeats"]
    assert found["no_cells"] == [0, 4, 5]
    last = [[0] * 5, [0] * 5, [0, 0, 0, 0, 1], [0, 0, 0, 0, 1]]  # the heads that read KV head 1, at the last step
    assert found["nan_output"] == last
    assert found["nan_error"][0] == last
    assert found["layer_output"] == [0, 0, 0, 0, 1]
    assert found["unseen_key"]
    assert found["seen_key"]
    assert found["blind"] == [0.0, 0.0, True]
    assert [text.split(":")[0] for text in found["messages"]] == ["Unsupported", *["ValueError"] * 4]


def test_mass_is_that_of_the_reference() -> None:
    cases = [
        {"tokens": 63, "steps": 1, "heads": 3, "kv": 3},
        {"tokens": 1, "steps": 1},
        {"tokens": 111, "steps": 17, "heads": 6, "kv": 2, "dim": 80, "evicted": True, "window": 40, "sinks": True},
        {"tokens": 63, "steps": 63, "heads": 4, "kv": 1, "dim": 192, "chunk": 16},
        {"tokens": 111, "steps": 70, "heads": 4, "kv": 2, "ragged": True, "evicted": True, "softcap": 3.0},
        {"tokens": 111, "steps": 70, "heads": 2, "kv": 2, "dtype": "bfloat16"},
        {"tokens": 63, "steps": 5, "dtype": "float16", "pool": True},
        {"tokens": 63, "steps": 5, "dim": 256},
    ]
    cases += [{"gap": gap, "steps": 5} for gap in (20, 60)]
    answers = interpreted(FILE, "mass_parity", cases)
    assert len(answers) == len(cases)
    for case, worst in zip(cases, answers, strict=True):
        assert worst <= tolerance(case), (case, worst)


def test_one_wrong_number_would_show_in_the_mass() -> None:
    moved = interpreted(FILE, "mass_one_wrong")
    assert len(moved) == 6
    assert all(error > 10 * ROUNDING for error in moved.values()), moved


def test_mass_of_what_nobody_sees_and_of_many_queries() -> None:
    found = interpreted(FILE, "mass_special")
    assert found["unseen_key"]
    assert found["seen_key"]
    assert found["blind"] == found["no_queries"] == 0.0
    assert found["long"] < 75 * 1e-6


def test_a_card_in_use_runs_them_and_float64_stays_on_the_cpu() -> None:
    found = interpreted(FILE, "through_the_doors")
    assert found["worst"] <= ROUNDING
    assert found["counts"]["retained_attention"] == {"triton": 1, "cpu": 0, "reasons": {}}
    assert found["counts"]["attention_mass"]["triton"] == found["counts"]["attention_mass"]["cpu"] == 1
    assert any("float64" in reason for reason in found["counts"]["attention_mass"]["reasons"])


def test_without_triton_only_the_triton_modules_are_missing() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import kvtool.kernels.retained_attention.errors, kvtool.kernels.attention_mass, kvtool.replay\n"
        "for op in ('retained_attention', 'attention_mass'):\n"
        "    try:\n"
        "        __import__(f'kvtool.kernels.{op}.triton')\n"
        "    except ImportError as error:\n"
        "        print(error.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["triton", "triton"], done.stderr
