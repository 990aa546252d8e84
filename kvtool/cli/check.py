"""`kvtool check`: hold what policies do on stored traces against a baseline; exit 1 where something moved."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def command(
    suite: Annotated[Path, typer.Argument(metavar="SUITE.toml", help="What is checked: docs/ci.md shows one.")],
    update: Annotated[bool, typer.Option("--update", help="Accept what is found: write the baseline.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="What the baseline lacks is a failure too.")] = False,
    only: Annotated[list[str] | None, typer.Option("--only", help="Name of a job; repeatable. Default: all.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder that keeps the result of each job, for kvtool diff.")
    ] = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Also write a JUnit XML file.")] = None,
    annotations: Annotated[
        str | None,
        typer.Option(help="github: findings as annotations on stderr; none. Default: github inside GitHub Actions."),
    ] = None,
    no_plugins: Annotated[
        bool, typer.Option("--no-plugins", help="Leave out policies and metrics of other packages.")
    ] = False,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: torch's choice.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace finished results in the output folder.")] = False,
) -> int:
    """Replay a suite of stored traces and compare decisions and numbers with its baseline. Exit 1: something moved."""
    from kvtool import plugins
    from kvtool.check import check
    from kvtool.check.annotations import github_annotations, github_error
    from kvtool.check.junit import writable, write_junit
    from kvtool.cli.console import answer, hint, json_answer, progress_on_terminal, use_threads
    from kvtool.errors import KvtoolError
    from kvtool.report.terminal_check import check_views

    annotate = _annotates(annotations)
    use_threads(threads)
    try:
        if junit is not None:
            writable(junit)
        with plugins.switched_off(no_plugins), progress_on_terminal("check") as progress:
            found = check(
                suite, update=update, strict=strict, only=only or (), output=output, force=force, progress=progress
            )
        if junit is not None:
            write_junit(found, junit)
    except KvtoolError as error:
        if annotate:
            print(github_error(suite, error), file=sys.stderr)
        raise
    if as_json:
        json_answer(found.document())
    else:
        answer(*check_views(found))
    for job in found.jobs:
        for warning in job.warnings:
            hint("warning", f"{job.name}: {warning}")
    for line in github_annotations(found) if annotate else ():
        print(line, file=sys.stderr)
    counts = found.counts()
    if found.updated:
        hint("next", f"read what moved in {found.baseline} and commit it")
    elif not found.ok and output is None:
        hint("next", f"kvtool check {suite} -o results keeps the results for kvtool diff; --update accepts them")
    elif not found.ok:
        hint("next", f"kvtool check {suite} --update accepts what moved")
    elif "better" in counts or "new" in counts:
        hint("next", f"kvtool check {suite} --update records what is better or new")
    return 0 if found.ok else 1


def _annotates(word: str | None) -> bool:
    """Whether findings are annotated for GitHub.

    Raises:
        KvtoolError: code `usage` for another word.
    """
    from kvtool.errors import KvtoolError
    from kvtool.registry import did_you_mean

    if word not in (None, "github", "none"):
        raise KvtoolError("usage", f"--annotations {word} is unknown", did_you_mean(str(word), ["github", "none"]))
    return word == "github" or (word is None and os.environ.get("GITHUB_ACTIONS") == "true")
