"""Shows a job while it runs: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from holdfast.cli.printing import describe, output
from holdfast.client.synchronous.jobs import Client
from holdfast_service.views.incidents import IncidentView
from holdfast_service.views.jobs import JobView, ProgressView
from holdfast_service.views.start_text import is_start, start_text

POLL_S = 0.25
PLAIN_EVERY_S = 2.0
SPINNER = 2
"""Cells that rich's spinner takes."""

Watcher = Callable[[JobView], None]
"""Called with the job after each poll, before it is shown."""


class JobFollower:
    """Draws one job. Each incident is printed once, when it is closed; one that ends the job is its
    outcome, which the caller prints."""

    def __init__(self, client: Client, console: Console) -> None:
        self._client = client
        self._console = console
        self._shown_incidents: set[int] = set()
        self._last: tuple[object, ...] = ()
        self._last_plain = 0.0

    def follow(self, job_id: str, watcher: Watcher | None = None) -> JobView:
        """Show the job until it has ended; returns its final view."""
        if not self._console.is_terminal:
            return self._follow(job_id, watcher, self._plain)
        with self._console.status("") as status:

            def live(job: JobView, _ended: bool) -> None:
                status.update(progress_line(job, self._console.width - SPINNER))

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
                self._print_incidents(self._client.incidents(job_id), final=job.state.terminal)
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

    def _print_incidents(self, incidents: Sequence[IncidentView], *, final: bool) -> None:
        for incident in incidents:
            closed = incident.closed_at is not None or final
            if incident.end_code:
                self._shown_incidents.add(incident.number)
            elif closed and incident.number not in self._shown_incidents:
                self._shown_incidents.add(incident.number)
                for line in describe.incident_lines(incident):
                    self._console.print(output.fold(line, describe.INCIDENT_INDENT))


def progress_line(job: JobView, width: int | None = None) -> Text:
    """Name, state and numbers of a job; in a given width, without the numbers for which there is no
    room, and cut at its end."""
    progress = job.progress
    parts = _step_parts(progress) if output.has_steps(job) else {}
    parts |= {"attempt": f"attempt {progress.attempt}", "inc": f"incidents {progress.incidents}"}
    if job.waiting is not None and is_start(job.waiting):
        parts["wait"] = start_text(progress.attempt, job.waiting, time.time())
    elif job.waiting is not None:
        parts["wait"] = f"waiting for {job.waiting.resource}: {job.waiting.reason}"
    head = Text.assemble(f"{job.name}  ", output.state_text(job.state), "  ")
    line = head + Text("  ".join(parts.values()))
    for dropped in ("tokens", "attempt", "loss"):
        if width is not None and line.cell_len > width:
            parts.pop(dropped, None)
            line = head + Text("  ".join(parts.values()))
    if width is not None:
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
