"""Shared by all commands: the server options, the output options, and the parsing of times."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext

    from holdfast.client.synchronous.jobs import Client

SHORT_RETRY_S = 2.0  # a user waits at the terminal
LONG_RETRY_S = 60.0  # long enough for a server restart while a command waits
COMPLETION_TIMEOUT_S = 1.0
MAX_COMPLETED_JOBS = 200
PLAIN = re.compile(r"[A-Za-z0-9._-]+")
"""A text that no shell interprets: a job's name is chosen by any user."""


def complete_job(context: CompletionContext) -> Iterator[tuple[str, str]]:
    """The names of jobs, or the ids of jobs whose name is not unique; active jobs first."""
    from collections import Counter

    from holdfast.client.job_names import short
    from holdfast.client.synchronous.jobs import Client

    prefix, address = context.incomplete, os.environ.get("HOLDFAST_ADDRESS")
    with Client(address, retry_s=0.0, timeout_s=COMPLETION_TIMEOUT_S) as client:
        rows = client.list(prefix)
        found = [job for job, _ in zip(rows, range(MAX_COMPLETED_JOBS), strict=False)]
    found.sort(key=lambda job: job.state.terminal)
    count_of_name = Counter(job.name for job in found)
    for short_id, job in zip(short([job.id for job in found]), found, strict=True):
        unique = count_of_name[job.name] == 1 and PLAIN.fullmatch(job.name)
        if unique and job.name.startswith(prefix):
            yield job.name, job.state.value
            continue
        part = short_id if short_id.startswith(prefix) else job.id
        if part.startswith(prefix):
            yield part, f"{job.name} {job.state.value}"


Assignments = Annotated[
    list[str] | None,
    Parameter(name="--set", negative="", help="path.to.key=value, overrides the file."),
]
JobWord = Annotated[
    str,
    Parameter(
        name="JOB",
        help="Name of the job, its id, or the start or end of the id.",
        completer=complete_job,
    ),
]
COMMON = Group("Server and output", sort_key=100)

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)")
_UNITS_S = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class NotUnderstood(HoldfastError, code="not_understood", status=400):
    """An argument of the command line cannot be parsed: a duration, a time, a storm."""


class Format(StrEnum):
    WIDE = "wide"
    JSON = "json"
    JSONL = "jsonl"
    YAML = "yaml"


@Parameter(name="*")
@dataclass(frozen=True)
class ServerOptions:
    """The server that a command connects to."""

    address: Annotated[
        str | None,
        Parameter(
            group=COMMON,
            help="URL of the server; default: HOLDFAST_ADDRESS, then see `holdfast config`.",
        ),
    ] = None
    context: Annotated[
        str | None, Parameter(group=COMMON, help="Name of a server, as given to `login`.")
    ] = None

    def connect(self, retry_s: float = SHORT_RETRY_S, timeout_s: float = 30.0) -> Client:
        from holdfast.client.synchronous.jobs import Client  # late: `--help` needs no client

        return Client(self.address, context=self.context, retry_s=retry_s, timeout_s=timeout_s)


@Parameter(name="*")
@dataclass(frozen=True)
class Options(ServerOptions):
    """The server options and the format of the results."""

    output: Annotated[
        Format | None,
        Parameter(name=("--output", "-o"), group=COMMON, help="Format of the results on stdout."),
    ] = None
    json: Annotated[bool, Parameter(negative="", group=COMMON, help="The same as -o json.")] = False

    @property
    def form(self) -> Format | None:
        """The requested format; None: text, as wide as the terminal."""
        return Format.JSON if self.json else self.output

    @property
    def plain(self) -> bool:
        """Whether stdout gets documents for programs, and nothing else."""
        return self.form not in (None, Format.WIDE)

    @property
    def wide(self) -> bool:
        return self.form is Format.WIDE


SERVER = ServerOptions()
OPTIONS = Options()


def seconds(text: str) -> float:
    """`500ms`, `20s`, `5m`, `1h`, `2d` or a plain number of seconds. Raises NotUnderstood."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise NotUnderstood(f"{text!r} is not a duration: write 500ms, 20s, 5m, 1h or 2d")
    return float(found[1]) * _UNITS_S[found[2]]


def moment(text: str, now: float) -> float:
    """Unix seconds of `10m` (ago), or of a time such as `2026-01-31T12:00` (local by default).

    Raises NotUnderstood.
    """
    if _DURATION.fullmatch(text) is not None:
        return now - seconds(text)
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise NotUnderstood(
            f"{text!r} is not a time: write how long ago (10m, 2h), or 2026-01-31T12:00"
        ) from None
