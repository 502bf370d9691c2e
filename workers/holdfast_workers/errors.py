"""The one exception tree of this package: catch `WorkersError` to catch them all; and what others'
exceptions say, in short."""

from __future__ import annotations

import re


class WorkersError(Exception):
    """Anything that the data plane itself found wrong. Says what, where, and what to do."""


class StaleCommand(WorkersError):
    """The command is of an older epoch or attempt than the agent has already obeyed."""


_SOURCE = re.compile(r"^\[[^\]]*:\d+\]\s*")


def complaint(message: str) -> str:
    """What torch says of a lost connection, in short: the first line, without the place in torch's
    sources that it begins with, and without the advice that it ends with."""
    return _SOURCE.sub("", message.partition("\n")[0]).partition(". ")[0]
