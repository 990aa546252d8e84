"""`kvtool policies [NAME]`: what can be replayed, and what its parameters mean."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    name: Annotated[str | None, typer.Argument(help="A policy, to see its idea, source and parameters.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the policies, or explain one."""
    from kvtool.cli.console import answer, hint, json_answer
    from kvtool.plugins import unreadable
    from kvtool.policies import describe_policies
    from kvtool.report.terminal_lists import policies_table, policy_page

    described = describe_policies([name] if name else None)
    if as_json:
        json_answer({"schema": "kvtool.policies/1", "policies": described})
    elif name:
        answer(*policy_page(described[0]))
    else:
        answer(policies_table(described))
    for policy in described:
        if policy["fault"]:
            hint("warning", policy["fault"])
    for sentence in unreadable():
        hint("warning", sentence)
    example = name or "snapkv"
    hint("next", f"kvtool replay run.zarr -p {example} -r 0.5")
