"""`logs` and `events`: print the output of the ranks and the events of a job, stored or live."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli.common import (
    LONG_RETRY_S,
    OPTIONS,
    SHORT_RETRY_S,
    JobWord,
    NotUnderstood,
    Options,
    moment,
)
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output
from holdfast.cli.printing.terminal_text import coloured
from holdfast.client.calls import LogQuery
from holdfast_service.views.history import EventView, LogLineView

Follow = Annotated[
    bool, Parameter(name=("--follow", "-f"), negative="", help="Continue until the job has ended.")
]
Since = Annotated[
    str | None, Parameter(help="Only newer ones: 10m, 2h, or a time such as 2026-01-31T12:00.")
]
Level = Literal["debug", "info", "warning", "error"]

RANK_STYLES = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")
KIND_STYLES = {
    "incident": "yellow",
    "fault": "yellow",
    "guard": "yellow",
    "stalled": "yellow",
    "straggler": "yellow",
}
EVENT_INDENT = 16


def logs(
    job_word: JobWord,
    /,
    *,
    follow: Follow = False,
    rank: Annotated[int | None, Parameter(help="Only lines of this rank.")] = None,
    attempt: Annotated[int | None, Parameter(help="Only lines of this attempt.")] = None,
    since: Since = None,
    grep: Annotated[str | None, Parameter(help="Only lines that match this RE2 regex.")] = None,
    level: Annotated[Level | None, Parameter(help="Only lines of this level or worse.")] = None,
    tail: Annotated[int | None, Parameter(help="Only the last N lines.")] = None,
    options: Options = OPTIONS,
) -> ExitCode:
    """Print the output of a job's ranks."""
    after = None if since is None else moment(since, time.time())
    query = LogQuery(rank, attempt, after, grep, level)
    with options.connect(LONG_RETRY_S if follow else SHORT_RETRY_S) as client:
        job_id = client.find(job_word)
        if follow:
            lines = client.follow_logs(job_id, **asdict(query), tail=tail)
        else:
            lines = client.all_logs(job_id, query, tail=tail)
        with DetachNotice(follow):
            if not output.results(options, lines):
                _print_lines(lines)
    return ExitCode.OK


def events(
    job_word: JobWord,
    /,
    *,
    follow: Follow = False,
    since: Since = None,
    kind: Annotated[
        str | None, Parameter(help="Only kinds that match this regex, such as `incident`.")
    ] = None,
    options: Options = OPTIONS,
) -> ExitCode:
    """Print the numbered events of a job: its transitions, attempts, incidents, checkpoints."""
    after = 0.0 if since is None else moment(since, time.time())
    try:
        kinds = re.compile(kind or "")
    except re.error as error:
        raise NotUnderstood(f"--kind {kind!r} is not a regular expression: {error}") from error
    with options.connect(LONG_RETRY_S if follow else SHORT_RETRY_S) as client:
        job_id = client.find(job_word)
        found = client.follow(job_id) if follow else client.all_events(job_id)
        chosen = (event for event in found if event.at >= after and kinds.search(event.kind))
        shorten = output.NodeIdShortener()
        with DetachNotice(follow):
            if not output.results(options, chosen):
                for event in chosen:
                    line = event_line(event, shorten)
                    output.console().print(output.fold(line, EVENT_INDENT))
    return ExitCode.OK


def event_line(event: EventView, shorten: output.Shortener) -> Text:
    """`12:00:01    7  attempt.running  Attempt 1 is running, and its first step is 1.`"""
    until = "" if event.until is None else f" (until {output.clock(event.until)})"
    style = KIND_STYLES.get(event.kind.partition(".")[0], "")
    return Text.assemble(
        (output.clock(event.at), "dim"),
        (f" {event.seq:>5}  ", "dim"),
        (f"{event.kind:<22}", style),
        f" {shorten(event.text)}{until}",
    )


def plain_line(line: LogLineView) -> str:
    """`12:00:01 1/rank 0 step 7 loss 2.1`: time, attempt, writer, and what it wrote."""
    writer = "agent" if line.rank is None else f"rank {line.rank}"
    return f"{output.clock(line.at)} {line.attempt}/{writer} {coloured(line.text)}"


class DetachNotice:
    """Tells the user after Ctrl-C that only the display ended, and the job continues."""

    def __init__(self, follow: bool) -> None:
        self._follow = follow

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        if self._follow and kind is not None and issubclass(kind, KeyboardInterrupt):
            output.progress("\ndetached: the job continues; `holdfast cancel` ends it")


def _print_lines(lines: Iterable[LogLineView]) -> None:
    if not sys.stdout.isatty():
        for line in lines:
            sys.stdout.write(f"{plain_line(line)}\n")
            sys.stdout.flush()
        return
    console = output.console()
    for line in lines:
        writer = "agent" if line.rank is None else f"rank {line.rank}"
        style = "dim" if line.rank is None else RANK_STYLES[line.rank % len(RANK_STYLES)]
        prefix = Text.assemble(
            (output.clock(line.at), "dim"), (f" {line.attempt}/{writer} ", style)
        )
        console.print(prefix.append_text(Text.from_ansi(coloured(line.text))))
