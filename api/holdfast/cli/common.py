"""What commands have in common: which server, the form of the output, words for times."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.client.client import Client

SHORT_RETRY_S = 2.0  # somebody looks at the terminal
LONG_RETRY_S = 60.0  # time for a server to be started again under a command that waits

JobWord = Annotated[
    str, Parameter(name="JOB", help="Name of the job, its id, or the beginning of the id.")
]
COMMON = Group("Server and output", sort_key=100)

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)")
_UNITS_S = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class NotUnderstood(HoldfastError):
    """Words of the command line that stand for nothing: a duration, a time, a storm."""

    code = "not_understood"
    status = 400


class Format(StrEnum):
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


@Parameter(name="*")
@dataclass(frozen=True)
class Server:
    """Which server a command talks to."""

    address: Annotated[
        str | None,
        Parameter(
            group=COMMON,
            help="URL of the server; else HOLDFAST_ADDRESS, else as `holdfast config` shows.",
        ),
    ] = None
    context: Annotated[
        str | None, Parameter(group=COMMON, help="A server by the name that `login` gave it.")
    ] = None

    def connect(self, retry_s: float = SHORT_RETRY_S, timeout_s: float = 30.0) -> Client:
        from holdfast.client.client import Client  # late: `--help` asks no server

        return Client(self.address, context=self.context, retry_s=retry_s, timeout_s=timeout_s)


@Parameter(name="*")
@dataclass(frozen=True)
class Options(Server):
    """The same, and how results are printed."""

    output: Annotated[
        Format | None,
        Parameter(name=("--output", "-o"), group=COMMON, help="Of the results, on stdout."),
    ] = None
    json: Annotated[bool, Parameter(negative="", group=COMMON, help="The same as -o json.")] = False

    @property
    def form(self) -> Format | None:
        """None: for people, at a terminal's width."""
        return Format.JSON if self.json else self.output

    @property
    def plain(self) -> bool:
        """For programs: documents, and nothing else on stdout."""
        return self.form in (Format.JSON, Format.YAML)

    @property
    def wide(self) -> bool:
        return self.form is Format.WIDE


SERVER = Server()
OPTIONS = Options()


def seconds(words: str) -> float:
    """`500ms`, `20s`, `5m`, `1h`, `2d` or a plain number of seconds. Raises NotUnderstood."""
    found = _DURATION.fullmatch(words)
    if found is None:
        raise NotUnderstood(f"{words!r} is no duration: write 500ms, 20s, 5m, 1h or 2d")
    return float(found[1]) * _UNITS_S[found[2]]


def moment(words: str, now: float) -> float:
    """Unix seconds of `10m` (ago), or of a time as `2026-01-31T12:00` (local unless it says).

    Raises NotUnderstood.
    """
    if _DURATION.fullmatch(words) is not None:
        return now - seconds(words)
    try:
        return datetime.datetime.fromisoformat(words).timestamp()
    except ValueError:
        raise NotUnderstood(
            f"{words!r} is no time: write how long ago (10m, 2h), or 2026-01-31T12:00"
        ) from None
