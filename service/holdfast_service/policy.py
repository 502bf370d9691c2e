"""The recovery policy: from the faults of a moment to one verdict. Pure.

Promises: the cause named is the deepest one seen (a death before the errors it made its peers
raise); a user's error that comes back at the same step ends the job and burns no standby; the
budget ends what never gets better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from holdfast_workers.messages import WorkerError


class Cause(StrEnum):
    """What an incident is put down to, the deepest first: of several, the first here counts."""

    NODE_LOST = "node_lost"
    AGENT_LOST = "agent_lost"
    WORKER_CRASH = "worker_crash"
    USER_ERROR = "user_error"
    BAD_STATE = "bad_state"  # a saved state could not be loaded
    CHECKPOINT_FAILED = "checkpoint_failed"  # the last shard could not be written
    INTERNAL_ERROR = "internal_error"
    NO_PROGRESS = "no_progress"  # an attempt was not up, or not at its first step, in time
    COMMUNICATION = "communication"  # only what survivors felt; nobody was seen to die


@dataclass(frozen=True)
class Fault:
    """One thing that condemns an attempt, as somebody saw it."""

    cause: Cause
    attempt: int
    at: float
    """When it was seen, by the clock of the machine that saw it."""
    what: str
    """In words, for people: the evidence."""
    rank: int | None = None
    worker: str | None = None
    agent: str | None = None
    ranks: tuple[int, ...] = ()
    """All ranks that went with it, where it is more than one process."""
    step: int = 0
    error: WorkerError | None = None
    certain: bool = True
    """Whether it proves that a member has left the attempt, which then can commit no step more.
    A member that merely does not answer proves nothing."""


@dataclass(frozen=True)
class ErrorMark:
    """What makes two user errors the same one."""

    type: str
    step: int


@dataclass(frozen=True)
class Reform:
    """Form a new attempt. `mark`: the user error to remember, if it was one."""

    reason: str
    mark: ErrorMark | None = None


@dataclass(frozen=True)
class GiveUp:
    """End the job as FAILED."""

    code: str
    message: str
    traceback: str | None = None
    step: int = 0


def primary(faults: Sequence[Fault]) -> Fault:
    """The fault that explains the others: deepest cause, then earliest seen, then lowest rank."""
    order = list(Cause)
    return min(
        faults,
        key=lambda one: (order.index(one.cause), one.at, -1 if one.rank is None else one.rank),
    )


def judge(
    faults: Sequence[Fault],
    *,
    failures: Sequence[float],
    remembered: ErrorMark | None,
    now: float,
    max_failures: int,
    window_s: float,
) -> Reform | GiveUp:
    """The verdict on one condemned attempt. `failures` are the times of all, this one included.

    `remembered` is the user error of before, unless a later step was reached since.
    """
    first = primary(faults)
    mark: ErrorMark | None = None
    if first.cause is Cause.USER_ERROR and first.error is not None:
        mark = ErrorMark(first.error.type, first.error.step)
        if mark == remembered:
            return GiveUp(
                code="user_error",
                message=f"{first.error.type} at step {mark.step}, twice in a row: "
                f"{first.error.message}",
                traceback=first.error.traceback,
                step=mark.step,
            )
    recent = within_window(failures, now, window_s)
    if len(recent) > max_failures:
        return GiveUp(
            code="too_many_failures",
            message=f"{len(recent)} failures within {window_s:g} s, {max_failures} allowed; "
            f"the last: {first.what}",
            traceback=first.error.traceback if first.error else None,
            step=first.step,
        )
    return Reform(reason=first.what, mark=mark)


def within_window(failures: Sequence[float], now: float, window_s: float) -> tuple[float, ...]:
    """The failures that still count at `now`."""
    return tuple(at for at in failures if at > now - window_s)
