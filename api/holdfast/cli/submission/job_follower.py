"""Shows a job while it runs: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from holdfast.cli.printing import describe, output
from holdfast.cli.submission import run_lines
from holdfast.client.synchronous.jobs import Client
from holdfast_service.views.incidents import IncidentView
from holdfast_service.views.jobs import JobView, ProgressView
from holdfast_service.views.start_text import is_start, start_text

POLL_S = 0.25
PLAIN_EVERY_S = 2.0
COST_S = 5.0
"""How long an incident that is closed waits for what it cost: a step after it is to be stored."""
SPINNER = 2
"""Cells that rich's spinner takes."""

Watcher = Callable[[JobView], None]
"""Called with the job after each poll, before it is shown."""


class JobFollower:
    """Draws one job. Each incident is printed once, when it is closed and all of it is known; one
    that ends the job is its outcome, which the caller prints."""

    def __init__(self, client: Client, console: Console, *, is_of_program: bool = False) -> None:
        """`is_of_program`: the output of its ranks is shown, so that their processes and what they
        print because of a fault are explained."""
        self._client = client
        self._console = console
        self._is_of_program = is_of_program
        self._placed_attempt = 0
        self._shown_incidents: set[int] = set()
        self._closed: dict[int, float] = {}
        """Incident -> since when it is known to be closed; monotonic."""
        self._last: tuple[object, ...] = ()
        self._last_plain = 0.0

    def follow(self, job_id: str, watcher: Watcher | None = None) -> JobView:
        """Show the job until it has ended; returns its final view."""
        if not self._console.is_terminal:
            return self._follow(job_id, watcher, self._plain)
        with self._console.status("") as status:

            def live(job: JobView, _ended: bool) -> None:
                width = self._console.width - SPINNER
                lines = progress_line(job, width).wrap(self._console, width)
                status.update(Text("\n").join(lines))  # a live display wraps nothing itself

            job = self._follow(job_id, watcher, live)
        self._console.print(progress_line(job, self._console.width))
        return job

    def _follow(
        self, job_id: str, watcher: Watcher | None, draw: Callable[[JobView, bool], None]
    ) -> JobView:
        while True:
            job = self._client.get(job_id)
            if watcher is not None:
                watcher(job)
            if job.progress.incidents > len(self._shown_incidents):
                self._print_incidents(job_id, final=job.state.terminal)
            is_new = job.state == "RUNNING" and job.progress.attempt > self._placed_attempt
            if self._is_of_program and is_new:
                self._print_places(job_id)
            draw(job, job.state.terminal)
            if job.state.terminal:
                return job
            time.sleep(POLL_S)

    def _plain(self, job: JobView, ended: bool) -> None:
        seen = (job.state, job.progress.attempt, job.progress.step)
        changed = seen[:2] != self._last[:2]
        due = seen != self._last and time.monotonic() - self._last_plain >= PLAIN_EVERY_S
        if changed or due or ended:
            self._console.print(progress_line(job))
            self._last, self._last_plain = seen, time.monotonic()

    def _print_places(self, job_id: str) -> None:
        """Once all processes of the newest attempt are known: before, they are those that start
        the program."""
        for attempt in self._client.attempts(job_id):
            if attempt.number > self._placed_attempt and attempt.state == "running":
                self._console.print(run_lines.places(attempt))
                self._placed_attempt = attempt.number

    def _print_incidents(self, job_id: str, *, final: bool) -> None:
        for incident in self._client.incidents(job_id):
            if incident.end_code:
                self._shown_incidents.add(incident.number)
            elif incident.number not in self._shown_incidents and (
                final or self._is_over(incident)
            ):
                self._shown_incidents.add(incident.number)
                for line in describe.incident_lines(incident):
                    self._console.print(output.fold(line, describe.INCIDENT_INDENT))
                if self._is_of_program:
                    attempts = self._client.attempts(job_id)
                    if (note := run_lines.errors_of_others(incident, attempts)) is not None:
                        self._console.print(f"  {note}")

    def _is_over(self, incident: IncidentView) -> bool:
        if incident.closed_at is None:
            return False
        now = time.monotonic()
        waited_s = now - self._closed.setdefault(incident.number, now)
        return incident.device_seconds_lost is not None or waited_s >= COST_S


def progress_line(job: JobView, width: int | None = None) -> Text:
    """Name, state and numbers of a job; in a given width, without the numbers for which there is no
    room, and cut at its end. A wait is a sentence, which is not cut."""
    progress = job.progress
    parts = _step_parts(progress) if output.has_steps(job) else {}
    parts |= {"attempt": f"attempt {progress.attempt}", "inc": f"incidents {progress.incidents}"}
    if job.waiting is not None and is_start(job.waiting):
        del parts["attempt"]  # the sentence names it
        if not progress.incidents:  # one of a job's start fits on a line
            del parts["inc"]
        parts["wait"] = start_text(progress.attempt, job.waiting, time.time())
    elif job.waiting is not None:
        parts["wait"] = f"waiting for {job.waiting.resource}: {job.waiting.reason}"
    head = Text.assemble(f"{job.name}  ", output.state_text(job.state), "  ")
    line = head + Text("  ".join(parts.values()))
    for dropped in ("tokens", "attempt", "loss"):
        if width is not None and line.cell_len > width:
            parts.pop(dropped, None)
            line = head + Text("  ".join(parts.values()))
    if width is not None and job.waiting is None:
        line.truncate(width, overflow="ellipsis")
    return line


def _step_parts(progress: ProgressView) -> dict[str, str]:
    last = "" if progress.steps is None else f"/{progress.steps}"
    parts = {
        "step": f"step {progress.step:>4}{last}",
        "loss": f"loss {output.number(progress.loss, '.4f')}",
    }
    if progress.steps is not None or progress.tokens_per_second is not None:
        parts["tokens"] = f"{output.number(progress.tokens_per_second, ',.0f')} tokens/s"
    return parts
