"""Keeps metric rows, digests and log lines of a run until the supervisor fetches them, and copies
of its numbered events for the next supervisor process.

Bounded: the oldest entries are dropped first; in place of log lines there is a mark then. Every
node keeps the same rows and digests, so losing a node loses none of them; the newest also lie in
shared memory (`agent/row_file.py`), so losing all agents loses none either.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from holdfast_workers.agent.kept_lines import KeptLines
from holdfast_workers.agent.row_file import RowFile
from holdfast_workers.ipc.line_budget import LeftOut
from holdfast_workers.protocol.messages import LogLine, StepRow, SupervisorEvent

KEEP_ROWS = 20_000
PAGE_ROWS = 1_000
PAGE_LINES = 2_000
KEPT_EVENTS = 2_000
"""The number of events kept after they were stored elsewhere: a restarted supervisor reads its
history from them."""


class RunJournal:
    """Thread-safe. Each agent incarnation has its own."""

    def __init__(self, agent: str, incarnation: str) -> None:
        self._agent = agent
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._rows: deque[StepRow] = deque(maxlen=KEEP_ROWS)
        self._digests: dict[int, tuple[int, str]] = {}  # step -> attempt, digest
        self._lines = KeptLines()
        self._logged = 0
        self._attempt = 0
        self._file: RowFile | None = None

    def keep_in(self, folder: Path) -> None:
        """Take up what a former incarnation of the agent left in the node's folder of shared
        memory, and keep new entries there too."""
        file = RowFile(folder)
        for entry in file.load():
            if isinstance(entry, StepRow):
                self.add_row(entry)
            else:
                self.add_digest(*entry)
        with self._lock:
            self._file = file

    def add_row(self, row: StepRow) -> bool:
        """Keep a row, unless it belongs to an older attempt: rows are fetched in order of attempt
        and step. True if it is the first row of its attempt; the attempt computes later steps anew,
        so their digests are dropped: they will arrive again, and differ if it reads other data."""
        with self._lock:
            first = row.attempt > self._attempt
            if first:
                self._digests = {s: d for s, d in self._digests.items() if s < row.step}
            if row.attempt >= self._attempt:
                self._rows.append(row)
                if self._file is not None:
                    self._file.add(row)
            self._attempt = max(self._attempt, row.attempt)
            return first

    def add_digest(self, step: int, digest: str, attempt: int) -> None:
        with self._lock:
            self._digests[step] = attempt, digest
            if self._file is not None:
                self._file.add((step, digest, attempt))
            while len(self._digests) > KEEP_ROWS:
                self._digests.pop(next(iter(self._digests)))

    def newest(self) -> StepRow | None:
        with self._lock:
            return self._rows[-1] if self._rows else None

    def log(
        self,
        worker: str,
        attempt: int,
        rank: int | None,
        text: str,
        stands_for: LeftOut | None = None,
    ) -> None:
        """Keep a line of a process, or the mark that `stands_for` lines of it."""
        with self._lock:
            self._logged += 1
            self._lines.add(
                LogLine(
                    agent=self._agent,
                    incarnation=self._incarnation,
                    seq=self._logged,
                    at=time.time(),
                    worker=worker,
                    attempt=attempt,
                    rank=rank,
                    stream="output",
                    text=text,
                ),
                stands_for,
            )

    def lines_after(
        self, line: int, stored: int, most: int = PAGE_LINES
    ) -> tuple[tuple[LogLine, ...], int]:
        """A page of log lines after number `line`, and how many are left then. Those up to number
        `stored` are stored elsewhere."""
        with self._lock:
            self._lines.forget(stored)
            page = self._lines.after(line, min(most, PAGE_LINES))
            return page, self._lines.count_after(page[-1].seq if page else line)

    def after(self, row: tuple[int, int]) -> tuple[tuple[StepRow, ...], dict[int, tuple[int, str]]]:
        """A page of rows after `row` (attempt, step), and their digests, each after the attempt
        that computed it.

        Digests are returned for the steps of these rows and for the step before each: a digest is
        known one step later than its row.
        """
        with self._lock:
            # They are ascending, and most have been fetched.
            new_rows = takewhile(lambda new: (new.attempt, new.step) > row, reversed(self._rows))
            rows = [*new_rows][::-1][:PAGE_ROWS]
            if rows:
                first, last = min(r.step for r in rows) - 1, max(r.step for r in rows)
            else:
                first, last = row[1] - 1, row[1]
            wanted = {s: d for s in range(first, last + 1) if (d := self._digests.get(s))}
            return tuple(rows), wanted


class EventBackup:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[int, SupervisorEvent] = {}

    def keep(self, events: Iterable[SupervisorEvent]) -> None:
        """Keep `events` by their `seq`."""
        with self._lock:
            self._events |= {event.seq: event for event in events}

    def forget(self, acked: int) -> None:
        """Drop the oldest of the events up to number `acked`, which are stored elsewhere."""
        with self._lock:
            stored = sorted(seq for seq in self._events if seq <= acked)
            for seq in stored[:-KEPT_EVENTS]:
                del self._events[seq]

    def all(self) -> tuple[SupervisorEvent, ...]:
        """All kept events, in order of their numbers."""
        with self._lock:
            return tuple(self._events[seq] for seq in sorted(self._events))
