"""Design: which variants of a policy a study replays. All single changes of a reference, and chosen pairs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvtool.ablate.axes import COMPANION, Axis, Level
from kvtool.errors import KvtoolError
from kvtool.policies import Policy, policy_from_text
from kvtool.registry import spell, split_spec


class Change(NamedTuple):
    """One axis set to another level than the reference's."""

    axis: str
    level: str


@dataclass(frozen=True)
class Variant:
    """A policy under a protection: the reference with no, one or two changes.

    Attributes:
        label: the policy as the user may type it again.
        protected: share of the tokens before the event, in percent; None is the run's own protection.
    """

    changes: tuple[Change, ...]
    label: str
    protected: str | None = None

    @property
    def point(self) -> tuple[str, str | None]:
        """What is replayed: two variants may be the same point."""
        return self.label, self.protected


@dataclass(frozen=True, eq=False)
class Design:
    """The variants of one study.

    Attributes:
        variants: by their changes (in the order of the axes); `()` is the reference.
        own: axis -> the reference's own level, as words.
        company: the changes in whose company a level's effect is averaged.
        companion: the first alternative of the companion axis, if it is studied.
        notes: what was left out, and why.
    """

    variants: dict[tuple[Change, ...], Variant]
    own: dict[str, str]
    company: frozenset[Change]
    companion: Change | None
    notes: list[str] = field(default_factory=list)

    @property
    def reference(self) -> Variant:
        return self.variants[()]

    @property
    def singles(self) -> list[Change]:
        return [changes[0] for changes in self.variants if len(changes) == 1]

    @property
    def pairs(self) -> list[tuple[Change, Change]]:
        return [(changes[0], changes[1]) for changes in self.variants if len(changes) == 2]

    def contexts(self, change: Change) -> list[tuple[Variant, Variant]]:
        """(without, with): at the reference, and beside each change of `company` that it was tried with."""
        found = [(self.reference, self.variants[(change,)])]
        for a, b in self.pairs:
            if change in (a, b):
                other = b if change == a else a
                if other not in self.company:
                    continue
                found.append((self.variants[(other,)], self.variants[(a, b)]))
        return found

    def without(self, missing: Mapping[str, str]) -> Design:
        """The same design without the policies `missing` (label -> reason), each level or pair named in a note.

        Raises:
            KvtoolError: `trace-lacks` where the reference is among them.
        """
        if self.reference.label in missing:
            reason = missing[self.reference.label]
            raise KvtoolError("trace-lacks", f"the reference {self.reference.label} cannot be replayed: {reason}")
        notes, gone = list(self.notes), set()
        for changes, variant in self.variants.items():
            if variant.label in missing:
                gone.add(changes)
                if not any((change,) in gone for change in changes if len(changes) == 2):
                    notes.append(f"{_said(changes)} is left out: {missing[variant.label]}")
        kept = {
            changes: variant
            for changes, variant in self.variants.items()
            if changes not in gone and not any((change,) in gone for change in changes)
        }
        companion = self.companion if (self.companion,) in kept else None
        return replace(self, variants=kept, companion=companion, notes=notes)


def make_design(reference: str, axes: Iterable[Axis], *, interactions: bool = True, every_pair: bool = False) -> Design:
    """All single changes of `reference` on these axes, and pairs of them.

    Pairs are the first alternatives of every two paired axes, and the first alternative of the companion axis with
    every level; with `every_pair` all levels of every two axes.

    Raises:
        KvtoolError: `policy-unknown` or `policy-parameter` for the reference; `usage` where none of the axes is one
            of its parameters.
    """
    name, policy = policy_from_text(reference)
    base = Variant((), spell(name, policy))
    variants: dict[tuple[Change, ...], Variant] = {(): base}
    own, notes = {}, []
    levels: dict[Change, tuple[Axis, Level]] = {}
    first: dict[str, Change] = {}
    for axis in axes:
        own[axis.name] = own_level(policy, axis)
        if (idle := _idle(name, policy, axis)) is not None:
            notes.append(f"{axis.name} is left out: {idle}")
            continue
        for level in axis.levels:
            if level.protected is None and _is_own(base.label, level):
                continue
            try:
                built, label = _applied(base.label, level)
            except KvtoolError as error:
                notes.append(f"{level.name} is left out: {error.message}")
                continue
            change = Change(axis.name, _name_of(level, built))
            if change not in levels:
                levels[change] = axis, built
                first.setdefault(axis.name, change)
                variants[(change,)] = Variant((change,), label, built.protected)
    if not levels:
        raise KvtoolError(
            "usage",
            f"{base.label} has none of these axes: {', '.join(own)}",
            "choose a reference of the capacity family, such as jacap",
        )
    if interactions:
        clashing: dict[tuple[str, str], None] = {}
        for a, b in _wanted_pairs(levels, first, every_pair):
            variant = _pair(base.label, a, b, levels, notes, clashing)
            if variant is not None:
                variants[(a, b)] = variant
        if clashing:
            said = ", ".join(f"{a} with {b}" for a, b in clashing)
            notes.append(f"pairs that set the same parameter twice are left out: {said}")
    main = levels if every_pair else (c for c in first.values() if levels[c][0].paired)
    return Design(variants, own, frozenset(main), first.get(COMPANION), notes)


