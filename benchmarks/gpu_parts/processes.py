"""Runs a part in a process of its own, with a deadline.

The process is forked from one that has imported torch and touched no device, so parts share neither
device memory nor faults.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn, TypeVar

TRACE_LINES = 6
"""Of a traceback, its last lines tell where."""
Figures = TypeVar("Figures")


class PartFailed(Exception):
    """Why a part has no figures."""


def run_part(part: Callable[[], Figures], deadline_s: float) -> Figures:
    """Return what the part returns. Raises PartFailed, at the latest at the deadline; the part's
    processes have been killed then."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_become, args=(part, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(deadline_s):
            raise PartFailed(f"it did not end within {deadline_s:.0f} s")
        figures, error = ours.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        raise PartFailed(f"its process ended without an answer (exit code {code})") from None
    finally:
        ours.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()  # it may not lead a session yet
        process.join()
    if error:
        raise PartFailed(error)
    found: Figures = figures
    return found


def _become(part: Callable[[], object], answer: Connection) -> NoReturn:
    os.setsid()  # what it starts can be killed with it
    try:
        try:
            answer.send((part(), ""))
        except BaseException as error:
            traceback.print_exc()
            where = " | ".join(traceback.format_exc().strip().splitlines()[-TRACE_LINES:])
            answer.send((None, f"{type(error).__name__}: {error} ({where})"))
    finally:
        os._exit(0)
