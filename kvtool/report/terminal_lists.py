"""Terminal view (rich) of what there is: policies and metrics, kvtool's own and other packages'."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text


def policies_table(described: list[dict[str, Any]]) -> Table:
    """One line per policy."""
    table = Table(title="policies", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("idea")
    table.add_column("parameters")
    table.add_column("from")
    for policy in described:
        name = Text(policy["name"])
        if policy["oracle"]:
            name.append(" (oracle)", style="dim")
        idea = Text(policy["idea"]) if policy["fault"] is None else Text(policy["fault"], style="bold")
        table.add_row(name, idea, _parameters(policy), Text(policy["from"]))
    return table


def _parameters(described: dict[str, Any]) -> Text:
    return Text(", ".join(f"{p['name']}={p['default']}" for p in described["parameters"]))


def _parameter_table(described: dict[str, Any]) -> Table:
    table = Table("parameter", "type", "default")
    for parameter in described["parameters"]:
        table.add_row(*(Text(str(parameter[name])) for name in ("name", "type", "default")))
    return table


def policy_page(policy: dict[str, Any]) -> list[Any]:
    """Everything that one policy says of itself."""
    needs = ", ".join(policy["needs"]) or "keys and values only"
    return [
        Text(policy["name"], style="bold"),
        Text(policy["text"]),
        _parameter_table(policy),
        Text(f"needs: {needs}" + ("; reads the future (oracle)" if policy["oracle"] else "")),
        Text(f"from: {policy['from']}"),
    ]


_BETTER = {"lower": "lower", "higher": "higher", "none": "-"}
_TABLES = {"head": "rows", "layer": "layers", "cell": "cells"}


def metrics_table(described: list[dict[str, Any]]) -> Table:
    """One line per column, under its metric."""
    table = Table(title="metrics", title_justify="left")
    for name in ("metric", "column", "table", "unit", "better", "meaning", "from"):
        table.add_column(name, no_wrap=name in ("metric", "column"))
    for metric in described:
        table.add_section()
        if metric["fault"] is not None:
            table.add_row(metric["name"], "", "", "", "", Text(metric["fault"], style="bold"), Text(metric["from"]))
        for index, column in enumerate(metric["columns"]):
            first = index == 0 and metric["fault"] is None
            table.add_row(
                metric["name"] if first else "", *_column_cells(column), Text(metric["from"] if first else "")
            )
    return table


def metric_page(metric: dict[str, Any]) -> list[Any]:
    """Everything that one metric says of itself."""
    columns = Table("column", "table", "unit", "better", "meaning")
    for column in metric["columns"]:
        columns.add_row(*_column_cells(column))
    found: list[Any] = [
        Text(f"{metric['name']}, version {metric['version']}", style="bold"),
        Text(metric["text"]),
        columns,
    ]
    if metric["parameters"]:
        found.append(_parameter_table(metric))
    return [*found, Text(f"from: {metric['from']}")]


def _column_cells(column: dict[str, Any]) -> list[Text]:
    values = (
        column["name"],
        _TABLES[column["level"]],
        column["unit"],
        _BETTER[column["direction"]],
        column["meaning"],
    )
    return [Text(value) for value in values]
