"""The coverage that kvtool states is what a simulation finds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvtool.compare import statistics
from kvtool.compare.statistics import COVERAGE, LAWS

_spec = importlib.util.spec_from_file_location("coverage_study", Path(__file__).with_name("coverage_study.py"))
assert _spec is not None
assert _spec.loader is not None
study = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(study)

DRAWS = 1000


@pytest.mark.parametrize("count", COVERAGE)
def test_stated_coverage_is_found_again(count: int) -> None:
    draws = DRAWS if count < 16 else DRAWS // 4  # long rows are dear to resample
    for law, bootstrap, student in zip(LAWS, *COVERAGE[count], strict=True):
        found = study.covered(count, law, draws, seed=2, with_bca=False)
        for stated, method in ((bootstrap, "percentile"), (student, "Student's t")):
            error = (stated * (1 - stated) / draws) ** 0.5
            assert abs(found[method] - stated) < 4 * error + 0.01, (law, method, found[method], stated)


def test_the_table_in_words_is_the_table_in_numbers() -> None:
    page = statistics.__doc__ or ""
    lines = [line.split() for line in page.splitlines() if any(law in line for law in LAWS) and "," not in line]
    said = [[int(word) for word in line if word.isdecimal()] for line in lines]
    for method in (0, 1):
        for place, _ in enumerate(LAWS):
            stated = [round(100 * shares[method][place]) for shares in COVERAGE.values()]
            assert said[method * len(LAWS) + place] == stated
    assert list(COVERAGE) == list(study.COUNTS)


def test_bca_would_not_cover_better_with_few_sequences() -> None:
    for law in LAWS:
        found = study.covered(4, law, DRAWS)
        assert found["BCa"] < found["percentile"] + 0.03
        assert found["percentile"] < found["Student's t"]
