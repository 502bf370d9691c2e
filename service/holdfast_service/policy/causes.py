"""The recovery policy's vocabulary: causes of faults, blame of nodes, repeated errors. Pure.

`policy/decision_ladder.py` decides what is done about a fault. Promises: the cause of an incident
is the deepest one seen (a dead process comes before the errors that it caused in its peers); an
error of the user's program is recognised when it repeats at the same step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from holdfast_workers.protocol.messages import UNKNOWN_STEP, ErrorReport


class Cause(StrEnum):
    """The cause of an incident, ordered from the deepest: of several, the first counts."""

    NODE_LOST = "node_lost"
    PREEMPTED = "preempted"  # the cluster removes the node, after a notice
    NODE_UNWELL = "node_unwell"  # a health probe found the node unfit for training
    AGENT_LOST = "agent_lost"
    OUT_OF_MEMORY = "out_of_memory"  # the kernel killed the process because memory ran out
    WORKER_CRASH = "worker_crash"
    CORRUPTION = "corruption"  # replicas of one state differ: a rank computed wrong bits
    HANG = "hang"  # a rank stopped making progress, and was identified
    USER_ERROR = "user_error"
    BAD_STATE = "bad_state"  # a saved state could not be loaded
    NOT_FINITE = "not_finite"  # a saved state was loaded, and its first step was not finite
    GUARD = "guard"  # loss or gradients are out of bounds; all ranks agree on the step
    CHECKPOINT_FAILED = "checkpoint_failed"  # a shard of the last checkpoint could not be written
    INTERNAL_ERROR = "internal_error"
    NO_PROGRESS = "no_progress"  # an attempt did not reach its first step in time
    STRAGGLER = "straggler"  # a rank has long computed more slowly than its peers
    RESTORE_UNAVAILABLE = "restore_unavailable"  # the remote tier did not answer during a restore
    DATA_UNAVAILABLE = "data_unavailable"  # data of the job did not come to a node in time
    REMOTE_UNAVAILABLE = (
        "remote_unavailable"  # the remote tier takes no checkpoint; no attempt ends for it
    )
    RESIZE = "resize"  # no fault: a better mesh has room, and the world ends for it
    COMMUNICATION = "communication"  # only errors of survivors; no process was seen to die


@dataclass(frozen=True)
class Fault:
    """One observed fault that ends an attempt."""

    cause: Cause
    attempt: int
    at: float
    """Time of the observation, by the observer's clock."""
    what: str
    """The evidence, as text for people."""
    rank: int | None = None
    worker: str | None = None
    agent: str | None = None
    ranks: tuple[int, ...] = ()
    """All ranks that were lost with it, if it is more than one process."""
    step: int = 0
    reached: int | None = None
    """The newest step that its world had shown; None: none yet."""
    error: ErrorReport | None = None
    """Its step is UNKNOWN_STEP if the rank shows none."""
    signal: str = ""
    """The name of the signal that ended the process, such as "SIGSEGV"."""
    exit_code: int | None = None
    """The exit code with which the process ended."""
    on_notice: bool = False
    """Whether the cluster had announced that it would remove the node."""
    certain: bool = True
    """Whether it proves that a member has left the attempt, so that the attempt can commit no
    further step. A member that only does not answer proves nothing."""

    @property
    def knows_step(self) -> bool:
        """Whether its rank or its world had shown a step."""
        own = self.error is not None and self.error.step != UNKNOWN_STEP
        return own or self.reached is not None


@dataclass(frozen=True)
class ErrorMark:
    """Identifies an error of a user's program, to recognise a repetition. Numbers in the message do
    not count, as they may be addresses, ranks or measurements."""

    type: str
    step: int
    """The step at which the rank itself was; UNKNOWN_STEP if it shows none."""
    message: str = ""
    location: str = ""
    reached: int | None = None
    """The newest step that its world showed; None: none."""

    @property
    def newest(self) -> int:
        """A step beyond this one is progress."""
        return max(self.step, 0 if self.reached is None else self.reached)

    def is_like(self, other: ErrorMark) -> bool:
        """Whether it is the same error, at any step."""
        mine = self.type, self.message, self.location
        return mine == (other.type, other.message, other.location)


@dataclass(frozen=True)
class Offence:
    """A fault for which a node, given by name, was to blame. Health findings and removal notices
    are not recorded here: they count against a node only while they last."""

    at: float
    node: str
    agent: str
    cause: Cause


@dataclass(frozen=True)
class GiveUp:
    """End the job as FAILED."""

    code: str
    message: str
    traceback: str | None = None


MOVE_AT_ONCE = frozenset({Cause.CORRUPTION, Cause.STRAGGLER})
"""Causes of which one fault moves ranks to another node if one is ready; others need two."""

SELF_INFLICTED_SIGNALS = frozenset(
    {"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT", "SIGTRAP", "SIGSYS"}
)
"""Signals caused by the process itself or by its node. Other signals are sent from outside on
purpose, and say nothing about the node."""

_NODE_BLAMING_SIGNALS = SELF_INFLICTED_SIGNALS - {"SIGABRT"}
"""A program aborts by its own decision: most often a communicator's watchdog that waited in vain
for another rank, perhaps on another node."""

