"""Worker: a process that does units for the process that started it, and ends when that one does."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kvtool.errors import KvtoolError
from kvtool.replay.order import Bench, Order, Unit
from kvtool.replay.parts import Store


def serve(handle: int, scratch: str) -> None:
    """Receive an order, then units, until the other end of the pipe is closed.

    Sends ("ready", None); then for every unit any number of ("say", text) and one of ("done", part's name),
    ("error", (code, message, hint)) or ("fault", (sentence, traceback)).

    Args:
        handle: of the pipe.
        scratch: folder of temporary files, removed should the other process die.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process stops it
    os.set_inheritable(handle, False)
    torch.set_num_threads(1)
    connection = Connection(handle)
    order = connection.recv()
    assert isinstance(order, Order)
    todo: queue.SimpleQueue[Unit] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, todo, order, scratch), daemon=True).start()
    try:
        bench = Bench(order)
        connection.send(("ready", None))
        while True:
            connection.send(_answer(bench, todo.get(), connection))
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send(_said(error))


def _answer(bench: Bench, unit: Unit, connection: Connection) -> tuple[str, Any]:
    try:
        return "done", bench.do(unit, lambda what: connection.send(("say", what)))
    except Exception as error:
        return _said(error)


def _said(error: BaseException) -> tuple[str, Any]:
    if isinstance(error, KvtoolError):
        return "error", (error.code, error.message, error.hint)
    return "fault", (f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))


def _listen(connection: Connection, todo: queue.SimpleQueue[Unit], order: Order, scratch: str) -> None:
    """Pass units on. The end of the pipe means that the other process is gone: nobody wants the rest."""
    while True:
        try:
            todo.put(connection.recv())
        except (EOFError, OSError):
            Store.of_worker(Path(order.output), order.identity).sweep(os.getpid())
            shutil.rmtree(scratch, ignore_errors=True)
            os._exit(1)