def own_level(policy: Policy, axis: Axis) -> str:
    """The reference's own choice on `axis`, as words."""
    keys = [key for level in axis.levels[:1] for key in level.parameters]
    known = [f"{key}={_word(getattr(policy, key))}" for key in keys if hasattr(policy, key)]
    return ",".join(known) or "as run"


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _idle(name: str, policy: Policy, axis: Axis) -> str | None:
    """Why the axis does nothing in this policy, or None."""
    keys = dict.fromkeys(key for level in axis.levels for key in level.parameters)
    absent = [key for key in keys if not hasattr(policy, key)]
    if absent:
        return f"{name} has no parameter {', '.join(absent)}"
    for key, values in axis.when.items():
        if getattr(policy, key, None) not in values:
            return f"it acts only with {key}={' or '.join(values)}"
    return None


def _name_of(level: Level, built: Level) -> str:
    extra = {key: value for key, value in built.sets.items() if key not in level.sets}
    return level.name + "".join(f" (with {key}={value})" for key, value in extra.items())


def _applied(base: str, level: Level) -> tuple[Level, str]:
    """(the level with what had to join, the label of the policy). Raises KvtoolError where it is refused."""
    try:
        return level, _label(base, level.sets)
    except KvtoolError:
        if not level.beside:
            raise
        built = replace(level, along={**level.along, **level.beside})
        return built, _label(base, built.sets)


def _is_own(base: str, level: Level) -> bool:
    """Whether the reference is at this level."""
    try:
        return _label(base, level.parameters) == base
    except KvtoolError:
        return False


def _label(base: str, parameters: Mapping[str, str]) -> str:
    spec = split_spec(base)
    merged = {**spec.parameters, **parameters}
    text = spec.name + (":" + ",".join(f"{key}={value}" for key, value in merged.items()) if merged else "")
    return spell(*policy_from_text(text))


def _wanted_pairs(
    levels: Mapping[Change, tuple[Axis, Level]], first: Mapping[str, Change], every_pair: bool
) -> list[tuple[Change, Change]]:
    """Pairs of changes on two axes, in the order of the axes."""
    companion = first.get(COMPANION)

    def wanted(a: Change, b: Change) -> bool:
        paired = all(levels[c][0].paired and first[c.axis] == c for c in (a, b))
        return every_pair or paired or companion in (a, b)

    return [(a, b) for a, b in itertools.combinations(levels, 2) if a.axis != b.axis and wanted(a, b)]


def _pair(
    base: str,
    a: Change,
    b: Change,
    levels: Mapping[Change, tuple[Axis, Level]],
    notes: list[str],
    clashing: dict[tuple[str, str], None],
) -> Variant | None:
    """Both changes at once; None where they contradict each other, which is noted."""
    one, two = levels[a][1], levels[b][1]
    if one.sets.keys() & two.sets.keys():
        clashing[a.axis, b.axis] = None
        return None
    try:
        label = _label(base, {**one.sets, **two.sets})
    except KvtoolError as error:
        notes.append(f"{_said((a, b))} is left out: {error.message}")
        return None
    return Variant((a, b), label, one.protected if one.protected is not None else two.protected)


def _said(changes: tuple[Change, ...]) -> str:
    return " with ".join(change.level for change in changes)
