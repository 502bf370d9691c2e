"""The ladder of decisions: from a fault, what is known of it and what is at hand, to one decision
with its reason, and why every other one was refused. Pure.

Promises: the cheapest action that fits is taken; what repeats by itself, exceeds the budget or
makes no progress ends the job with a named reason; the same situation gives the same decision.
`docs/recovery-policy.md` has the whole table, made from this code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from holdfast_service.placement.rank_assignment import listed
from holdfast_service.policy.causes import Cause, GiveUp
from holdfast_workers.protocol.messages import WorkerError

AGAIN = 2
"""So often within the window is a node at fault that is not trusted with ranks any more."""


class Action(StrEnum):
    """What can be done about a fault, the cheapest first."""

    IGNORE = "ignore"  # tell it; training goes on
    REFORM = "re-form in place"  # a new attempt of the same processes
    REPLACE_WORKER = "replace the worker"  # another process on the same node
    REPLACE_NODE = (
        "replace the node"  # its ranks move; one that is to blame is avoided from then on
    )
    ROLL_BACK = "roll back and skip a data window"
    SHRINK = "shrink to a smaller mesh"
    WAIT = "wait for a replacement"  # with a deadline
    STOP = "stop"


@dataclass(frozen=True)
class Budget:
    """What a job has used of what it may, within the window; the fault in question included."""

    failures: int = 1
    max_failures: int = 20
    preemptions: int = 0
    max_preemptions: int = 100
    without_progress: int = 1
    """Attempts in a row that ended by themselves without a step beyond the newest one of their
    line."""
    max_without_progress: int = 5
    window_s: float = 3600.0

    def data(self) -> dict[str, float]:
        return {**self.__dict__, "failures_left": max(0, self.max_failures - self.failures)}


@dataclass(frozen=True)
class Situation:
    """All that a decision depends on."""

    cause: Cause
    what: str = ""
    """The evidence, in words."""
    step: int = 0
    error: WorkerError | None = None
    named: bool = True
    """Whether a process is known that has to go: it hung, did not come, or was ended."""
    node_gone: bool = False
    """Whether no rank can run on the node, or under its agent, as things are."""
    times: int = 1
    """How often the node was to blame within the window, this time included; 0: it is not. Of
    corruption, for corruption alone: a crash says nothing of the bits that a node computes."""
    repeated: bool = False
    """The program did the same to itself at the same step before, with no step beyond it since."""
    room: bool = False
    """Whether another node, not avoided itself, is ready to take the ranks."""
    may_roll_back: bool = False
    """The ranks have agreed to go back, and which data to leave out."""
    ended: bool = False
    """No step is made any more: there are other faults beside one with which steps are made."""
    budget: Budget = Budget()


@dataclass(frozen=True)
class Refused:
    action: Action
    why: str

    def data(self) -> dict[str, str]:
        return {"decision": self.action.value, "why": self.why}


@dataclass(frozen=True)
class Decision:
    """One action, its reason, and every other action with why it was not taken."""

    action: Action
    reason: str
    refused: tuple[Refused, ...] = ()
    end: GiveUp | None = None
    """Of STOP: how the job ends."""

    def data(self) -> dict[str, Any]:
        return {
            "decision": self.action.value,
            "reason": self.reason,
            "refused": [one.data() for one in self.refused],
        }


@dataclass(frozen=True)
class Seating:
    """What became of a decision when the ranks were seated."""

    moved: tuple[int, ...] = ()
    """Ranks that sit on another agent than before."""
    forked: tuple[int, ...] = ()
    """Ranks that got a new process on the agent that they were on."""
    onto: tuple[str, ...] = ()
    """The agents that took over the ranks that moved."""
    why_moved: str = ""
    """What became of the agents that they were on."""


def decide(now: Situation) -> Decision:
    """The cheapest action that fits, and why no other was taken."""
    end = _hopeless(now)
    verdicts = {action: _verdict(action, now, end) for action in Action}
    chosen = next(action for action, verdict in verdicts.items() if verdict.fits)
    refused = tuple(
        Refused(action, verdict.why if not verdict.fits else "not needed: it costs more")
        for action, verdict in verdicts.items()
        if action is not chosen
    )
    ended = end if chosen is Action.STOP else None
    return Decision(chosen, verdicts[chosen].why, refused, ended)


def carried_out(judged: Decision | None, seating: Seating) -> Decision:
    """The decision as it came to be: which processes and nodes were left, the fence has shown."""
    done, how = _done(seating)
    if judged is None:
        return Decision(done, how)
    if judged.action in (done, Action.ROLL_BACK):
        return replace(judged, reason=f"{judged.reason}; {how}")
    # A node that was to be waited for, or left, may be there again, or have no ready successor.
    earlier = Refused(
        judged.action, f"meant at first ({judged.reason}), until the ranks were seated"
    )
    others = tuple(one for one in judged.refused if one.action is not done)
    refused = sorted((*others, earlier), key=lambda one: list(Action).index(one.action))
    return Decision(done, how, tuple(refused))


class _Verdict(NamedTuple):
    fits: bool
    why: str


_NOBODY_GONE = frozenset(
    {
        Cause.USER_ERROR,
        Cause.BAD_STATE,
        Cause.NOT_FINITE,
        Cause.CHECKPOINT_FAILED,
        Cause.RESTORE_UNAVAILABLE,
        Cause.COMMUNICATION,
    }
)
_TOLERABLE = frozenset({Cause.STRAGGLER, Cause.NODE_UNWELL, Cause.PREEMPTED})
"""Steps are still made, and right ones: without a better node, training goes on with this one."""

_REFORM_BECAUSE = {
    Cause.USER_ERROR: "an exception may have come from outside: the same processes try once more",
    Cause.BAD_STATE: "the processes live; another copy, an older step or the next tier is taken",
    Cause.NOT_FINITE: "the processes live; the state is taken from elsewhere",
    Cause.CHECKPOINT_FAILED: "the processes live; the last step's state is saved once more",
    Cause.RESTORE_UNAVAILABLE: "the processes live; the storage is asked again",
    Cause.COMMUNICATION: "nobody was seen to die: new groups under the same processes",
    Cause.NO_PROGRESS: "nobody in particular is late: new groups under the same processes",
    Cause.CORRUPTION: "nobody is known to be wrong yet: the same processes compute the step again",
}
_UNLESS_NAMED = frozenset({Cause.NO_PROGRESS, Cause.CORRUPTION})
"""Nobody has to go as long as nobody is known to be to blame."""
_REPLACE_WORKER_BECAUSE = {
    Cause.HANG: "a fresh process on the same node takes the rank",
    Cause.CORRUPTION: "there is no other node: a fresh process on the same one, once",
    Cause.INTERNAL_ERROR: "the process is not trusted any more; its node is",
    Cause.NO_PROGRESS: "the process did not come in time; another one on its node takes the rank",
    Cause.OUT_OF_MEMORY: "memory may have been short for a moment; the node itself is healthy",
    Cause.PREEMPTED: "the process was ended from outside; its node is still there",
    Cause.WORKER_CRASH: "the process is gone, its node is healthy",
}


def is_tolerable(cause: Cause) -> bool:
    """Whether a fault of this cause condemns nothing by itself."""
    return cause in _TOLERABLE or cause is Cause.REMOTE_UNAVAILABLE


def _verdict(action: Action, now: Situation, end: GiveUp | None) -> _Verdict:
    if action is Action.STOP:
        return _Verdict(True, end.message if end else "there is no reason to end the job")
    if end is not None and action is not Action.SHRINK:
        return _Verdict(False, "it would not help: see the reason of the end")
    return _RUNGS[action](now)


def _ignore(now: Situation) -> _Verdict:
    if now.cause is Cause.REMOTE_UNAVAILABLE:
        return _Verdict(
            True, "training does not need it; the newest state is saved when it answers"
        )
    if not _may_stay(now):
        return _Verdict(False, "no step, or no right one, is made as things are")
    if _spent(now) is not None:
        return _Verdict(True, "steps are still made, and no budget is left to leave the node")
    if _must_move(now) and now.room:
        return _Verdict(False, "a better node is ready")
    return _Verdict(True, "steps are still made, and no better node is ready")


def _reform(now: Situation) -> _Verdict:
    if now.cause in _NOBODY_GONE or (now.cause in _UNLESS_NAMED and not now.named):
        return _Verdict(True, _REFORM_BECAUSE[now.cause])
    if now.cause is Cause.GUARD:
        return _Verdict(False, "the same data would give the same step")
    if _is_gone(now):
        return _Verdict(False, "the processes on the node are gone")
    return _Verdict(False, "a process is gone, or is not to be trusted")


def _replace_worker(now: Situation) -> _Verdict:
    if _is_gone(now):
        return _Verdict(False, "the node, or its agent, is gone: nobody can fork there")
    if now.cause not in _REPLACE_WORKER_BECAUSE and now.cause not in _TOLERABLE:
        return _Verdict(False, "no process is gone, nor to blame")
    if _may_stay(now):
        return _Verdict(False, "a new process on the same node changes nothing")
    if _must_move(now) and now.room:
        return _Verdict(False, _why_not_there(now))
    return _Verdict(True, _REPLACE_WORKER_BECAUSE[now.cause])


def _replace_node(now: Situation) -> _Verdict:
    if _is_gone(now):
        if now.room:
            return _Verdict(True, "its ranks go together to a node that is ready")
        return _Verdict(False, "no other node is ready")
    if not _must_move(now):
        why = (
            "it was to blame once, which may be chance"
            if now.times
            else "nothing speaks against it"
        )
        return _Verdict(False, why)
    if not now.room:
        return _Verdict(False, "no other node is ready")
    return _Verdict(True, f"{_why_not_there(now)}; another one is ready")


def _roll_back(now: Situation) -> _Verdict:
    if now.cause is not Cause.GUARD:
        return _Verdict(False, "nothing is wrong with the data that was read")
    return _Verdict(True, "an older state is taken, and the data read since is left out and told")


def _wait(now: Situation) -> _Verdict:
    if not _is_gone(now):
        return _Verdict(False, "no node is missing")
    return _Verdict(True, "its ranks have no room; whatever comes first, its next life or another")


def _shrink(now: Situation) -> _Verdict:
    del now
    return _Verdict(False, "not available yet: a running job does not change its mesh")


_RUNGS: dict[Action, Callable[[Situation], _Verdict]] = {
    Action.IGNORE: _ignore,
    Action.REFORM: _reform,
    Action.REPLACE_WORKER: _replace_worker,
    Action.REPLACE_NODE: _replace_node,
    Action.ROLL_BACK: _roll_back,
    Action.SHRINK: _shrink,
    Action.WAIT: _wait,
}


def _may_stay(now: Situation) -> bool:
    """Whether steps go on to be made although somebody should go."""
    taken = now.cause is Cause.PREEMPTED and now.named  # a process, and not the node
    return now.cause in _TOLERABLE and not now.node_gone and not taken


def _is_gone(now: Situation) -> bool:
    return now.node_gone or now.cause in (Cause.NODE_LOST, Cause.AGENT_LOST)


def _must_move(now: Situation) -> bool:
    at_once = now.cause is Cause.CORRUPTION or _may_stay(now)
    return at_once or now.times >= AGAIN


def _why_not_there(now: Situation) -> str:
    match now.cause:
        case Cause.CORRUPTION:
            return "the node computed other bits than its replicas"
        case Cause.NODE_UNWELL:
            return "the node is not fit to train on"
        case Cause.STRAGGLER:
            return "the node is slower than its peers, for long"
        case Cause.PREEMPTED:
            return "the node is taken away"
    return f"the node was to blame {now.times} times within {now.budget.window_s:g} s"


def _hopeless(now: Situation) -> GiveUp | None:
    """Why nothing but the end is left, if so."""
    if now.cause is Cause.REMOTE_UNAVAILABLE:
        return None
    if now.repeated:
        return _repeated(now)
    if now.cause is Cause.GUARD and not now.may_roll_back:
        return GiveUp("guard", now.error.message if now.error else now.what, None, now.step)
    if now.cause is Cause.CORRUPTION and now.times >= AGAIN and not now.room:
        why = f"{now.what}; again, and there is no other node to compute on"
        return GiveUp("corruption", why, None, now.step)
    if _may_stay(now) and not now.ended:
        return None  # no attempt has to end for it
    return _spent(now)


def _spent(now: Situation) -> GiveUp | None:
    """The end, if the job has used what it may."""
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
    else:
        return None
    message = f"{what} allowed; the last: {now.what}"
    return GiveUp(code, message, now.error.traceback if now.error else None, now.step)


def _repeated(now: Situation) -> GiveUp:
    if now.error is not None:
        error = now.error
        message = f"{error.type} at step {error.step}, twice in a row: {error.message}"
        return GiveUp("user_error", message, error.traceback, error.step)
    if now.cause is Cause.OUT_OF_MEMORY:
        message = f"out of memory twice at step {now.step}, with no step between: {now.what}"
        return GiveUp("out_of_memory", message, None, now.step)
    message = f"the program ended itself twice at step {now.step}, with no step between: {now.what}"
    return GiveUp("user_error", message, None, now.step)


def _done(seating: Seating) -> tuple[Action, str]:
    if seating.moved:
        takes = f"{', '.join(seating.onto)} takes them over, the others keep their processes"
        return Action.REPLACE_NODE, f"{seating.why_moved}; {takes}"
    if seating.forked:
        return Action.REPLACE_WORKER, (
            f"no process for {listed(seating.forked)} is left, but their "
            "agents are healthy: fork anew there; the others keep their processes"
        )
    return Action.REFORM, "every process is still there and keeps its rank"
