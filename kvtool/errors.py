"""The one exception that kvtool raises on purpose, and the stable codes it carries."""

from __future__ import annotations

CODES: dict[str, str] = {
    "internal": "a fault of kvtool itself",
    "interrupted": "stopped by Ctrl-C (exit code 130)",
    "usage": "options that contradict each other or lie outside their range",
    "file-missing": "a file or folder that was named does not exist or cannot be read",
    "output-exists": "the output is already there and --force was not given",
    "disk-full": "the disk (or a quota) ran out while writing",
    "shape": "an array whose shape does not fit the others or the geometry",
    "policy-unknown": "no policy of that name, or a file that does not hold the named class",
    "policy-parameter": "a parameter the policy lacks, or a value of the wrong type or range",
    "policy-broken": "a policy whose scores have the wrong shape or contain NaN",
    "metric-unknown": "no metric of that name, or a file that does not hold the named class",
    "metric-parameter": "a parameter the metric lacks, or a value of the wrong type or range",
    "metric-broken": "a metric that fails, or hands out something other than the columns it declares",
    "plugin-broken": "a policy or metric of another package that cannot be loaded, or is none",
    "plugin-twice": "a name that two packages give, or one that kvtool has itself",
    "not-eviction": "a method that re-selects tokens for every query: nothing is evicted, so it cannot be replayed",
    "device": "a device that was named is not here, or lacks what kvtool needs of it",
    "package-missing": "an optional package that this command needs is not installed",
    "model-missing": "a model that is not there: wrong path, not installed, or a download without --online",
    "model-unsafe": "a model that would run code on loading: its own modules, or pickled weights",
    "model-load": "a model or tokenizer that cannot be loaded: damaged, incomplete, or of an unknown architecture",
    "model-unsupported": "a model whose attention cannot be recorded, or whose mask or bias kvtool cannot represent",
    "model-differs": "a model that is not the one whose run the trace holds",
    "not-reproduced": "a model whose predictions move although nothing was evicted: the closed loop measures nothing",
    "prompt": "a prompt or text that is empty, too short, too long, or not readable as what it should be",
    "memory": "more memory than --max-memory allows, or than the machine has for --workers",
    "overflow": "a value that the stored dtype cannot hold",
    "result-damaged": "a result folder with a file that is missing, truncated or altered",
    "trace-lacks": "the trace does not hold something the policy or metric needs",
    "trace-not": "a folder or file that is no kvtool trace",
    "trace-incomplete": "a trace whose writer was stopped before it was published",
    "trace-damaged": "a trace with a file that is missing, truncated, altered or not listed",
    "trace-unsafe": "a trace whose metadata lies, or names what format 1 does not allow",
    "trace-format": "a trace written by a newer format",
    "worker-lost": "worker processes that were killed, or ended, again and again at the same layer",
    "worker-differs": "a worker that does not have the versions, files, trace or output folder of this process",
    "cluster": "a Dask cluster that cannot be reached",
    "locked": "another process is writing the same trace or result",
    "trace-inaccurate": "attention recomputed from the trace differs from the stored sample by more than the bound",
    "write-failed": "the operating system refused to write a file",
    "not-finite": "NaN or infinity where a number is needed",
    "dtype": "a dtype that a trace cannot store",
    "dump": "a dump for import that does not hold what docs/import.md asks for",
    "suite": "a suite of kvtool check that asks for something that does not exist, or is not readable",
    "baseline": "a baseline of kvtool check that is not there yet, not written by kvtool, or another suite's",
    "trace-changed": "a trace whose digest is not the one that a suite or its baseline names",
    "job-failed": "jobs of a suite that did not run, so that no baseline was written",
    "no-queries": "the sequence has no query at or after the event",
}


# What to do where the one who raised the error had nothing better to say.
HINTS: dict[str, str] = {
    "usage": "--help lists the options and what they take",
    "file-missing": "check the path",
    "write-failed": "check the folder's permissions",
    "shape": "docs/import.md and docs/trace-format.md list every shape",
    "policy-unknown": "kvtool policies lists the names; a policy of your own is file.py:Class",
    "policy-parameter": "kvtool policies NAME lists the parameters",
    "policy-broken": "kvtool.testing.check_policy finds such faults, -vv shows the traceback",
    "metric-unknown": "kvtool metrics lists the names; a metric of your own is file.py:Class",
    "metric-parameter": "kvtool metrics NAME lists the parameters",
    "metric-broken": "kvtool.testing.check_metric finds such faults, -vv shows the traceback",
    "plugin-broken": "update or uninstall that package; kvtool --no-plugins leaves all plug-ins out",
    "plugin-twice": "uninstall one of them; kvtool --no-plugins leaves all plug-ins out",
    "not-eviction": "choose a policy that evicts: kvtool policies lists them",
    "model-load": "download or convert the model again",
    "prompt": "kvtool capture --help lists the ways to give text",
    "trace-lacks": "kvtool inspect says what the trace can serve",
    "trace-damaged": "kvtool inspect --verify names every damaged file",
    "trace-unsafe": "the file is not what kvtool writes: do not trust it",
    "not-finite": "NaN cannot be measured: look for it where the arrays come from",
    "dump": "docs/import.md says what a dump holds",
    "dtype": "cast to float32, float16 or bfloat16",
    "result-damaged": "replay again with --force",
    "suite": "docs/ci.md shows a whole suite",
}


class KvtoolError(Exception):
    """A fault of the input, said in one sentence.

    Attributes:
        code: stable, listed in `CODES` and in docs/errors.md.
        hint: what to do about it, or None.
    """

    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        if code not in CODES:
            raise AssertionError(f"error code {code!r} is not in kvtool.errors.CODES")
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint or HINTS.get(code)
