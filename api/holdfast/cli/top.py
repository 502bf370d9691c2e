"""`top`: shows the jobs of a server, or the ranks of one job, and redraws each second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli.common import LONG_RETRY_S, OPTIONS, Options, complete_job
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output, top_view
from holdfast.client.synchronous.jobs import Client
from holdfast_service.job_model.lifecycle import TERMINAL, State
from holdfast_service.job_model.sort_order import Sort
from holdfast_service.views.lists import JobRow

MOST_JOBS = 200
RECENT_POINTS = 120
SHORTEST_S = 0.2


def top(
    job_word: Annotated[
        str | None,
        Parameter(
            name="JOB",
            help="Show the ranks of this job; default: all active jobs.",
            completer=complete_job,
        ),
    ] = None,
    /,
    *,
    every: Annotated[float, Parameter(help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, Parameter(negative="", help="Print once and exit.")] = False,
    options: Options = OPTIONS,
) -> ExitCode:
    """Watch jobs live until Ctrl-C. If stdout is not a terminal, print once."""
    with options.connect(LONG_RETRY_S) as client:
        job_id = None if job_word is None else client.find(job_word)

        def draw() -> Text:
            width = output.width() or output.WIDE
            return _jobs(client, width) if job_id is None else _job(client, job_id, width)

        if options.plain:
            output.results(
                options, _active_jobs(client) if job_id is None else [client.get(job_id)]
            )
        elif once or output.width() is None:
            output.console().print(draw())
        else:
            _live(draw, max(SHORTEST_S, every))
    return ExitCode.OK


def _live(draw: Callable[[], Text], every_s: float) -> None:
    """Redraw on the alternate screen until Ctrl-C; then print the last picture to the terminal."""
    from rich.live import Live  # late: only this command needs it

    console = output.TextConsole(soft_wrap=False)
    shown = draw()
    try:
        with Live(shown, console=console, screen=True, auto_refresh=False) as live:
            while True:
                shown = _fitted(draw(), console.height)
                live.update(shown, refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        output.console().print(shown)


def _fitted(shown: Text, height: int) -> Text:
    """The lines that fit on the screen, and the number of the others."""
    lines = shown.split("\n")
    if len(lines) <= height:
        return shown
    kept = Text("\n").join(lines[: height - 1])
    return kept.append(f"\n… and {len(lines) - height + 1} more lines", style="dim")


def _active_jobs(client: Client) -> Sequence[JobRow]:
    states = [state.value for state in State if state not in TERMINAL]
    found = client.list(state=states, sort=Sort.STATE.value)
    return [job for job, _ in zip(found, range(MOST_JOBS), strict=False)]


def _jobs(client: Client, width: int) -> Text:
    return top_view.jobs(_active_jobs(client), client.cluster(), client.address, time.time(), width)


def _job(client: Client, job_id: str, width: int) -> Text:
    job, verdict = client.get(job_id), client.verdict(job_id)
    after = (job.progress.step or 0) - RECENT_POINTS
    points = list(client.metrics(job_id, ["loss"], after if after > 0 else None))
    ranks = None if job.state.terminal else client.ranks(job_id)
    return top_view.job(job, verdict, ranks, client.incidents(job_id), points, width)
