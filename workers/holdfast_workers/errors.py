"""The single exception tree of this package: `WorkersError` is the base of every exception that it
raises. Also shortens the messages of torch's exceptions."""

from __future__ import annotations

import re


class WorkersError(Exception):
    """Base of all errors of the data plane. The message says what is wrong, where, and what to
    do."""


class StaleCommand(WorkersError):
    """The command has an older epoch or attempt than one that the agent has already obeyed."""


_SOURCE = re.compile(r"^\[[^\]]*:\d+\]\s*")


def short_error(message: str) -> str:
    """The core of a torch message about a lost connection: its first line, without the location in
    torch's sources at the beginning and without the advice at the end."""
    return _SOURCE.sub("", message.partition("\n")[0]).partition(". ")[0]
