"""The steps of a program that reports none itself: from its lines, and from its event files.

A source that cannot be read is given up, with one line in the job's log.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from holdfast_workers.ipc.output_lines import OutputLine
from holdfast_workers.program_metrics.event_files import EventFiles
from holdfast_workers.program_metrics.metric_lines import MetricLines
from holdfast_workers.protocol.programs import ProgramStep
from holdfast_workers.spec import ProgramSpec

POLL_S = 2.0
"""How often event files are looked at."""
_log = structlog.get_logger()


class StepSources:
    """The sources of steps that a spec names, in one attempt of a rank."""

    def __init__(self, program: ProgramSpec, since: float, *, only_lines: bool = False) -> None:
        """`since`: Unix seconds at which the attempt began. `only_lines`: no event files, which
        rank 0 writes."""
        self._lines = MetricLines(program.metrics) if program.metrics else None
        folder = None if only_lines else program.event_files
        self._files = EventFiles(Path(folder), since) if folder is not None else None
        self._polled_at = since
        self._told = ""

    def read_line(self, line: OutputLine, at: float) -> ProgramStep | None:
        """The step that a printed line shows."""
        if self._lines is None:
            return None
        step = self._lines.read(line.text, at, is_state=line.is_state)
        if self._lines.problem:
            _log.warning("metrics_given_up", why=self._lines.problem)
            self._lines = None
        return step

    def poll(self, now: float, *, final: bool = False) -> list[ProgramStep]:
        """The steps that the event files show since the last call. `final`: the program has ended.

        Between two looks at the files, nothing is read.
        """
        if self._files is None or not (final or now - self._polled_at >= POLL_S):
            return []
        self._polled_at = now
        found = self._files.poll(final=final)
        if self._files.problem != self._told:
            self._told = self._files.problem
            _log.warning("event_file_given_up", why=self._told)
        return found
