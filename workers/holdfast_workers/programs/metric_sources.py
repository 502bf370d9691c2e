"""The steps that a program shows without being attached: in its lines, and in event files."""

from __future__ import annotations

import time
from pathlib import Path

import structlog

from holdfast_workers.programs.event_files import EventFiles
from holdfast_workers.programs.metric_lines import MetricLines
from holdfast_workers.protocol.programs import ProgramStep
from holdfast_workers.spec import ProgramSpec

_log = structlog.get_logger()


class MetricSources:
    """Those of rank 0 in one attempt. A problem is logged once, and ends its source at most."""

    def __init__(self, spec: ProgramSpec, folder: Path) -> None:
        """`folder`: the working folder of the program."""
        self._lines = MetricLines(spec.metrics) if spec.metrics else None
        self._files: EventFiles | None = None
        if spec.event_files:
            self._files = EventFiles(folder / spec.event_files, time.time())
        self._logged = ""

    def of_line(self, line: str) -> list[ProgramStep]:
        """The step that a line shows, if any."""
        if self._lines is None:
            return []
        step = self._lines.read(line, time.time())
        if self._lines.problem:
            self._log_once(self._lines.problem)
            self._lines = None
        return [step] if step is not None else []

    def of_files(self, *, final: bool = False) -> list[ProgramStep]:
        """The steps that event files show since the last call."""
        if self._files is None:
            return []
        steps = self._files.poll(final=final)
        if self._files.problem:
            self._log_once(self._files.problem)
        return steps

    def _log_once(self, problem: str) -> None:
        if problem != self._logged:
            self._logged = problem
            _log.warning("metrics_not_read", why=problem)
