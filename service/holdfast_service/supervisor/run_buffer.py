"""Buffers metric rows, digests and log lines between the agents and the store.

Soft state: agents hold the originals, and the reconciler's cursors say what is stored. Stored
entries are dropped. If nothing is stored for long, the oldest rows are dropped, and no more log
lines are fetched from the agents.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast_service.job_model.events.attempts import AttemptFormingEvent
from holdfast_service.job_model.events.checkpoints import CheckpointBadEvent, CorruptSince
from holdfast_service.job_model.events.codec import AnyEvent
from holdfast_service.job_model.events.health import GuardTrippedEvent
from holdfast_service.job_model.supervisor_protocol import Cursors
from holdfast_service.supervisor.digest_history import DigestHistory
from holdfast_workers.protocol.commands import Poll
from holdfast_workers.protocol.findings import TripReport
from holdfast_workers.protocol.messages import LogLine, StepRow

PAGE_ROWS = 1_000
PAGE_LINES = 1_000
MAX_LINES = 20_000
"""The number of lines of one agent that may wait here to be stored."""
MAX_ROWS = 200_000
JOB_ENDED = "the job ended before they were stored"
AGENT_LOST = "the node's agent was lost, with what it had not handed over"
DIGEST_OVERLAP = 64
"""Digests of this many stored steps are reported again: a digest arrives a step after its row."""


class RunBuffer:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple[int, int], StepRow] = {}
        self._digests = DigestHistory()
        self._lines: dict[str, list[LogLine]] = defaultdict(list)
        self._cursors: dict[tuple[str, str], tuple[tuple[int, int], int]] = {}
        self._left: dict[tuple[str, str], tuple[int, LogLine | None]] = {}
        """Of each agent that is polled: the lines that it still has, and its last that is here."""
        self._stored: dict[str, int] = {}

    def request(self, agent: str, incarnation: str, acked: int) -> Poll:
        """What to fetch from this agent next. `acked`: see `Poll`."""
        with self._lock:
            row, line = self._cursors.get((agent, incarnation), ((0, 0), 0))
            source = f"{agent}.{incarnation}"
            room = max(0, MAX_LINES - len(self._lines.get(source, ())))
            return Poll(row, line, self._stored.get(source, 0), room, acked)

    @property
    def lines_left(self) -> int:
        """The number of lines that the agents still have, as they said last."""
        with self._lock:
            return sum(left for left, _ in self._left.values())

    def mark_unfetched(self) -> None:
        """Say in the log how many lines of each agent are missing: the job has ended."""
        with self._lock:
            for source, (left, last) in self._left.items():
                if left:
                    self._add_mark(source, last, f"{left:,} lines left out: {JOB_ENDED}")
            self._left = {}

    def mark_lost(self, agent: str, incarnation: str) -> None:
        """Say in the log that lines may be missing: the agent was lost with what it had."""
        with self._lock:
            _, last = self._left.pop((agent, incarnation), (0, None))
            if last is not None and last.rank is not None:
                text = f"lines may be missing here: {AGENT_LOST}"
                self._add_mark((agent, incarnation), last, text)

    def _add_mark(self, source: tuple[str, str], last: LogLine | None, text: str) -> None:
        row, line = self._cursors[source]
        mark = LogLine(*source, line + 1, time.time(), "", 0, None, "output", "")
        mark = replace(last or mark, seq=line + 1, at=mark.at, text=f"WARNING ... {text}")
        self._lines[".".join(source)].append(mark)
        self._cursors[source] = row, line + 1

    def has_attempt_after(self, attempt: int) -> bool:
        """Whether there is a row of a later attempt."""
        with self._lock:
            return any(row[0] > attempt for row, _ in self._cursors.values())

    def apply(self, event: AnyEvent) -> None:
        """Discard the digests that are no longer part of history after the event."""
        with self._lock:
            match event:
                case AttemptFormingEvent(attempt=attempt, mesh=mesh, restore=plan):
                    self._digests.begin(attempt, mesh, plan.step, plan.attempt)
                case GuardTrippedEvent(attempt=attempt, trip=TripReport(back_to=int(step))):
                    self._digests.cut(attempt, step)
                case CheckpointBadEvent(corrupt=CorruptSince(attempt=attempt, step=step)):
                    self._digests.cut(attempt, step - 1)

    def add(
        self,
        agent: str,
        incarnation: str,
        rows: Sequence[StepRow],
        digests: Mapping[int, str],
        lines: Sequence[LogLine],
        digest_attempts: Mapping[int, int],
        lines_left: int = 0,
    ) -> StepRow | None:
        """Add a page of an agent; returns the newest row of the page. A digest whose attempt is not
        known is that of the agent's newest row."""
        with self._lock:
            row, line = self._cursors.get((agent, incarnation), ((0, 0), 0))
            for step_row in rows:
                key = (step_row.attempt, step_row.step)
                self._rows[key] = step_row
                row = max(row, key)
            for step, digest in digests.items():
                self._digests.add(digest_attempts.get(step) or row[0], step, digest)
            _bound(self._rows, MAX_ROWS)
            self._digests.bound(MAX_ROWS)
            kept = self._lines[f"{agent}.{incarnation}"]
            fresh = [log_line for log_line in lines if log_line.seq > line]
            kept.extend(fresh)
            _, last = self._left.get((agent, incarnation), (0, None))
            self._left[agent, incarnation] = lines_left, fresh[-1] if fresh else last
            if fresh:
                line = fresh[-1].seq
            self._cursors[(agent, incarnation)] = (row, line)
            return max(rows, key=lambda step_row: (step_row.attempt, step_row.step), default=None)

    def after(
        self, cursors: Cursors
    ) -> tuple[tuple[StepRow, ...], dict[int, str], tuple[LogLine, ...]]:
        """A page of entries after the cursors; entries before them are stored and dropped."""
        after = tuple(cursors.row)
        with self._lock:
            self._stored = dict(cursors.logs)
            for key in [key for key in self._rows if key <= after]:
                del self._rows[key]
            self._forget_lines(cursors.logs)
            rows = tuple(self._rows[key] for key in sorted(self._rows)[:PAGE_ROWS])
            first = min([after[1], *(row.step for row in rows)]) - DIGEST_OVERLAP
            last = max((row.step for row in rows), default=after[1])
            self._digests.forget_before(first)
            digests = self._digests.up_to(last)
            lines = self._lines_after(cursors.logs)
            return rows, digests, lines

    def _forget_lines(self, cursors: dict[str, int]) -> None:
        for source in [source for source in self._lines if source in cursors]:
            fresh = [line for line in self._lines[source] if line.seq > cursors[source]]
            if fresh:
                self._lines[source] = fresh
            else:
                del self._lines[source]

    def _lines_after(self, cursors: dict[str, int]) -> tuple[LogLine, ...]:
        page: list[LogLine] = []
        for source, lines in self._lines.items():
            stored = cursors.get(source, 0)
            page.extend([line for line in lines if line.seq > stored][:PAGE_LINES])
        return tuple(sorted(page, key=lambda line: line.at))


def _bound(held: dict[Any, Any], limit: int) -> None:
    """Drop the oldest entries beyond `limit`."""
    for key in list(itertools.islice(held, max(0, len(held) - limit))):
        del held[key]
