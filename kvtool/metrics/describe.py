"""What each metric says of itself, for `kvtool metrics`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvtool.describe import described, has_defaults, words_of
from kvtool.errors import KvtoolError
from kvtool.metrics.declared import fault_of
from kvtool.metrics.metric import Metric
from kvtool.metrics.table import SHELF

_UNKNOWN: dict[str, Any] = {"version": None, "idea": "", "text": "", "parameters": [], "columns": []}


def describe_metrics(names: list[str] | None = None) -> list[dict[str, Any]]:
    """Name, version, documentation, parameters and columns of the named metrics, or of all: kvtool's and plug-ins.

    Returns:
        One entry a metric. `from` is the package and version, or the file. In a list of all, `fault` says why a name
        cannot be used, and is None where it can.

    Raises:
        KvtoolError: `metric-unknown`, `metric-broken`, `plugin-broken` or `plugin-twice` for a name that was asked for.
    """
    found = described(SHELF, Metric, names, _of, _UNKNOWN)
    for entry in found:
        wrong = entry.pop("wrong", None)
        if wrong is not None and entry["fault"] is None:
            fault = f"metric {entry['name']} of {entry['from']} {wrong}"
            if names:
                raise KvtoolError("metric-broken", fault)
            entry["fault"] = fault
    return found


def _of(cls: type[Metric]) -> dict[str, Any]:
    made = cls() if has_defaults(cls) else cls  # columns may depend on parameters
    own = cls.__module__.startswith("kvtool.metrics.")
    wrong = fault_of(made, built_in=own)
    columns = [] if wrong else [asdict(column) for column in made.columns]
    return {"version": made.version, **words_of(cls), "columns": columns, "wrong": wrong}