NODE_BLAMING_CAUSES = MOVE_AT_ONCE | {Cause.HANG, Cause.AGENT_LOST, Cause.NODE_LOST}
"""Causes that always blame the node. An error or a crash of the program may be the same on every
node."""

_EXTERNAL_CAUSES = frozenset({Cause.NODE_LOST, Cause.PREEMPTED, Cause.AGENT_LOST})

_OTHER_STATE = frozenset({Cause.BAD_STATE, Cause.NOT_FINITE, Cause.RESTORE_UNAVAILABLE})
"""Causes after which the next attempt starts from another state. These end by themselves when no
state is left."""


_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?")
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_MESSAGE_LIMIT = 500


def primary_fault(faults: Sequence[Fault]) -> Fault:
    """The fault that explains the others: deepest cause, then earliest seen, then lowest rank."""
    order = list(Cause)
    return min(
        faults,
        key=lambda fault: (
            order.index(fault.cause),
            fault.at,
            -1 if fault.rank is None else fault.rank,
        ),
    )


def blames_node(fault: Fault) -> bool:
    """Whether the fault counts against the node on which it was seen."""
    if fault.agent is None or fault.on_notice:
        return False
    if fault.cause is Cause.WORKER_CRASH:
        return fault.signal in _NODE_BLAMING_SIGNALS
    return fault.cause in NODE_BLAMING_CAUSES


def is_external(fault: Fault) -> bool:
    """Whether the fault came from outside of the program, so that it does not predict the next
    attempt's outcome."""
    if fault.cause is Cause.WORKER_CRASH:
        return fault.signal != "" and fault.signal not in SELF_INFLICTED_SIGNALS
    return fault.cause in _EXTERNAL_CAUSES


def is_preemption(batch: Sequence[Fault]) -> bool:
    """Whether the loss was announced (a preemption), and so is no failure."""
    seen = [fault for fault in batch if fault.cause is not Cause.COMMUNICATION]
    return bool(seen) and all(fault.cause is Cause.PREEMPTED or fault.on_notice for fault in seen)


def is_data_outage(batch: Sequence[Fault]) -> bool:
    """Whether the attempt ended only because the job's data did not come."""
    seen = [fault for fault in batch if fault.cause is not Cause.COMMUNICATION]
    return bool(seen) and all(fault.cause is Cause.DATA_UNAVAILABLE for fault in seen)


def is_planned(batch: Sequence[Fault]) -> bool:
    """Whether the world ends only because it is resized: nothing failed."""
    return bool(batch) and all(fault.cause is Cause.RESIZE for fault in batch)


def is_lack_of_progress(batch: Sequence[Fault]) -> bool:
    """Whether the condemned attempt counts as an attempt without progress."""
    if not batch:
        return False
    first = primary_fault(batch)
    other = _OTHER_STATE | {Cause.RESIZE, Cause.DATA_UNAVAILABLE}
    return first.cause not in other and not is_external(first)


def error_mark_of(fault: Fault) -> ErrorMark | None:
    """The mark by which a repetition is recognised; None if the fault is not the program's own."""
    if fault.cause is Cause.OUT_OF_MEMORY:
        return ErrorMark("out of memory", fault.step, reached=fault.reached)
    if fault.cause is Cause.WORKER_CRASH and fault.exit_code is not None:
        return ErrorMark(f"exit code {fault.exit_code}", fault.step, reached=fault.reached)
    error = fault.error
    if fault.cause is not Cause.USER_ERROR or error is None:
        return None
    frames = _FRAME.findall(error.traceback)
    location = "{}:{} in {}".format(*frames[-1]) if frames else ""
    message = _NUMBER.sub("#", error.message)[:_MESSAGE_LIMIT]
    return ErrorMark(error.type, error.step, message, location, fault.reached)


def is_repeat_of(before: ErrorMark | None, fault: Fault, *, is_program: bool = False) -> bool:
    """Whether the fault repeats the error `before`, with no new step since. (A mark is dropped when
    an attempt has gone beyond its step.) An exception is at the same place if its rank is at the
    same step; if a rank shows no steps, if its world has come exactly as far, or if neither world
    has shown any. For a process that has ended, it is enough that it had not come further than the
    previous one; a world of a program (`is_program`) must have shown a step if that one had."""
    now = error_mark_of(fault)
    if before is None or now is None or not now.is_like(before):
        return False
    if fault.cause is not Cause.USER_ERROR:
        is_elsewhere = is_program and now.reached is None and before.reached is not None
        return now.newest <= before.newest and not is_elsewhere
    if UNKNOWN_STEP not in (now.step, before.step):
        return now.step == before.step
    return now.reached == before.reached


def is_missing_module(fault: Fault) -> bool:
    """Whether the program lacks a module from its start: a further attempt lacks it too. In a later
    attempt or step it may be the folder of the module that is away."""
    found = fault.error is not None and fault.error.type == ModuleNotFoundError.__name__
    return found and fault.attempt == 1 and fault.reached is None


def within_window(times: Sequence[float], now: float, window_s: float) -> tuple[float, ...]:
    """The times that still count at `now`."""
    return tuple(at for at in times if at > now - window_s)
