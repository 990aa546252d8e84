"""The command line: one typer application, and the one place where exceptions become exit codes.

Command modules import torch, zarr and the rest inside their functions, so that `kvtool --help`
answers at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback

import typer

from kvtool import plugins
from kvtool.cli import ablate, bench, capture, check, diff, import_, inspect, live, metrics, policies, replay, synth
from kvtool.errors import KvtoolError

app = typer.Typer(
    name="kvtool",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Offline KV-trace analysis: capture a model run once, replay any KV-cache eviction policy on it.",
    epilog="Start here: kvtool capture smollm2 --prompt-file text.txt -o run.zarr",
)
app.command("capture")(capture.command)
app.command("import")(import_.command)
app.command("synth")(synth.command)
app.command("inspect")(inspect.command)
app.command("policies")(policies.command)
app.command("metrics")(metrics.command)
app.command("replay")(replay.command)
app.command("live")(live.command)
app.command("ablate")(ablate.command)
app.command("diff")(diff.command)
app.command("check")(check.command)
app.command("bench")(bench.command)

verbosity = 0


def _version(wanted: bool) -> None:
    if wanted:
        from kvtool import __version__

        typer.echo(f"kvtool {__version__}")
        raise typer.Exit


@app.callback()
def options(
    verbose: int = typer.Option(0, "-v", "--verbose", count=True, help="Say more; -vv shows tracebacks."),
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    no_plugins: bool = typer.Option(
        False, "--no-plugins", help="Leave out policies and metrics of other packages; also KVTOOL_NO_PLUGINS=1."
    ),
) -> None:
    global verbosity
    verbosity = verbose
    if no_plugins:
        plugins.switch_off()


def _say(message: str, hint: str | None, code: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(f"error: {message} [{code}]", file=sys.stderr)
        if hint:
            print(f"hint: {hint}", file=sys.stderr)


def _interrupted() -> int:
    _say("interrupted; nothing half-written was published", None, "interrupted")
    return 130


def _reader_left() -> int:
    """Nobody reads stdout any more. Point it elsewhere so that the interpreter's own flush at exit does not
    complain a second time."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 2


def run(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 good, 1 finding, 2 anything wrong, 130 interrupted."""
    global verbosity
    verbosity = 0
    with plugins.switched_off(False):  # what --no-plugins says holds for this command
        return _run(arguments)


def _run(arguments: list[str] | None) -> int:
    try:
        outcome = app(args=arguments, standalone_mode=False)
        sys.stdout.flush()
        return _interrupted() if outcome == 130 else outcome if isinstance(outcome, int) else 0
    except KvtoolError as error:
        if verbosity >= 2:
            traceback.print_exc()
        _say(error.message, error.hint, error.code)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except typer.Exit as stop:
        # typer itself turns Ctrl-C into this exit code, without a word
        return _interrupted() if stop.exit_code == 130 else stop.exit_code
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich exits so when it prints help to a closed pipe
            return _reader_left()
        _say(f"something called sys.exit({stop.code!r}) inside the command", None, "internal")
        return 2
    except BrokenPipeError:
        return _reader_left()
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # typer's own usage errors
            text = " ".join(str(error.format_message()).split()).rstrip(".")
            command = getattr(getattr(error, "ctx", None), "info_name", None)
            known = command in [entry.name for entry in app.registered_commands]
            help_ = f"kvtool {command} --help lists its options" if known else "kvtool --help lists commands"
            _say(text or "no command was given", help_, "usage")
            return 2
        if verbosity >= 2:
            traceback.print_exc()
        _say(
            f"{type(error).__name__}: {' '.join(str(error).split())}",
            "this is a fault of kvtool: run again with -vv before the command and report the traceback",
            "internal",
        )
        return 2


def main() -> None:
    sys.exit(run())
