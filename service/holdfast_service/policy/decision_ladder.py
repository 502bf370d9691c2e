"""The decision ladder: chooses one action for a fault from the situation, with its reason, and with
the reason against every other action. Pure.

Promises: the cheapest action that fits is chosen; a fault that repeats, exceeds the budget or
prevents progress ends the job with a named reason; the same situation gives the same decision.
`docs/recovery-policy.md` has the whole table, which is generated from this code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from holdfast_service.placement.rank_assignment import format_ranks
from holdfast_service.policy.causes import Cause, GiveUp
from holdfast_workers.protocol.messages import ErrorReport

DISTRUST_AFTER = 2
"""Number of faults within the window after which a node gets no more ranks."""
DATA_OUTAGE_S = 4 * 3600.0
"""The time, with no step made, for which data may be unavailable until the job ends."""


class Action(StrEnum):
    """The actions after a fault, the cheapest first."""

    IGNORE = "ignore"  # record it; training continues
    REFORM = "re-form in place"  # a new attempt with the same processes
    REPLACE_WORKER = "replace the worker"  # another process on the same node
    REPLACE_NODE = (
        "replace the node"  # its ranks move; a node that is to blame is avoided from then on
    )
    ROLL_BACK = "roll back and skip a data window"
    SHRINK = "shrink to a smaller mesh"
    GROW = "grow to a larger mesh"
    WAIT = "wait for a replacement"  # with a deadline
    STOP = "stop"


@dataclass(frozen=True)
class Budget:
    """The job's failures within the window, this fault included, and their limits."""

    failures: int = 1
    max_failures: int = 20
    preemptions: int = 0
    max_preemptions: int = 100
    without_progress: int = 1
    """Attempts in a row that ended by themselves without a step beyond the newest step of their
    line of history."""
    max_without_progress: int = 5
    window_s: float = 3600.0

    @property
    def failures_left(self) -> int:
        return max(0, self.max_failures - self.failures)


@dataclass(frozen=True)
class Situation:
    """Everything that a decision depends on."""

    cause: Cause
    what: str = ""
    """The evidence, as text."""
    step: int | None = 0
    """None: not known."""
    error: ErrorReport | None = None
    named: bool = True
    """Whether a process is known that must be replaced: it hung, did not start, or has ended."""
    node_gone: bool = False
    """Whether no rank can run on the node, or under its agent, at present."""
    times: int = 1
    """Number of times that the node was to blame within the window, this time included. For
    corruption, only earlier corruption counts: a crash says nothing about computed bits."""
    repeated: bool = False
    """Whether the program failed in the same way at the same step before, with no later step."""
    room: bool = False
    """Whether another node, which is not avoided, is ready to take the ranks."""
    smaller: bool = False
    """Whether a smaller mesh of the job has room on the nodes that may run ranks."""
    is_program: bool = False
    """Whether the ranks run a program of the user, which every attempt starts again."""
    too_large: bool = False
    """Whether the world has more nodes than the job's user ordered."""
    may_roll_back: bool = False
    """Whether the ranks have agreed to roll back, and on the data to skip."""
    ended: bool = False
    """Whether no more steps are made, because other faults exist beside a tolerable fault."""
    data_outage_s: float = 0.0
    """The time since data was first unavailable, with no step since; 0: it was not."""
    budget: Budget = Budget()


@dataclass(frozen=True)
class RefusedAlternative:
    """An action that was not taken, and the reason."""

    action: Action
    why: str


@dataclass(frozen=True)
class Decision:
    """The chosen action with its reason, and every other action with the reason against it."""

    action: Action
    reason: str
    refused: tuple[RefusedAlternative, ...] = ()
    end: GiveUp | None = None
    """The end of the job, for STOP."""


@dataclass(frozen=True)
class SeatingResult:
    """The result of the placement of ranks after a decision."""

    moved: tuple[int, ...] = ()
    """Ranks that are on another agent than before."""
    forked: tuple[int, ...] = ()
    """Ranks that got a new process on the same agent."""
    replaced: tuple[int, ...] = ()
    """Ranks that another process of the same agent has, which had none."""
    onto: tuple[str, ...] = ()
    """The agents that took over the moved ranks."""
    why_moved: str = ""
    """The reason why the moved ranks left their agents."""
    resized: str = ""
    """The change of the mesh, as text; "" if it is the same."""
    grown: bool = False
    """Whether the mesh has more ranks than before."""
    anew: str = ""
    """Why nothing is known of the processes before; "" if the last world is known."""
    is_program: bool = False
    """Whether the ranks run a program of the user, which every attempt starts again."""


