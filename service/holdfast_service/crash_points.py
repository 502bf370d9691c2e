"""Named points between a state transition and its effect, at which a test may kill the process.

The chaos tests rely on these names. Each point stands just before or just after a line whose
effect a crash must not lose. In production, reaching a point does nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from enum import StrEnum


class CrashPoint(StrEnum):
    SUBMITTED = "submitted"  # the job is durable, the caller has no answer yet
    START_INTENDED = "start.intended"  # STARTING is durable, no supervisor was requested
    START_DONE = "start.done"  # the supervisor exists, but that is not yet recorded
    POLLED = "absorb.polled"  # a report was fetched, none of it is stored
    STORED = "absorb.stored"
    CANCEL_INTENDED = "cancel.intended"  # CANCELLING is durable, the supervisor does not know
    CANCEL_DONE = "cancel.done"
    PAUSE_INTENDED = "pause.intended"  # PAUSING is durable, the supervisor does not know
    PAUSE_DONE = "pause.done"
    PAUSED = "pause.released"  # nothing is left on the cluster, PAUSED is not yet recorded
    ENDED = "ended.stored"  # a terminal state is durable, everything is still on the cluster
    RELEASE_INTENDED = "release.intended"
    OPERATION_CLAIMED = "operation.claimed"  # a server has it, nothing is done
    OPERATION_WORKED = "operation.worked"  # all is read or written, nothing of that is stored
    OPERATION_ENDED = "operation.ended"
    RELEASE_DONE = "release.done"  # nothing is left on the cluster, but that is not yet recorded


CrashHook = Callable[[CrashPoint], Awaitable[None]]


async def never_crash(_point: CrashPoint) -> None:
    """The hook used in production: does nothing."""


def kill_at(name: str) -> CrashHook:
    """A hook that ends this process with SIGKILL at the point named `name`."""
    fatal = CrashPoint(name)

    async def crash_hook(point: CrashPoint) -> None:
        if point is fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    return crash_hook


def hook_from_setting(crash_at: str | None) -> CrashHook:
    """The hook for the setting `crash_at`."""
    return kill_at(crash_at) if crash_at else never_crash
