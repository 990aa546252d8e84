"""`kvtool diff --traces`: two captures of the same tokens."""

from __future__ import annotations


def traces_answer(a: str, b: str, as_json: bool, relative: float | None = None, online: bool = False) -> int:
    """Print how two traces compare.

    Args:
        relative: how far any row may deviate, instead of what rounding may cause.
        online: whether they may lie at addresses.

    Returns:
        The exit code: 1 where they part or one holds less than the other.

    Raises:
        KvtoolError: for traces that cannot be opened, are damaged, or cannot be compared.
    """
    from kvtool.cli.console import answer, hint, json_answer, progress_on_terminal, terminal_width
    from kvtool.compare.traces import diff_traces
    from kvtool.report.terminal_traces import traces_tables
    from kvtool.trace import open_trace
    from kvtool.trace.verify import damage_error, verify_bytes

    with progress_on_terminal("compare") as progress:
        found = diff_traces(open_trace(a, online=online), open_trace(b, online=online), progress, relative=relative)
        if found.identical:  # by what was recorded of them: what is there now may have been altered since
            for path in (a, b):
                report = verify_bytes(path, progress, online=online)
                if report.damage:
                    raise damage_error(path, report)
    if as_json:
        json_answer(found.document())
    else:
        answer(*traces_tables(found, terminal_width()))
    if found.parted:
        hint("next", f"kvtool inspect {b} --verify")
    return int(found.parted)