def decide(now: Situation) -> Decision:
    """The cheapest action that fits, with the reason against every other action."""
    end = _reason_to_stop(now)
    verdicts = {action: _verdict(action, now, end) for action in Action}
    chosen = next(action for action, verdict in verdicts.items() if verdict.fits)
    refused = tuple(
        RefusedAlternative(action, verdict.why if not verdict.fits else "not needed: it costs more")
        for action, verdict in verdicts.items()
        if action is not chosen
    )
    ended = end if chosen is Action.STOP else None
    return Decision(chosen, verdicts[chosen].why, refused, ended)


def applied_decision(judged: Decision | None, seating: SeatingResult) -> Decision:
    """The decision as applied, after the fence has shown which processes and nodes are left."""
    action, reason = _applied_action(seating)
    if judged is None:
        return Decision(action, reason)
    if judged.action in (action, Action.ROLL_BACK):
        return replace(judged, reason=f"{judged.reason}; {reason}")
    # A missing node may have returned, or a node to be left may have no ready replacement.
    earlier = RefusedAlternative(
        judged.action, f"decided at first ({judged.reason}), but placement found otherwise"
    )
    others = tuple(other for other in judged.refused if other.action is not action)
    refused = sorted((*others, earlier), key=lambda other: list(Action).index(other.action))
    return Decision(action, reason, tuple(refused))


class _Verdict(NamedTuple):
    fits: bool
    why: str


_NO_PROCESS_LOST = frozenset(
    {
        Cause.USER_ERROR,
        Cause.BAD_STATE,
        Cause.NOT_FINITE,
        Cause.CHECKPOINT_FAILED,
        Cause.RESTORE_UNAVAILABLE,
        Cause.DATA_UNAVAILABLE,
        Cause.COMMUNICATION,
    }
)
"""Causes after which every process can go on."""
_TOLERABLE = frozenset({Cause.STRAGGLER, Cause.NODE_UNWELL, Cause.PREEMPTED})
"""Correct steps are still made: without a better node, training continues on this one."""

_REFORM_BECAUSE = {
    Cause.USER_ERROR: "an exception may have an external cause: the same processes try once more",
    Cause.BAD_STATE: "the processes are alive; a further copy, older step or tier is tried",
    Cause.NOT_FINITE: "the processes are alive; the state is loaded from another place",
    Cause.CHECKPOINT_FAILED: "the processes are alive; the last step's state is saved once more",
    Cause.RESTORE_UNAVAILABLE: "the processes are alive; the restore from storage is retried",
    Cause.DATA_UNAVAILABLE: "the processes are alive; the data is waited for again",
    Cause.COMMUNICATION: "no process was seen to die: the same processes form new groups",
    Cause.NO_PROGRESS: "no particular process is late: the same processes form new groups",
    Cause.CORRUPTION: "the wrong rank is unknown yet: the same processes compute the step again",
}
_REFORM_PROGRAM_BECAUSE = {
    Cause.USER_ERROR: "an exception may have an external cause: the program starts once more",
    Cause.COMMUNICATION: "no process was seen to end by itself: the program starts again",
    Cause.NO_PROGRESS: "no particular process is late: the program starts again",
}
"""The same for a user's program: none of its processes goes on."""
_REFORM_UNLESS_NAMED = frozenset({Cause.NO_PROGRESS, Cause.CORRUPTION})
"""Causes after which all processes stay, unless one of them is known to be to blame."""
_REPLACE_WORKER_BECAUSE = {
    Cause.HANG: "a fresh process on the same node takes the rank",
    Cause.CORRUPTION: "no other node is ready: a fresh process on the same node, once",
    Cause.INTERNAL_ERROR: "the process is not trusted any more, but its node is",
    Cause.NO_PROGRESS: "the process did not start in time; another one on its node takes the rank",
    Cause.OUT_OF_MEMORY: "memory may have been short for a moment; the node is healthy",
    Cause.PREEMPTED: "the process was ended from outside; its node is still available",
    Cause.WORKER_CRASH: "the process has ended; its node is healthy",
}


def is_tolerable(cause: Cause) -> bool:
    """Whether a fault with this cause alone does not end an attempt."""
    return cause in _TOLERABLE or cause is Cause.REMOTE_UNAVAILABLE


def _verdict(action: Action, now: Situation, end: GiveUp | None) -> _Verdict:
    if action is Action.STOP:
        return _Verdict(True, end.message if end else "there is no reason to end the job")
    if end is not None:
        return _Verdict(False, "it would not help: see the reason why the job ends")
    if now.cause is Cause.RESIZE and action not in (Action.GROW, Action.SHRINK):
        return _Verdict(False, "nothing has failed")
    return _EVALUATE[action](now)


