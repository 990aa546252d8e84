"""The design: every level alone, every two main axes together, nothing left out in silence."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kvtool.ablate.axes import AXES, COMPANION, choose
from kvtool.ablate.design import Change, Design, make_design
from kvtool.errors import KvtoolError
from kvtool.policies import policy_from_text

MANY = f"{Path(__file__).with_name('many_choices.py')}:ManyChoices"


@pytest.fixture
def design() -> Design:
    return make_design(MANY, AXES)


def test_every_axis_is_tried_and_the_references_own_level_is_not(design: Design) -> None:
    by_axis = {axis.name: [c.level for c in design.singles if c.axis == axis.name] for axis in AXES}
    assert by_axis.pop("shift") == []  # no exponential relevance
    for axis in AXES:
        if axis.name == "shift":
            continue
        tried = by_axis[axis.name]
        refused = ["directions=fisher"] if axis.name == "directions" else []
        own = 0 if axis.name == "protection" else 1
        assert len(tried) == len(axis.levels) - own - len(refused), axis.name
    assert by_axis["temperature"] == ["tau=1", "tau=0.5", "tau=2", "tau=5"]
    assert by_axis["relevance"][0] == "relevance=exp_cosine,tau=5 (with sensitivity=none)"
    assert design.own["temperature"] == "tau=10"
    assert design.own["leverage"] == "leverage=true"


def test_every_label_is_a_policy_with_the_changes_and_no_other(design: Design) -> None:
    _, reference = policy_from_text(design.reference.label)
    for changes, variant in design.variants.items():
        _, policy = policy_from_text(variant.label)
        words = [w for c in changes for w in c.level.replace(" (with ", ",").replace(")", "").split(",") if "=" in w]
        named = {word.split("=")[0] for word in words}
        for field in type(policy).__dataclass_fields__:
            changed = getattr(policy, field) != getattr(reference, field)
            assert not changed or field in named, (changes, field)
        for word in words:
            key, value = word.split("=")
            held = getattr(policy, key)
            assert held == (float(value) if isinstance(held, float) else value) or str(held).lower() == value


def test_every_two_main_axes_are_paired_or_the_pair_is_named(design: Design) -> None:
    first: dict[str, Change] = {}
    for change in design.singles:
        first.setdefault(change.axis, change)
    main = [axis.name for axis in AXES if axis.paired]
    notes = "\n".join(design.notes)
    assert len(main) >= 12
    for a, b in itertools.combinations(main, 2):
        paired = (first[a], first[b]) in design.pairs
        named = f"{a} with {b}" in notes or f"{first[a].level} with {first[b].level}" in notes
        assert paired != named, (a, b)
    assert "leverage=false with selector=greedy is left out" in notes
    assert "temperature with relevance" in notes


def test_the_companion_meets_every_level(design: Design) -> None:
    assert design.companion == Change(COMPANION, "tau=1")
    for change in design.singles:
        if change.axis not in (COMPANION, "relevance"):
            assert (design.companion, change) in design.pairs


def test_no_variant_is_tried_twice(design: Design) -> None:
    points = [variant.point for variant in design.variants.values()]
    assert len(set(points)) == len(points)


def test_contexts_differ_in_the_change_and_nothing_else(design: Design) -> None:
    for change in design.singles:
        contexts = design.contexts(change)
        assert contexts[0][0] is design.reference
        for without, with_ in contexts:
            assert set(with_.changes) - set(without.changes) == {change}
            assert set(without.changes) < set(with_.changes)
    assert len(design.contexts(Change("ridge", "ridge=relative"))) == 12  # the reference and eleven other main axes
    assert len(design.contexts(Change("ridge", "ridge=0.01"))) == 2  # the reference and tau=1
    assert len(design.contexts(Change("temperature", "tau=2"))) == 1


def test_without_interactions_only_single_changes_stand() -> None:
    design = make_design(MANY, AXES, interactions=False)
    assert design.pairs == []
    assert len(design.variants) == 1 + len(design.singles)


def test_chosen_axes_are_tried_in_all_pairs_of_all_levels() -> None:
    design = make_design(MANY, choose("ridge,temperature"), every_pair=True)
    assert [c.axis for c in design.singles] == ["temperature"] * 4 + ["ridge"] * 2
    assert len(design.pairs) == 8
    assert all(len(design.contexts(change)) == (3 if change.axis == "temperature" else 5) for change in design.singles)


def test_the_reference_decides_what_the_alternatives_are() -> None:
    design = make_design(f"{MANY}:tau=1,blend=0.5", choose("temperature,blend"), every_pair=True)
    assert [c.level for c in design.singles] == [
        "tau=10",
        "tau=0.5",
        "tau=2",
        "tau=5",
        "blend=0.5,floor=leave_one_out",
        "blend=1",
    ]


def test_an_axis_may_act_in_some_references_only() -> None:
    design = make_design(f"{MANY}:relevance=exp_dot,sensitivity=none", choose("shift,sensitivity"))
    assert [c.level for c in design.singles] == [
        "sensitivity=saturating (with relevance=softmax) (with tau=1)",
        "shift=none",
    ]
    assert "shift is left out: it acts only with relevance=exp_dot or exp_cosine" in make_design(MANY, AXES).notes


def test_what_a_trace_cannot_serve_goes_with_its_pairs(design: Design) -> None:
    gone = design.variants[(Change("statistics", "statistics=prompt"),)].label
    left = design.without({gone: "layer 3 holds no queries"})
    assert "statistics=prompt is left out: layer 3 holds no queries" in left.notes
    assert not [changes for changes in left.variants if Change("statistics", "statistics=prompt") in changes]
    assert len(left.variants) == len(design.variants) - 2  # alone and with tau=1
    both = design.variants[(Change("temperature", "tau=1"), Change("group", "group=max"))].label
    left = design.without({both: "no"})
    assert "tau=1 with group=max is left out: no" in left.notes
    assert len(left.variants) == len(design.variants) - 1


def test_a_reference_that_cannot_be_served_is_refused(design: Design) -> None:
    with pytest.raises(KvtoolError, match="cannot be replayed: no rotation") as caught:
        design.without({design.reference.label: "no rotation"})
    assert caught.value.code == "trace-lacks"


def test_unknown_axes_list_the_known() -> None:
    with pytest.raises(KvtoolError, match="no axis 'temprature'") as caught:
        choose("temprature")
    assert "did you mean temperature?" in str(caught.value.hint)
    assert all(axis.name in str(caught.value.hint) for axis in AXES)
    with pytest.raises(KvtoolError, match="names no axis"):
        choose(" , ")


def test_a_policy_without_these_choices_is_refused() -> None:
    with pytest.raises(KvtoolError, match="snapkv has none of these axes") as caught:
        make_design("snapkv", choose("temperature,leverage"))
    assert caught.value.code == "usage"
    with pytest.raises(KvtoolError, match="no parameter 'temper'"):
        make_design("jacap:temper=1", AXES)
