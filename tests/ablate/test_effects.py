"""Effects and interactions by hand: additive data, a planted interaction, dumb loops, Student's t in closed form."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from kvtool.ablate.axes import AXES
from kvtool.ablate.design import Change, Design, Variant, make_design
from kvtool.ablate.effects import Values, interaction_entries, interval, main_effects, steps, unit_of

MANY = f"{Path(__file__).with_name('many_choices.py')}:ManyChoices"
TAU, RIDGE = Change("temperature", "tau=1"), Change("ridge", "ridge=relative")


@pytest.fixture(scope="module")
def design() -> Design:
    return make_design(MANY, AXES)


def values(sequences: np.ndarray, layers: int = 3) -> Values:
    """The same number in every layer."""
    return Values(sequences, np.repeat(sequences[:, None], layers, axis=1))


def additive(design: Design, sequences: int, planted: dict[frozenset[Change], float] | None = None) -> tuple:
    """Each change adds its own number (multiples of 1/64: sums are exact), each sequence has its own level."""
    sizes = {change: (place % 7 - 3) / 64 for place, change in enumerate(design.singles)}
    base = np.arange(sequences) + 1.0
    measured = {}
    for changes, variant in design.variants.items():
        extra = (planted or {}).get(frozenset(changes), 0.0)
        measured[variant.point] = values(base + sum(sizes[c] for c in changes) + extra)
    return sizes, measured


def test_additive_data_gives_exact_effects_and_no_interaction(design: Design) -> None:
    sizes, measured = additive(design, 3)
    for entry in main_effects(design, measured):
        size = sizes[Change(entry["axis"], entry["level"])]
        for column in ("effect", "low", "high", "at_reference", "lowest", "highest"):
            assert entry[column] == size, (entry["level"], column)
        assert entry["without"] == 2.0
        assert entry["with"] == 2.0 + size
        assert entry["layers_agreeing"] == (3 if size else None)
    for entry in interaction_entries(design, measured):
        assert (entry["interaction"], entry["low"], entry["high"]) == (0.0, 0.0, 0.0)


def test_a_planted_interaction_is_found_with_its_exact_size(design: Design) -> None:
    sizes, measured = additive(design, 3, {frozenset((TAU, RIDGE)): -0.5})
    found = interaction_entries(design, measured)
    first = found[0]
    assert (first["level_a"], first["level_b"], first["rank"]) == ("tau=1", "ridge=relative", 1)
    assert (first["interaction"], first["low"], first["high"]) == (-0.5, -0.5, -0.5)
    assert (first["a_alone"], first["a_with_b"]) == (sizes[TAU], sizes[TAU] - 0.5)
    assert (first["b_alone"], first["b_with_a"]) == (sizes[RIDGE], sizes[RIDGE] - 0.5)
    assert first["together"] == 2.0 + sizes[TAU] + sizes[RIDGE] - 0.5
    assert all(entry["interaction"] == 0.0 for entry in found[1:])
    ridge = next(e for e in main_effects(design, measured) if e["level"] == "ridge=relative")
    assert ridge["contexts"] == 12
    assert ridge["effect"] == pytest.approx(sizes[RIDGE] - 0.5 / 12, abs=1e-15)
    assert (ridge["lowest"], ridge["lowest_with"]) == (sizes[RIDGE] - 0.5, "tau=1")
    assert ridge["with_companion"] == sizes[RIDGE] - 0.5
    assert ridge["at_reference"] == sizes[RIDGE]


def test_effects_equal_a_dumb_loop(design: Design) -> None:
    generator = np.random.default_rng(7)
    sequences, layers = 4, 5
    measured = {}
    for variant in design.variants.values():
        per_layer = generator.random((sequences, layers)) + 0.1
        measured[variant.point] = Values(per_layer.mean(1), per_layer)
    t_of_3 = 3.182446305284263
    mains = list(dict.fromkeys(c.axis for c in design.singles))
    paired = {axis.name for axis in AXES if axis.paired}
    company = [next(c for c in design.singles if c.axis == axis) for axis in mains if axis in paired]
    for entry in main_effects(design, measured):
        change = Change(entry["axis"], entry["level"])
        differences = []
        for other in [None, *company]:
            without = () if other is None else (other,)
            for with_ in ((*without, change), (change, *without)):
                if with_ in design.variants and other != change:
                    a, b = design.variants[without], design.variants[with_]
                    differences.append((measured[a.point], measured[b.point]))
                    break
        assert entry["contexts"] == len(differences)
        per_sequence = []
        for sequence in range(sequences):
            total = 0.0
            for a, b in differences:
                total += b.sequences[sequence] - a.sequences[sequence]
            per_sequence.append(total / len(differences))
        mean = sum(per_sequence) / sequences
        spread = math.sqrt(sum((d - mean) ** 2 for d in per_sequence) / (sequences - 1) / sequences)
        assert entry["effect"] == pytest.approx(mean, abs=1e-14)
        assert entry["low"] == pytest.approx(mean - t_of_3 * spread, abs=1e-12)
        assert entry["high"] == pytest.approx(mean + t_of_3 * spread, abs=1e-12)
        logs = [math.log(b.sequences.mean() / a.sequences.mean()) for a, b in differences]
        assert entry["factor"] == pytest.approx(math.exp(sum(logs) / len(logs)), abs=1e-12)
        agreeing = 0
        for layer in range(layers):
            moved = sum((b.layers[s, layer] - a.layers[s, layer]) for a, b in differences for s in range(sequences))
            agreeing += (moved > 0) == (mean > 0)
        assert entry["layers_agreeing"] == agreeing


def test_effects_are_ranked_by_size_whatever_the_sign(design: Design) -> None:
    _, measured = additive(design, 2)
    sizes = [abs(entry["effect"]) for entry in main_effects(design, measured)]
    assert sizes == sorted(sizes, reverse=True)
    assert [entry["rank"] for entry in main_effects(design, measured)] == list(range(1, len(sizes) + 1))


@pytest.mark.parametrize(
    ("differences", "quantile"),
    [
        ([1.0, 3.0], 12.706204736174698),  # tan(0.475·pi)
        ([1.0, 2.0, 3.0], 4.302652729749464),  # 0.95·sqrt(2 / (1 - 0.95^2))
        ([1.0, 2.0, 3.0, 4.0, 6.0], 2.776445105197793),
    ],
)
def test_intervals_are_students(differences: list[float], quantile: float) -> None:
    low, high = interval(np.array(differences))
    mean = sum(differences) / len(differences)
    variance = sum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
    half = quantile * math.sqrt(variance / len(differences))
    assert low == pytest.approx(mean - half, rel=1e-9)
    assert high == pytest.approx(mean + half, rel=1e-9)


def test_the_quantiles_above_are_closed_forms() -> None:
    assert math.tan(0.475 * math.pi) == pytest.approx(12.706204736174698, rel=1e-12)
    assert 0.95 * math.sqrt(2 / (1 - 0.95**2)) == pytest.approx(4.302652729749464, rel=1e-12)


def test_one_difference_has_no_interval() -> None:
    assert interval(np.array([1.0])) == (None, None)


def test_one_sequence_pairs_its_layers(design: Design) -> None:
    measured = {}
    for changes, variant in design.variants.items():
        layers = np.array([[1.0, 2.0, np.nan, 4.0]]) - (0.25 * np.array([[1, 2, 3, 3]]) if TAU in changes else 0)
        measured[variant.point] = Values(np.nanmean(layers, axis=1), layers)
    assert unit_of(measured) == "layers"
    entry = next(e for e in main_effects(design, measured) if e["level"] == "tau=1")
    assert (entry["paired_over"], entry["pairs"], entry["layers"], entry["layers_agreeing"]) == ("layers", 3, 3, 3)
    assert entry["effect"] == pytest.approx(-0.5, abs=1e-15)
    half = 4.302652729749464 * 0.25 / math.sqrt(3)
    assert entry["low"] == pytest.approx(-0.5 - half, rel=1e-9)
    assert entry["high"] == pytest.approx(-0.5 + half, rel=1e-9)


def test_steps_are_differences_between_neighbours() -> None:
    path = [("start", Variant((), "a")), ("one more", Variant((), "b")), ("and back", Variant((), "a"))]
    measured = {("a", None): values(np.array([1.0, 2.0])), ("b", None): values(np.array([0.5, 1.0]))}
    there, back = steps(path, measured)
    assert (there["level"], there["effect"], there["without"], there["with"]) == ("one more", -0.75, 1.5, 0.75)
    assert (back["effect"], back["rank"], back["factor"]) == (0.75, None, 2.0)


def test_an_error_of_zero_has_no_factor() -> None:
    path = [("start", Variant((), "a")), ("cured", Variant((), "b"))]
    measured = {("a", None): values(np.array([1.0, 2.0])), ("b", None): values(np.zeros(2))}
    (only,) = steps(path, measured)
    assert only["factor"] is None
