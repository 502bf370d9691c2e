"""The words of the recovery policy: what can go wrong, who is blamed for it, when it is the same
again. Pure. What is then done about it, says `policy/decision_ladder.py`.

Promises: the cause named is the deepest one seen (a death before the errors it made its peers
raise); what a user's program does to itself is known again when it comes back at the same step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from holdfast_workers.protocol.messages import WorkerError


class Cause(StrEnum):
    """What an incident is put down to, the deepest first: of several, the first here counts."""

    NODE_LOST = "node_lost"
    PREEMPTED = "preempted"  # the node is taken away on notice
    NODE_UNWELL = "node_unwell"  # a probe found that the node is not fit to train on
    AGENT_LOST = "agent_lost"
    OUT_OF_MEMORY = "out_of_memory"  # the kernel ended the process for want of memory
    WORKER_CRASH = "worker_crash"
    CORRUPTION = "corruption"  # replicas of one state differ: somebody computed other bits
    HANG = "hang"  # a rank stopped to make progress, and was named
    USER_ERROR = "user_error"
    BAD_STATE = "bad_state"  # a saved state could not be loaded
    NOT_FINITE = "not_finite"  # a saved state was loaded, and its first step was not finite
    GUARD = "guard"  # loss or gradients are out of bounds, as all ranks saw in the same step
    CHECKPOINT_FAILED = "checkpoint_failed"  # the last shard could not be written
    INTERNAL_ERROR = "internal_error"
    NO_PROGRESS = "no_progress"  # an attempt was not up, or not at its first step, in time
    STRAGGLER = "straggler"  # a rank computes more slowly than its peers, for long
    RESTORE_UNAVAILABLE = "restore_unavailable"  # the remote tier did not answer at a restore
    REMOTE_UNAVAILABLE = "remote_unavailable"  # it takes no checkpoint; no attempt ends for it
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
    ended_by: str = ""
    """How a process ended: a signal's name ("SIGSEGV"), or "exit code 3"."""
    on_notice: bool = False
    """Whether the cluster had said that it would take the node away."""
    certain: bool = True
    """Whether it proves that a member has left the attempt, which then can commit no step more.
    A member that merely does not answer proves nothing."""


@dataclass(frozen=True)
class ErrorMark:
    """What makes two errors of a user's program the same one: numbers in a message apart, which
    may be addresses, ranks or measurements."""

    type: str
    step: int
    message: str = ""
    location: str = ""


@dataclass(frozen=True)
class Offence:
    """A node, by its name, was to blame for a fault. Health and notice have no part in this: they
    speak against a node as long as they last."""

    at: float
    node: str
    agent: str
    cause: Cause

    def data(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "node": self.node,
            "agent": self.agent,
            "cause": self.cause.value,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Offence:
        return cls(data["at"], data["node"], data["agent"], Cause(data["cause"]))


@dataclass(frozen=True)
class GiveUp:
    """End the job as FAILED."""

    code: str
    message: str
    traceback: str | None = None
    step: int = 0


AT_ONCE = frozenset({Cause.CORRUPTION, Cause.STRAGGLER})
"""One such fault is enough to train on another node where there is one; of others it takes two."""

OWN_SIGNALS = frozenset({"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT", "SIGTRAP", "SIGSYS"})
"""What a process brings on itself, or its node on it. Others come from outside, and say nothing
of the node: whoever ended the process chose it."""

BLAMED = AT_ONCE | {Cause.HANG, Cause.AGENT_LOST, Cause.NODE_LOST}
"""Causes that speak against the node, whatever else is known. A program's error, or its crash, may
be the same on every node."""

_FROM_OUTSIDE = frozenset({Cause.NODE_LOST, Cause.PREEMPTED, Cause.AGENT_LOST})

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?")
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_MESSAGE_LIMIT = 500


def primary(faults: Sequence[Fault]) -> Fault:
    """The fault that explains the others: deepest cause, then earliest seen, then lowest rank."""
    order = list(Cause)
    return min(
        faults,
        key=lambda one: (order.index(one.cause), one.at, -1 if one.rank is None else one.rank),
    )


def blames_node(fault: Fault) -> bool:
    """Whether the fault speaks against the node that it was seen on."""
    if fault.agent is None or fault.on_notice:
        return False
    if fault.cause is Cause.WORKER_CRASH:
        return fault.ended_by in OWN_SIGNALS
    return fault.cause in BLAMED


def came_from_outside(fault: Fault) -> bool:
    """Whether something else than the program brought it about: it says nothing of how the next
    attempt will fare."""
    if fault.cause is Cause.WORKER_CRASH:
        return fault.ended_by.startswith("SIG") and fault.ended_by not in OWN_SIGNALS
    return fault.cause in _FROM_OUTSIDE


def mark_of(fault: Fault) -> ErrorMark | None:
    """By what a fault that may be the program's own is known when it comes back; None if it is
    not."""
    if fault.cause is Cause.OUT_OF_MEMORY:
        return ErrorMark("out of memory", fault.step)
    if fault.cause is Cause.WORKER_CRASH and fault.ended_by.startswith("exit code"):
        return ErrorMark(fault.ended_by, fault.step)
    error = fault.error
    if fault.cause is not Cause.USER_ERROR or error is None:
        return None
    frames = _FRAME.findall(error.traceback)
    location = "{}:{} in {}".format(*frames[-1]) if frames else ""
    message = _NUMBER.sub("#", error.message)[:_MESSAGE_LIMIT]
    return ErrorMark(error.type, error.step, message, location)


def comes_back(before: ErrorMark | None, fault: Fault) -> bool:
    """Whether a program does to itself what it did `before`, with no new step since. (A mark is
    dropped with the first step beyond its own.) An exception tells in which step it was; of a
    process that has ended, it is enough that it had not come further than the one before."""
    now = mark_of(fault)
    if before is None or now is None:
        return False
    if fault.cause is Cause.USER_ERROR:
        return now == before
    return now.type == before.type and now.step <= before.step


def within_window(times: Sequence[float], now: float, window_s: float) -> tuple[float, ...]:
    """Those that still count at `now`."""
    return tuple(at for at in times if at > now - window_s)
