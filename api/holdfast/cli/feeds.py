"""`logs` and `events`: what the ranks wrote, and what happened, there already or as it comes."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli import output
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
from holdfast.client.calls import LogFilter
from holdfast_service.views.jobs import EventView, LogLineView

Follow = Annotated[
    bool, Parameter(name=("--follow", "-f"), negative="", help="Until the job has ended.")
]
Since = Annotated[
    str | None, Parameter(help="Not what is older: 10m, 2h, or a time as 2026-01-31T12:00.")
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
LONGEST_FACT = 60
SMALL = 4
EVENT_INDENT = 16


def logs(
    job_word: JobWord,
    /,
    *,
    follow: Follow = False,
    rank: Annotated[int | None, Parameter(help="Only this rank's.")] = None,
    attempt: Annotated[int | None, Parameter(help="Only this attempt's.")] = None,
    since: Since = None,
    grep: Annotated[str | None, Parameter(help="Only lines in which this RE2 regex is.")] = None,
    level: Annotated[Level | None, Parameter(help="Only lines of this level or worse.")] = None,
    tail: Annotated[int | None, Parameter(help="Only the last lines.")] = None,
    options: Options = OPTIONS,
) -> ExitCode:
    """Print what the ranks of a job wrote."""
    after = None if since is None else moment(since, time.time())
    wanted = LogFilter(rank, attempt, after, grep, level)
    with options.connect(LONG_RETRY_S if follow else SHORT_RETRY_S) as client:
        job_id = client.find(job_word)
        if follow:
            lines = client.follow_logs(job_id, **wanted.params(), tail=tail)
        else:
            lines = client.all_logs(job_id, wanted, tail=tail)
        with Detaching(follow):
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
        str | None, Parameter(help="Only kinds in which this regex is, as `incident`.")
    ] = None,
    options: Options = OPTIONS,
) -> ExitCode:
    """Print the numbered events of a job: its transitions, attempts, incidents, checkpoints."""
    after = 0.0 if since is None else moment(since, time.time())
    try:
        kinds = re.compile(kind or "")
    except re.error as error:
        raise NotUnderstood(f"--kind {kind!r} is no regular expression: {error}") from error
    with options.connect(LONG_RETRY_S if follow else SHORT_RETRY_S) as client:
        job_id = client.find(job_word)
        found = client.follow(job_id) if follow else client.all_events(job_id)
        chosen = (item for item in found if item.at >= after and kinds.search(item.kind))
        with Detaching(follow):
            if not output.results(options, chosen):
                for entry in chosen:
                    output.console().print(output.fold(event_line(entry), EVENT_INDENT))
    return ExitCode.OK


def event_line(event: EventView) -> Text:
    """`12:00:01    7  attempt.running  attempt 1`."""
    style = KIND_STYLES.get(event.kind.partition(".")[0], "")
    return Text.assemble(
        (output.clock(event.at), "dim"),
        (f" {event.seq:>5}  ", "dim"),
        (f"{event.kind:<22}", style),
        f" {facts(event.data)}",
    )


def facts(data: Mapping[str, Any]) -> str:
    """What an event tells, on one line; long values are left to -o json."""
    told = []
    for name, value in data.items():
        if value in (None, "", [], {}):
            continue
        if isinstance(value, dict) and len(value) <= SMALL and _flat(value.values()):
            told.append(f"{name} " + " ".join(f"{key}={one}" for key, one in value.items()))
            continue
        if isinstance(value, dict | list):
            told.append(f"{name} ({len(value)})")
            continue
        if name.endswith("_at") and isinstance(value, float):
            told.append(f"{name} {output.clock(value)}")
            continue
        text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
        told.append(f"{name} {text if len(text) <= LONGEST_FACT else text[:LONGEST_FACT] + '…'}")
    return ", ".join(told)


def _flat(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float | str) for value in values)


class Detaching:
    """Ctrl-C while following only ends the looking; says so where somebody looks."""

    def __init__(self, follow: bool) -> None:
        self._follow = follow

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        if self._follow and kind is not None and issubclass(kind, KeyboardInterrupt):
            output.talk("\ndetached: the job goes on; `holdfast cancel` would end it")


def _print_lines(lines: Iterable[LogLineView]) -> None:
    if not sys.stdout.isatty():
        for line in lines:
            who = "agent" if line.rank is None else f"rank {line.rank}"
            sys.stdout.write(f"{output.clock(line.at)} {line.attempt}/{who} {line.text}\n")
            sys.stdout.flush()
        return
    console = output.console()
    for line in lines:
        who = "agent" if line.rank is None else f"rank {line.rank}"
        style = "dim" if line.rank is None else RANK_STYLES[line.rank % len(RANK_STYLES)]
        prefix = Text.assemble((output.clock(line.at), "dim"), (f" {line.attempt}/{who} ", style))
        console.print(prefix.append_text(Text.from_ansi(line.text)))
