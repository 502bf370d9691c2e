"""The log lines of a node until the service has stored them. Pure.

A line is *waiting* until it is first sent to a supervisor, and then *sent* until it is stored: if
the supervisor is lost, its successor gets it. If too many lines wait, because nothing fetches them
or more are printed than are stored, the oldest waiting ones are dropped, and one line in their
place says how many of each rank.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace

from holdfast_workers.ipc.line_budget import LeftOut
from holdfast_workers.protocol.messages import LogLine

KEEP_LINES = 100_000
KEEP_CHARACTERS = 64 * 1024 * 1024
PAGE_CHARACTERS = 4 * 1024 * 1024
NOT_STORED = "the service has not stored them, and a node keeps "

_Source = tuple[str, int, int | None]
"""Process, attempt and rank of a line."""


class KeptLines:
    """Lines have ascending numbers (`LogLine.seq`)."""

    def __init__(self, lines: int = KEEP_LINES, characters: int = KEEP_CHARACTERS) -> None:
        """The most that may wait."""
        self._most = lines, characters
        self._sent: deque[LogLine] = deque()
        self._gaps: dict[_Source, tuple[LogLine, LeftOut, str]] = {}
        """What was dropped since the newest sent line, with the last line of each source, and the
        limit that applied to it."""
        self._waiting: deque[tuple[LogLine, LeftOut]] = deque()
        self._characters = 0
        self._unsent = 0
        """The number of lines in both."""

    def add(self, line: LogLine, stands_for: LeftOut | None = None) -> None:
        """Keep a line; one that `stands_for` others is the mark where they were left out."""
        given = stands_for or LeftOut.of(line.text)
        self._waiting.append((line, given))
        self._characters += len(line.text)
        self._unsent += given.lines
        while limit := self._limit():
            line, lost = self._take_waiting()
            source = (line.worker, line.attempt, line.rank)
            if source in self._gaps:
                lost += self._gaps[source][1]
            self._gaps[source] = line, lost, limit

    def after(self, number: int, most: int) -> tuple[LogLine, ...]:
        """The oldest lines above this number, about `most`; they count as sent from now on."""
        later = itertools.takewhile(lambda line: line.seq > number, reversed(self._sent))
        page = [*later][::-1][:most]
        characters = sum(len(line.text) for line in page)
        while len(page) < most and characters < PAGE_CHARACTERS and (self._gaps or self._waiting):
            fresh = self._marks() or [self._next_waiting()]
            self._sent.extend(fresh)
            page += [line for line in fresh if line.seq > number]
            characters += sum(len(line.text) for line in fresh)
        return tuple(page)

    def forget(self, stored: int) -> None:
        """The service has stored the lines up to this number."""
        while self._sent and self._sent[0].seq <= stored:
            self._sent.popleft()

    def count_after(self, number: int) -> int:
        """The number of lines above this number, those that were dropped included."""
        later = itertools.takewhile(lambda line: line.seq > number, reversed(self._sent))
        return self._unsent + sum(1 for _ in later)

    def _limit(self) -> str:
        """The limit beyond which lines wait; "" if there is none."""
        lines, characters = self._most
        if self._characters > characters:
            return f"{characters:,} characters"
        return f"{lines:,} lines" if len(self._waiting) > lines else ""

    def _marks(self) -> list[LogLine]:
        """The lines in the place of the dropped ones."""
        gaps, self._gaps = self._gaps, {}
        self._unsent -= sum(lost.lines for _, lost, _ in gaps.values())
        lines = (
            replace(last, text=lost.mark(last.rank, NOT_STORED + limit))
            for last, lost, limit in gaps.values()
        )
        return sorted(lines, key=lambda line: line.seq)

    def _next_waiting(self) -> LogLine:
        line, given = self._take_waiting()
        self._unsent -= given.lines
        return line

    def _take_waiting(self) -> tuple[LogLine, LeftOut]:
        taken = self._waiting.popleft()
        self._characters -= len(taken[0].text)
        return taken
