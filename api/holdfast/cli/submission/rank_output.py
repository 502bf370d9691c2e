"""Prints what the ranks of a job write, while the job is followed."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from holdfast.cli.feeds import plain_line
from holdfast.cli.printing.terminal_text import coloured
from holdfast.client.synchronous.jobs import Client
from holdfast_service.views.jobs import JobView
from holdfast_service.views.pages import LogPage

LAST_LINES_S = 12.0
"""How long the last lines of an ended job are awaited; the server stores them within 10 s."""
LOOK_S = 0.1


class RankOutput:
    """A `Watcher`: each call prints the lines that the ranks have written since the previous call.

    Lines of several ranks name their rank. `copy` gets all lines, those of agents included;
    `shown` is false if stdout gets none.
    """

    def __init__(
        self, client: Client, *, several: bool, copy: TextIO | None = None, shown: bool = True
    ) -> None:
        self._client = client
        self._several = several
        self._copy = copy
        self._shown = shown
        self._stdout = sys.stdout
        self._last_line = 0

    def __call__(self, job: JobView) -> None:
        deadline = time.monotonic() + LAST_LINES_S
        while True:
            page = self._client.logs(job.id, after=self._last_line)
            self._print(page)
            if page.ended or not (page.items or job.state.terminal):
                return
            if not page.items:  # the job has ended; its last lines are on their way
                if time.monotonic() > deadline:
                    return
                time.sleep(LOOK_S)

    def _print(self, page: LogPage) -> None:
        self._last_line = max(self._last_line, page.last_line)
        for line in page.items:
            if self._copy is not None:
                self._copy.write(f"{plain_line(line)}\n")
            if self._shown and line.rank is not None:
                prefix = f"[rank {line.rank}] " if self._several else ""
                self._write(f"{prefix}{coloured(line.text)}\n")
        if self._copy is not None:
            self._copy.flush()

    def _write(self, text: str) -> None:
        # While a live line is drawn, sys.stdout writes above it, to the terminal of stderr.
        stream = sys.stdout if self._stdout.isatty() else self._stdout
        stream.write(text)
        stream.flush()
