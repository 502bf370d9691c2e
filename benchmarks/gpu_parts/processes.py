"""Runs a part in a process of its own, with a deadline.

The process is forked from one that has imported torch and touched no device, so parts share neither
device memory nor faults.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

READ_BYTES = 1 << 16
TRACE_LINES = 6
"""Of a traceback, its last lines tell where."""


class PartFailed(Exception):
    """Why a part has no figures."""


def run_part(part: Callable[[], DataclassInstance], deadline_s: float) -> dict[str, Any]:
    """The figures of the part, as JSON has them. Raises PartFailed, at the latest at the deadline;
    the part's processes have been killed then."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _become(part, writer)
    os.close(writer)
    try:
        answer = _read(reader, time.monotonic() + deadline_s)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it may not lead a session yet
        _, status = os.waitpid(pid, 0)
    if answer is None:
        raise PartFailed(f"it did not end within {deadline_s:.0f} s")
    if not answer:
        raise PartFailed(f"its process ended without an answer (wait status {status})")
    found: dict[str, Any] = json.loads(answer)
    if "error" in found:
        raise PartFailed(found["error"])
    figures: dict[str, Any] = found["figures"]
    return figures


def _become(part: Callable[[], DataclassInstance], writer: int) -> NoReturn:
    os.setsid()  # what it starts can be killed with it
    try:
        try:
            answer: dict[str, Any] = {"figures": asdict(part())}
            text = json.dumps(answer, allow_nan=False)
        except BaseException as error:
            traceback.print_exc()
            where = " | ".join(traceback.format_exc().strip().splitlines()[-TRACE_LINES:])
            text = json.dumps({"error": f"{type(error).__name__}: {error} ({where})"})
        with os.fdopen(writer, "w") as file:
            file.write(text)
    finally:
        os._exit(0)


def _read(reader: int, deadline: float) -> bytes | None:
    """All that is written until the pipe ends; None if it does not end before the deadline."""
    found = b""
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([reader], [], [], left_s)[0]:
            return None
        chunk = os.read(reader, READ_BYTES)
        if not chunk:
            return found
        found += chunk
