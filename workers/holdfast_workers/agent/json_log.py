"""Writes what happens on a node as lines of JSON, for log collectors.

One object a line: `at` (Unix seconds), `level`, `event`, and always `job`, `agent` and `node`; a
rank's output line also has `attempt`, `rank`, `worker` and `message`. Lines go to the standard
error of the agent's process, which Ray keeps in a file per process. A line that cannot be written
is dropped: training never waits for a log.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TextIO

from holdfast_workers.log_setup import json_line
from holdfast_workers.protocol.messages import Signal, SignalKind

_WARNINGS = frozenset(
    {
        *(SignalKind.WORKER_EXITED, SignalKind.WORKER_FAILED, SignalKind.SHARD_FAILED),
        *(SignalKind.SHARD_DELAYED, SignalKind.PARTNER_LOST, SignalKind.ZYGOTE_LOST),
        *(SignalKind.SOURCES_LOST, SignalKind.RANK_STALLED, SignalKind.NODE_UNWELL),
        *(SignalKind.GUARD_TRIPPED, SignalKind.BAD_SHARD),
    }
)


class JsonLog:
    """Thread-safe. Writes nothing if `stream` is None."""

    def __init__(self, stream: TextIO | None, *, job: str, agent: str, node: str) -> None:
        self._stream = stream
        self._fixed_fields = {"job": job, "agent": agent, "node": node}
        self._lock = threading.Lock()

    def log_output(self, attempt: int, rank: int | None, worker: str, text: str) -> None:
        """Log an output line of a rank, or of another process of the node (`rank` None)."""
        self._write("info", "output", attempt=attempt, rank=rank, worker=worker, message=text)

    def log_signal(self, signal: Signal) -> None:
        """Log a signal that the agent sent to its supervisor."""
        level = "warning" if signal.kind in _WARNINGS else "info"
        self._write(
            level,
            str(signal.kind),
            attempt=signal.attempt,
            rank=signal.rank,
            worker=signal.worker,
            pid=signal.pid,
            detail=signal.detail,
        )

    def log_event(self, event: str, level: str = "info", **fields: object) -> None:
        """Log an action or a change of state of the agent itself."""
        self._write(level, event, **fields)

    def _write(self, level: str, event: str, **fields: object) -> None:
        if self._stream is None:
            return
        known = {name: value for name, value in fields.items() if value is not None}
        entry = {"at": time.time(), "level": level, "event": event, **self._fixed_fields, **known}
        line = json_line(entry)
        with self._lock, contextlib.suppress(OSError, ValueError):  # closed, or full
            self._stream.write(line + "\n")
            self._stream.flush()