def _ignore(now: Situation) -> _Verdict:
    if now.cause is Cause.REMOTE_UNAVAILABLE:
        return _Verdict(
            True,
            "training does not need the remote tier; the newest state is saved once it answers",
        )
    if not _can_continue(now):
        return _Verdict(False, "no correct step is made at present")
    if _exhausted_budget(now) is not None:
        return _Verdict(True, "steps are still made, and no budget is left to leave the node")
    if _should_move(now) and now.room:
        return _Verdict(False, "a better node is ready")
    if _may_shrink_away(now):
        return _Verdict(False, "a smaller mesh can train without the node")
    return _Verdict(True, "steps are still made, and no better node is ready")


def _reform(now: Situation) -> _Verdict:
    if now.cause in _NO_PROCESS_LOST or (now.cause in _REFORM_UNLESS_NAMED and not now.named):
        own = _REFORM_PROGRAM_BECAUSE if now.is_program else {}
        return _Verdict(True, own.get(now.cause, _REFORM_BECAUSE[now.cause]))
    if now.cause is Cause.GUARD:
        return _Verdict(False, "the same data would give the same result")
    if _node_unusable(now):
        return _Verdict(False, "the processes on the node are lost")
    return _Verdict(False, "a process is lost or not trusted any more")


def _replace_worker(now: Situation) -> _Verdict:
    if _node_unusable(now):
        return _Verdict(False, "the node or its agent is lost: no process can be forked there")
    if now.cause not in _REPLACE_WORKER_BECAUSE and now.cause not in _TOLERABLE:
        return _Verdict(False, "no process is lost or to blame")
    if _can_continue(now):
        return _Verdict(False, "a new process on the same node changes nothing")
    if _should_move(now) and now.room:
        return _Verdict(False, _reason_to_leave_node(now))
    return _Verdict(True, _REPLACE_WORKER_BECAUSE[now.cause])


def _replace_node(now: Situation) -> _Verdict:
    if _node_unusable(now):
        if now.room:
            return _Verdict(True, "its ranks move together to a node that is ready")
        return _Verdict(False, "no other node is ready")
    if not _should_move(now):
        why = (
            "the node was to blame once, which may be chance"
            if now.times
            else "nothing counts against the node"
        )
        return _Verdict(False, why)
    if not now.room:
        return _Verdict(False, "no other node is ready")
    return _Verdict(True, f"{_reason_to_leave_node(now)}; another node is ready")


def _roll_back(now: Situation) -> _Verdict:
    if now.cause is not Cause.GUARD:
        return _Verdict(False, "the data is not the cause")
    return _Verdict(
        True, "an older state is loaded, and the data read since is skipped and recorded"
    )


def _grow(now: Situation) -> _Verdict:
    if now.cause is not Cause.RESIZE:
        return _Verdict(False, "not the answer to a fault")
    if now.too_large:
        return _Verdict(False, "fewer nodes were ordered")
    return _Verdict(True, f"a larger mesh is worth the pause: {now.what}")


def _wait(now: Situation) -> _Verdict:
    if not _node_unusable(now):
        return _Verdict(False, "no node is missing")
    return _Verdict(
        True,
        "no node has room for its ranks; they go to the restarted node or to another one",
    )


def _shrink(now: Situation) -> _Verdict:
    if now.cause is Cause.RESIZE:
        why = now.what if now.too_large else "no smaller mesh was ordered"
        return _Verdict(now.too_large, why)
    if not _node_unusable(now) and not _may_shrink_away(now):
        return _Verdict(False, "no node is missing")
    if now.room:
        return _Verdict(False, "another node is ready")
    if not now.smaller:
        return _Verdict(False, "the job has no smaller mesh that would have room")
    return _Verdict(True, "a smaller mesh trains on while nodes are missing")


def _may_shrink_away(now: Situation) -> bool:
    """Whether the node should be left although steps are made, and a smaller mesh allows it."""
    leaves = now.cause in (Cause.PREEMPTED, Cause.NODE_UNWELL) and _can_continue(now)
    return leaves and now.smaller and not now.room


_EVALUATE: dict[Action, Callable[[Situation], _Verdict]] = {
    Action.IGNORE: _ignore,
    Action.REFORM: _reform,
    Action.REPLACE_WORKER: _replace_worker,
    Action.REPLACE_NODE: _replace_node,
    Action.ROLL_BACK: _roll_back,
    Action.SHRINK: _shrink,
    Action.GROW: _grow,
    Action.WAIT: _wait,
}


def _can_continue(now: Situation) -> bool:
    """Whether steps are still made although a process or node should be replaced."""
    process_taken = now.cause is Cause.PREEMPTED and now.named  # a process, not the node
    return now.cause in _TOLERABLE and not now.node_gone and not process_taken


def _node_unusable(now: Situation) -> bool:
    return now.node_gone or now.cause in (Cause.NODE_LOST, Cause.AGENT_LOST)


