"""The one exception tree of this package: catch `WorkersError` to catch them all."""

from __future__ import annotations


class WorkersError(Exception):
    """Anything that the data plane itself found wrong. Says what, where, and what to do."""


class StaleCommand(WorkersError):
    """The command is of an older epoch or attempt than the agent has already obeyed."""
