"""Asked: a metric that runs because it was named. What it hands out is checked, and its faults bear its name."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.layer import Geometry
from kvtool.manifest import parameters, source_digest
from kvtool.metrics.declared import clash_of, fault_of
from kvtool.metrics.metric import Column, Metric, Number
from kvtool.metrics.step_errors import StepErrors
from kvtool.metrics.table import BUILT_IN, SHELF, metric_from_text
from kvtool.registry import split_spec
from kvtool.retained import RetainedSet
from kvtool.shown import copied, unchanged

T = TypeVar("T")
LONGEST_NAME = 100  # of a stored tensor
NUMBERS = (torch.float32, torch.float64, torch.int32, torch.int64)
STORABLE = (*NUMBERS, torch.float16, torch.int16, torch.int8, torch.uint8, torch.bool)


@dataclass(frozen=True, eq=False)
class Asked(Metric):
    """`metric` with every answer checked.

    Attributes:
        label: as the user may type it again.
        package: {"name", "version"} of the package that gives it, None where a file does.

    Raises (from every method):
        KvtoolError: code `metric-broken` naming metric, package and layer.
    """

    metric: Metric = field(default_factory=Metric)
    label: str = ""
    package: dict[str, str] | None = None

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.metric.name

    @property
    def version(self) -> int:  # type: ignore[override]
        return self.metric.version

    @property
    def columns(self) -> tuple[Column, ...]:  # type: ignore[override]
        return self.metric.columns

    @property
    def who(self) -> str:
        """For messages: the metric, and the package that gives it."""
        if self.package is None:
            return f"metric {self.label}"
        return f"metric {self.label} of package {self.package['name']} {self.package['version']}"

    def names(self, level: str, *, share: bool = False) -> list[str]:
        """Its columns of one level, shares or others."""
        return [column.name for column in self.columns if column.level == level and column.share == share]

    def describe(self) -> dict[str, Any]:
        """What a manifest says of it."""
        return {
            "label": self.label,
            "name": self.name,
            "version": self.version,
            "class": type(self.metric).__qualname__,
            "source": source_digest(type(self.metric)),
            "package": self.package,
            "parameters": parameters(self.metric),
            "columns": [
                {name: getattr(column, name) for name in ("name", "level", "unit", "direction", "meaning", "share")}
                for column in self.columns
            ],
        }

    def partial(self, errors: StepErrors, geometry: Geometry, retained: RetainedSet) -> dict[str, Tensor]:
        place = f"layer {geometry.layer}"
        with self._kept_whole(place, (errors, geometry, retained)) as shown:
            found: object = self.metric.partial(*shown)
        if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
            raise self._broken("gave a partial that is no dictionary of tensors", place)
        stored = {name: self._stored(name, value, place) for name, value in found.items()}
        wanted: list[tuple[str, tuple[int, ...]]] = [(name, (geometry.query_heads,)) for name in self.names("head")]
        wanted += [(name, ()) for name in self.names("layer")]
        for name, shape in wanted:
            if name not in stored:
                raise self._broken(f"gave a partial without its column {name}", place)
            if tuple(stored[name].shape) != shape or stored[name].dtype not in NUMBERS:
                said = f"{[*stored[name].shape]} {stored[name].dtype}".replace("torch.", "")
                raise self._broken(f"gave {name} as {said}, expected {[*shape]} of numbers", place)
        return stored

    def _stored(self, name: object, value: Tensor, place: str) -> Tensor:
        """A copy that NumPy can write, since the metric may use the same memory for the next layer."""
        if not isinstance(name, str) or "/" in name or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
            raise self._broken(f"stores {name!r}: a name is text without /, of at most {LONGEST_NAME} letters", place)
        with self._blamed(f"storing {name}, {place}"):
            if value.dtype not in STORABLE or value.layout != torch.strided or value.is_meta:
                odd = value.dtype if value.layout == torch.strided else value.layout
                kind = "a tensor without data" if value.is_meta else odd
                raise self._broken(f"stores {name} as {kind}, which cannot be kept", place)
            return torch.from_numpy(value.detach().cpu().resolve_neg().numpy().copy())

    def combine(self, partials: Sequence[dict[str, Tensor]]) -> dict[str, Number]:
        place = "layers put together"
        with self._kept_whole(place, list(partials)) as shown:
            found: object = self.metric.combine(shown)
        return self._numbers(found, "combine", place)

    def shares(self, partials: Sequence[dict[str, Tensor]]) -> dict[str, list[Tensor]]:
        place = "shares of layers"
        with self._kept_whole(place, list(partials)) as shown:
            found: object = self.metric.shares(shown)
        wanted = self.names("head", share=True)
        if not isinstance(found, dict) or not _are(found, wanted):
            raise self._broken(f"shares out {_listed(found)}, expected {_listed(wanted)}", place)
        for name, layers in found.items():
            sound = isinstance(layers, list | tuple) and len(layers) == len(partials)
            if not sound or not all(isinstance(v, Tensor) and v.ndim == 1 and v.dtype in NUMBERS for v in layers):
                raise self._broken(f"shares out {name} as something other than one [H] per layer", place)
        return {name: [self._stored(name, v, place).double() for v in layers] for name, layers in found.items()}

    def expect_heads(self, shares: dict[str, list[Tensor]], heads: Sequence[int]) -> None:
        """Refuse `shares` that have not one value per query head, `heads` of each layer."""
        for name, layers in shares.items():
            if (said := [len(values) for values in layers]) != list(heads):
                raise self._broken(f"shares out {name} as {said} numbers, expected {list(heads)}", "shares of layers")

    def average(self, cells: Sequence[dict[str, Number]]) -> dict[str, Number]:
        place = "mean over sequences"
        with self._kept_whole(place, list(cells)) as shown:
            found: object = self.metric.average(shown)
        return self._numbers(found, "average", place)

    def _numbers(self, found: object, what: str, place: str) -> dict[str, Number]:
        """Exactly the cell columns, as numbers or None."""
        wanted = self.names("cell")
        if not isinstance(found, dict) or not _are(found, wanted):
            raise self._broken(f"gave {_listed(found)} from {what}, expected {_listed(wanted)}", place)
        for name, value in found.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise self._broken(f"gave {name} from {what} as {type(value).__name__}, expected a number", place)
        with self._blamed(f"numbers from {what}, {place}"):  # a whole number may be more than a float holds
            known = {name: None if value is None else float(value) for name, value in found.items()}
        return {name: None if value is None or math.isnan(value) else value for name, value in known.items()}

    @contextlib.contextmanager
    def _kept_whole(self, place: str, values: T) -> Iterator[T]:
        """A copy for the metric to look at; what it did to it is refused, and reaches nobody else."""
        shown = copied(values)
        with self._blamed(place):
            yield shown
        if not unchanged(shown, values):
            raise self._broken("changed what it was shown: work on a copy", place)

    @contextlib.contextmanager
    def _blamed(self, place: str) -> Iterator[None]:
        try:
            yield
        except KvtoolError:
            raise
        except (Exception, SystemExit) as error:
            raise self._broken(f"failed: {type(error).__name__}: {error}", place) from error

    def _broken(self, what: str, place: str) -> KvtoolError:
        return KvtoolError("metric-broken", f"{self.who} {' '.join(what.split())} ({place})")


def _are(found: dict[Any, Any], wanted: list[str]) -> bool:
    """Whether these are the names, and text."""
    return all(isinstance(name, str) for name in found) and sorted(found) == sorted(wanted)


def _listed(found: object) -> str:
    names = sorted(map(str, found)) if isinstance(found, dict | list) else [type(found).__name__]
    return ", ".join(names) or "nothing"


@contextlib.contextmanager
def in_sequence(index: int | None) -> Iterator[None]:
    """A metric's faults inside name the sequence too."""
    try:
        yield
    except KvtoolError as error:
        if error.code != "metric-broken" or index is None or not error.message.endswith(")"):
            raise
        message = f"{error.message[:-1]}, sequence {index})"
        raise KvtoolError(error.code, message, error.hint) from (error.__cause__ or error)


def asked_metrics(texts: Sequence[str]) -> tuple[Asked, ...]:
    """The named metrics, each once; kvtool's own run always and need no asking.

    Raises:
        KvtoolError: `metric-unknown`, `metric-parameter`, `plugin-broken`, `plugin-twice`; `metric-broken` for names
            or columns that are taken.
    """
    found: dict[str, Asked] = {}
    for text in texts:
        label, metric = metric_from_text(text)
        word = split_spec(text, "metric").name
        if word in BUILT_IN:
            if label != word:
                raise KvtoolError("usage", f"{word} runs always, as it is", "--kl-window N widens predicted_kl")
            continue
        asked = Asked(metric=metric, label=label, package=SHELF.package(word))
        if (fault := fault_of(metric)) is not None:
            raise KvtoolError("metric-broken", f"{asked.who} {fault}")
        if asked.package is not None and metric.name != word:
            raise KvtoolError("metric-broken", f"{asked.who} calls itself {metric.name}: both names must be one")
        found.setdefault(label, asked)
    if (clash := clash_of((asked.who, asked) for asked in found.values())) is not None:
        raise KvtoolError("usage", clash, "ask for one of them at a time")
    return tuple(found.values())