def _should_move(now: Situation) -> bool:
    at_once = now.cause is Cause.CORRUPTION or _can_continue(now)
    return at_once or now.times >= DISTRUST_AFTER


def _reason_to_leave_node(now: Situation) -> str:
    match now.cause:
        case Cause.CORRUPTION:
            return "the node computed other bits than its replicas"
        case Cause.NODE_UNWELL:
            return "the node is unfit for training"
        case Cause.STRAGGLER:
            return "the node has long been slower than its peers"
        case Cause.PREEMPTED:
            return "the cluster removes the node"
    return f"the node was to blame {now.times} times within {now.budget.window_s:g} s"


def _reason_to_stop(now: Situation) -> GiveUp | None:
    """Why the job must end, or None."""
    if now.cause in (Cause.REMOTE_UNAVAILABLE, Cause.RESIZE):
        return None
    if now.repeated:
        return _end_for_repetition(now)
    if now.cause is Cause.GUARD and not now.may_roll_back:
        return GiveUp("guard", now.error.message if now.error else now.what)
    if now.cause is Cause.CORRUPTION and now.times >= DISTRUST_AFTER and not now.room:
        why = f"{now.what}; this is the second time, and no other node is ready"
        return GiveUp("corruption", why)
    if _can_continue(now) and not now.ended:
        return None  # no attempt has to end for it
    return _exhausted_budget(now)


def _exhausted_budget(now: Situation) -> GiveUp | None:
    """How the job ends if its budget is exceeded, or None."""
    budget = now.budget
    if budget.failures > budget.max_failures:
        code = "too_many_failures"
        what = f"{budget.failures} failures within {budget.window_s:g} s, {budget.max_failures}"
    elif budget.preemptions > budget.max_preemptions:
        code = "too_many_preemptions"
        what = f"{budget.preemptions} preemptions within {budget.window_s:g} s, "
        what += f"{budget.max_preemptions}"
    elif budget.without_progress > budget.max_without_progress:
        code = "no_progress"
        what = f"{budget.without_progress} attempts in a row made no new step, "
        what += f"{budget.max_without_progress}"
    elif now.cause is Cause.DATA_UNAVAILABLE and now.data_outage_s >= DATA_OUTAGE_S:
        code = "data_unavailable"
        what = f"{now.data_outage_s:.0f} s without data and without a step, {DATA_OUTAGE_S:.0f} s"
    else:
        return None
    message = f"{what} allowed; the last: {now.what}"
    return GiveUp(code, message, now.error.traceback if now.error else None)


MISSING_MODULE = (
    "give the job its package, with `holdfast run --pip PACKAGE` or in `runtime_env.pip` of the "
    "spec; a module of your own belongs into the folder that is sent as `code`"
)


def _end_for_repetition(now: Situation) -> GiveUp:
    at = "" if now.step is None else f" at step {now.step}"
    between = "with no step between"
    if now.error is not None:
        error = now.error
        if error.type == ModuleNotFoundError.__name__:
            message = f"{error.message}: {MISSING_MODULE}"
            return GiveUp("user_error", message, error.traceback)
        times = f"{at}, twice in a row" if at else f" twice in a row, {between}"
        return GiveUp("user_error", f"{error.type}{times}: {error.message}", error.traceback)
    if now.cause is Cause.OUT_OF_MEMORY:
        return GiveUp("out_of_memory", f"out of memory twice{at}, {between}: {now.what}")
    return GiveUp("user_error", f"the program ended itself twice{at}, {between}: {now.what}")


def _applied_action(seating: SeatingResult) -> tuple[Action, str]:
    others = "the other ranks keep their processes"
    reshards = "the state is resharded from memory"
    stays = "every process is alive and keeps its rank"
    if seating.is_program:
        others = "the program starts again on all ranks, each in a new process"
        stays = "the program starts again on all ranks, each on its node in a new process"
        reshards = "the program starts again on all ranks"
    if seating.resized:
        action = Action.GROW if seating.grown else Action.SHRINK
        return action, f"{seating.resized}; {reshards}"
    if seating.anew:
        return Action.REPLACE_NODE, seating.anew
    if seating.moved:
        takes = f"{', '.join(seating.onto)} takes them over, {others}"
        return Action.REPLACE_NODE, f"{seating.why_moved}; {takes}"
    if seating.forked:
        return Action.REPLACE_WORKER, (
            f"no process for {format_ranks(seating.forked)} is left, but their agents are healthy: "
            f"new processes are forked there; {others}"
        )
    if seating.replaced:
        takes = "processes that were ready on the same nodes take"
        return Action.REPLACE_WORKER, f"{takes} {format_ranks(seating.replaced)}; {others}"
    return Action.REFORM, stays
