"""What follows when ranks that must hold the same state do not: no such state is used again, the
step is computed anew, and who computed other bits is named as soon as that is known."""

from __future__ import annotations

from dataclasses import replace

from holdfast_service.diagnosis.silent_corruption import (
    Evidence,
    Seated,
    Verdict,
    after_repeat,
    judge,
)
from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.rank_assignment import listed
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state.state import WITH_WORLD, Stage, State
from holdfast_service.recovery.faults import guard_decisions, judgement
from holdfast_workers.protocol.messages import Signal, WorkerError
from holdfast_workers.state.replicas import Finding, in_words

_UNDER_WAY = WITH_WORLD - {Stage.FINISHING}
"""A step may be known to be made before it is known that all have joined; and another fault may be
known before it is judged."""


def found(state: State, signal: Signal, error: WorkerError, now: float) -> None:
    """A rank left its attempt because of what all ranks of it found."""
    world = state.world
    finding = Finding.from_data(signal.detail["finding"])
    if world is None or finding.attempt in state.corrupted:
        return  # another rank has told it before
    state.corrupted.add(finding.attempt)
    _forsake(state, finding)
    seats = {rank: Seated(one.agent, one.worker) for rank, one in world.members.items()}
    evidence = Evidence(finding, seats, state.refereed)
    verdict = judge(evidence, state.unexplained)
    state.unexplained = None if verdict.ranks else evidence
    state.sidelined = set()
    if verdict.referee is not None:
        state.sidelined = {seats[verdict.referee].agent}
    state.refereed = verdict.referee
    _accuse(state, verdict, evidence, signal.at, now, error)


def recomputed(state: State, signal: Signal, now: float) -> None:
    """The step in question was computed again, and now the replicas agree."""
    before = state.unexplained
    if before is None or signal.attempt != state.attempt:
        return
    verdict = after_repeat(before, signal.detail["digests"])
    _leave_it(state)
    if verdict.ranks and state.stage in _UNDER_WAY:
        _accuse(state, verdict, before, signal.at, now, None)
    else:
        _amend(state, _said(verdict))


def passed(state: State, attempt: int, step: int, now: float) -> None:
    """`step` was made. What came of the one in question is told once, before any later step is
    known: if it is not heard soon, it is lost, and nobody is kept away for it any longer."""
    before, world = state.unexplained, state.world
    if before is None or world is None or attempt != world.attempt or step <= before.finding.step:
        return
    if world.repeated_at is None:
        world.repeated_at = now
    elif now >= world.repeated_at + state.config.recheck_wait_s:
        _leave_it(state)
        _amend(state, "the step was repeated, and nobody heard who had other bits before")


def _leave_it(state: State) -> None:
    """The step in question is a question no more."""
    state.unexplained, state.refereed, state.sidelined = None, None, set()


def _amend(state: State, what: str) -> None:
    if state.closed_incident is not None:
        state.closed_incident = state.closed_incident.with_evidence(what)
        state.emit(EventKind.INCIDENT_UPDATED, **state.closed_incident.data())


def _forsake(state: State, finding: Finding) -> None:
    """No copy, in whatever tier, of a state that may be corrupt is ever taken for good."""
    why, good = in_words(finding), finding.bad_from - 1
    guard_decisions.take_back(state, finding.attempt, good, why)
    state.protected = min(state.protected, good)
    state.emit(
        EventKind.CHECKPOINT_BAD,
        step=finding.bad_from,
        uri="",
        message=why,
        corrupt={"attempt": finding.attempt, "step": finding.bad_from},
    )


def _accuse(
    state: State,
    verdict: Verdict,
    evidence: Evidence,
    at: float,
    now: float,
    error: WorkerError | None,
) -> None:
    """One fault for each rank that is named, or one that names nobody."""
    fault = Fault(
        Cause.CORRUPTION,
        attempt=state.attempt,
        at=at,
        what=f"{in_words(evidence.finding)}; {_said(verdict)}",
        step=evidence.finding.step,
        error=error,
        certain=error is not None,
    )
    source = verdict.at or evidence
    for rank in verdict.ranks:
        seat = source.seats[rank]
        named = replace(fault, rank=rank, agent=seat.agent, worker=seat.worker)
        judgement.accuse(state, named, now)
    if not verdict.ranks:
        judgement.accuse(state, fault, now)


def _said(verdict: Verdict) -> str:
    if not verdict.ranks:
        return verdict.why
    return f"{listed(verdict.ranks)}: {verdict.why}"
