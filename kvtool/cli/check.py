"""`kvtool check`: hold what policies do on stored traces against a baseline; exit 1 where something moved."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvtool.check import Check
    from kvtool.errors import KvtoolError


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
    force: Annotated[
        bool, typer.Option("--force", help="Replace results of -o; with --update a bad baseline.")
    ] = False,
) -> int:
    """Replay a suite of stored traces and compare decisions and numbers with its baseline. Exit 1: something moved."""
    from rich.markup import escape

    from kvtool import plugins
    from kvtool.check import check
    from kvtool.check.annotations import github_annotations, github_error
    from kvtool.check.junit import write_junit, write_junit_error
    from kvtool.check.places import report_target
    from kvtool.cli.console import answer, hint, json_answer, progress_on_terminal, use_threads
    from kvtool.errors import KvtoolError
    from kvtool.report.terminal_check import check_views
    from kvtool.words import printable

    annotate, report = _annotates(None), None
    try:
        report = None if junit is None else report_target(junit, "--junit")
        annotate = _annotates(annotations)
        use_threads(threads)
        with plugins.switched_off(no_plugins), progress_on_terminal("check") as progress:

            def told(done: int, total: int, what: str) -> None:
                progress(done, total, escape(printable(what)))

            found = check(
                suite, update=update, strict=strict, only=only or (), output=output, force=force, progress=told
            )
        if report is not None:
            write_junit(found, report)
    except BaseException as stop:
        error = stop if isinstance(stop, KvtoolError) else _as_error(stop)
        if report is not None:
            with contextlib.suppress(KvtoolError):  # what stopped the check is told first
                write_junit_error(suite, error, report)
        if annotate:
            print(github_error(suite, error), file=sys.stderr)
        raise
    if as_json:
        json_answer(found.document())
    else:
        answer(*check_views(found))
    for job in found.jobs:
        for warning in job.warnings:
            hint("warning", printable(f"{job.name}: {warning}"))
    for line in github_annotations(found) if annotate else ():
        print(line, file=sys.stderr)
    if (step := _next_step(found, printable(str(suite)), kept=output is not None)) is not None:
        hint("next", step)
    return 0 if found.ok else 1


def _next_step(found: Check, suite: str, *, kept: bool) -> str | None:
    """What to do now, in one line; None where there is nothing to do."""
    failed = any(job.error is not None for job in found.jobs)
    counts = found.counts()
    if found.updated:
        return f"read what moved in {found.baseline} and commit it"
    keep = "" if kept else f"kvtool check {suite} -o results keeps the results for kvtool diff; "
    if failed:
        return f"{keep}mend what failed: --update accepts nothing before every job runs"
    if not found.ok:
        return f"{keep}--update accepts them" if keep else f"kvtool check {suite} --update accepts what moved"
    if "better" in counts or "new" in counts:
        return f"kvtool check {suite} --update records what is better or new"
    return None


def _as_error(stop: BaseException) -> KvtoolError:
    """What a report says of an end that no sentence was written for."""
    from kvtool.errors import KvtoolError

    if isinstance(stop, KeyboardInterrupt):
        return KvtoolError("interrupted", "the check was interrupted")
    return KvtoolError("internal", f"{type(stop).__name__}: {' '.join(str(stop).split())}")


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
