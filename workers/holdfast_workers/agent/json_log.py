"""What happens on a node as lines of JSON, for who collects a machine's logs.

One object a line: `at` (Unix seconds), `level`, `event`, always `job`, `agent` and `node`; of a
rank's own line also `attempt`, `rank`, `worker` and `message`. They go where the agent's process
writes its errors, which Ray keeps in a file per process. Where nobody reads, lines are dropped:
training never waits for a log.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import TextIO

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
    """Thread-safe. Says nothing if `stream` is None."""

    def __init__(self, stream: TextIO | None, *, job: str, agent: str, node: str) -> None:
        self._stream = stream
        self._always = {"job": job, "agent": agent, "node": node}
        self._lock = threading.Lock()

    def wrote(self, attempt: int, rank: int | None, worker: str, text: str) -> None:
        """A line of a rank, or of another process of the node (`rank` None)."""
        self._say("info", "output", attempt=attempt, rank=rank, worker=worker, message=text)

    def signalled(self, signal: Signal) -> None:
        """What the agent has told its supervisor."""
        level = "warning" if signal.kind in _WARNINGS else "info"
        self._say(
            level,
            str(signal.kind),
            attempt=signal.attempt,
            rank=signal.rank,
            worker=signal.worker,
            pid=signal.pid,
            detail=signal.detail,
        )

    def did(self, event: str, level: str = "info", **fields: object) -> None:
        """What the agent itself did, or what became of it."""
        self._say(level, event, **fields)

    def _say(self, level: str, event: str, **fields: object) -> None:
        if self._stream is None:
            return
        known = {name: value for name, value in fields.items() if value is not None}
        entry = {"at": time.time(), "level": level, "event": event, **self._always, **known}
        try:
            line = json.dumps(entry, default=str, separators=(",", ":"), allow_nan=False)
        except ValueError:  # what is not finite has no word in JSON
            told = {name: str(value) for name, value in entry.items()}
            line = json.dumps({**told, "at": entry["at"]}, separators=(",", ":"))
        with self._lock, contextlib.suppress(OSError, ValueError):  # closed, or full
            self._stream.write(line + "\n")
            self._stream.flush()
