"""Asked: a metric that runs because it was named. What it hands out is checked, and its faults bear its name."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        looked_at = (errors, retained, *retained.events)
        shown = [value for one in looked_at for value in vars(one).values() if isinstance(value, Tensor)]
        before = [tensor._version for tensor in shown]
        with self._blamed(place):
            found: object = self.metric.partial(errors, geometry, retained)
        if [tensor._version for tensor in shown] != before:
            raise self._broken("changed what it was shown: work on a copy", place)
        if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
            raise self._broken("gave a partial that is no dictionary of tensors", place)
        for name, value in found.items():
            if not isinstance(name, str) or "/" in name or not name:
                raise self._broken(f"stores {name!r}: a name is text without /", place)
            if value.dtype not in STORABLE or value.layout != torch.strided:
                raise self._broken(f"stores {name} as {value.dtype}, which cannot be kept", place)
        wanted: list[tuple[str, tuple[int, ...]]] = [(name, (geometry.query_heads,)) for name in self.names("head")]
        wanted += [(name, ()) for name in self.names("layer")]
        for name, shape in wanted:
            if name not in found:
                raise self._broken(f"gave a partial without its column {name}", place)
            if tuple(found[name].shape) != shape or found[name].dtype not in NUMBERS:
                said = f"{[*found[name].shape]} {found[name].dtype}".replace("torch.", "")
                raise self._broken(f"gave {name} as {said}, expected {[*shape]} of numbers", place)
        return {name: value.detach().to("cpu").contiguous() for name, value in found.items()}

    def combine(self, partials: Sequence[dict[str, Tensor]]) -> dict[str, Number]:
        with self._blamed("layers put together"):
            found: object = self.metric.combine(partials)
        return self._numbers(found, "combine", "layers put together")

    def shares(self, partials: Sequence[dict[str, Tensor]]) -> dict[str, list[Tensor]]:
        place = "shares of layers"
        with self._blamed(place):
            found: object = self.metric.shares(partials)
        wanted = self.names("head", share=True)
        if not isinstance(found, dict) or sorted(found) != sorted(wanted):
            raise self._broken(f"shares out {_listed(found)}, expected {_listed(wanted)}", place)
        for name, layers in found.items():
            sound = isinstance(layers, list | tuple) and len(layers) == len(partials)
            if not sound or not all(isinstance(v, Tensor) and v.ndim == 1 and v.dtype in NUMBERS for v in layers):
                raise self._broken(f"shares out {name} as something other than one [H] per layer", place)
        return {name: [values.detach().to(torch.float64) for values in layers] for name, layers in found.items()}

    def average(self, cells: Sequence[dict[str, Number]]) -> dict[str, Number]:
        with self._blamed("mean over sequences"):
            found: object = self.metric.average(cells)
        return self._numbers(found, "average", "mean over sequences")

    def _numbers(self, found: object, what: str, place: str) -> dict[str, Number]:
        """Exactly the cell columns, as numbers or None."""
        wanted = self.names("cell")
        if not isinstance(found, dict) or sorted(map(str, found)) != sorted(wanted):
            raise self._broken(f"gave {_listed(found)} from {what}, expected {_listed(wanted)}", place)
        for name, value in found.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise self._broken(f"gave {name} from {what} as {type(value).__name__}, expected a number", place)
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in found.items()}

    @contextlib.contextmanager
    def _blamed(self, place: str) -> Iterator[None]:
        try:
            yield
        except KvtoolError:
            raise
        except (Exception, SystemExit) as error:
            words = " ".join(str(error).split())
            raise self._broken(f"failed: {type(error).__name__}: {words}", place) from error

    def _broken(self, what: str, place: str) -> KvtoolError:
        return KvtoolError("metric-broken", f"{self.who} {what} ({place})")


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
