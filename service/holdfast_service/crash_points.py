"""Named points between a transition and its effect, where a test may end the process.

The names are part of what the chaos tests rely on; each stands just before or after the line
that a crash must not lose. In production a crossing does nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from enum import StrEnum


class Point(StrEnum):
    SUBMITTED = "submitted"  # the job is durable, the caller has no answer yet
    START_INTENDED = "start.intended"  # STARTING is durable, no supervisor was asked for
    START_DONE = "start.done"  # the supervisor exists, that is not yet written
    POLLED = "absorb.polled"  # a report was fetched, nothing of it is stored
    STORED = "absorb.stored"
    CANCEL_INTENDED = "cancel.intended"  # CANCELLING is durable, the supervisor does not know
    CANCEL_DONE = "cancel.done"
    PAUSE_INTENDED = "pause.intended"  # PAUSING is durable, the supervisor does not know
    PAUSE_DONE = "pause.done"
    PAUSED = "pause.released"  # nothing is left on the cluster, PAUSED is not yet written
    ENDED = "ended.stored"  # a terminal state is durable, everything is still on the cluster
    RELEASE_INTENDED = "release.intended"
    RELEASE_DONE = "release.done"  # nothing is left on the cluster, that is not yet written


Crossing = Callable[[Point], Awaitable[None]]


async def nowhere(_point: Point) -> None:
    """The crossing of production: nothing happens."""


def kill_at(name: str) -> Crossing:
    """A crossing that ends this process by SIGKILL at the point of that name."""
    fatal = Point(name)

    async def crossing(point: Point) -> None:
        if point is fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    return crossing


def chosen(crash_at: str | None) -> Crossing:
    """The crossing that settings ask for."""
    return kill_at(crash_at) if crash_at else nowhere
