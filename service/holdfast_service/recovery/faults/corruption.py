"""Recovery from silent corruption: replicas that must hold the same state differ.

No state that may be corrupt is used again. The step is computed again. The rank that computed
different bits is named as soon as the evidence allows it.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_service.diagnosis.silent_corruption import (
    CorruptionVerdict,
    Evidence,
    RankHolder,
    after_repeat,
    judge_corruption,
)
from holdfast_service.job_model.events.checkpoints import CheckpointBadEvent, CorruptSince
from holdfast_service.job_model.events.incidents import IncidentUpdatedEvent
from holdfast_service.placement.rank_assignment import format_ranks
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state.state import WITH_WORLD, CoreState, Stage
from holdfast_service.recovery.faults import guard_decisions, judgement
from holdfast_workers.protocol.messages import ErrorReport, Signal
from holdfast_workers.state.replicas import ReplicaFinding, describe

_UNDER_WAY = WITH_WORLD - {Stage.FINISHING}
"""Stages in which a recomputed step may name a rank. The step may be known before all ranks are
known to have joined (FORMING), or while another fault waits for its judgement (GATHERING)."""


def handle_corruption(state: CoreState, signal: Signal, error: ErrorReport, now: float) -> None:
    """Handle a rank that left its attempt because its ranks found differing replicas."""
    world = state.world
    finding = ReplicaFinding.from_data(signal.detail["finding"])
    if world is None or finding.attempt in state.corrupted:
        return  # another rank has already reported it
    state.corrupted.add(finding.attempt)
    _discard_corrupt_state(state, finding)
    seats = {
        rank: RankHolder(member.agent, member.worker) for rank, member in world.members.items()
    }
    evidence = Evidence(finding, seats, state.refereed_rank)
    verdict = judge_corruption(evidence, state.unexplained)
    state.unexplained = None if verdict.ranks else evidence
    state.sidelined = set()
    if verdict.referee is not None:
        state.sidelined = {seats[verdict.referee].agent}
    state.refereed_rank = verdict.referee
    _report_faults(state, verdict, evidence, signal.at, now, error)


def handle_recomputed(state: CoreState, signal: Signal, now: float) -> None:
    """The step was computed again, and the replicas agree: the digests may name a rank."""
    before = state.unexplained
    if before is None or signal.attempt != state.attempt:
        return
    verdict = after_repeat(before, signal.detail["digests"])
    _clear_recheck(state)
    if verdict.ranks and state.stage in _UNDER_WAY:
        _report_faults(state, verdict, before, signal.at, now, None)
    else:
        _amend_closed_incident(state, _verdict_text(verdict))


def expire_recheck(state: CoreState, attempt: int, step: int, now: float) -> None:
    """End the recheck if its outcome is lost. The ranks report the outcome once, before any later
    step is known: if it does not arrive within `recheck_wait_s` after a later `step`, no agent is
    kept without ranks for it any longer."""
    before, world = state.unexplained, state.world
    if before is None or world is None or attempt != world.attempt or step <= before.finding.step:
        return
    if world.repeated_at is None:
        world.repeated_at = now
    elif now >= world.repeated_at + state.config.recheck_wait_s:
        _clear_recheck(state)
        _amend_closed_incident(
            state, "the step was repeated, but the report of which rank had differed was lost"
        )


def _clear_recheck(state: CoreState) -> None:
    """End the recheck of the step; no agent is sidelined for it any longer."""
    state.unexplained, state.refereed_rank, state.sidelined = None, None, set()


def _amend_closed_incident(state: CoreState, evidence: str) -> None:
    if state.closed_incident is not None:
        state.closed_incident = state.closed_incident.with_evidence(evidence)
        state.emit(IncidentUpdatedEvent.of(state.closed_incident))


def _discard_corrupt_state(state: CoreState, finding: ReplicaFinding) -> None:
    """Exclude every copy of the possibly corrupt state, in every tier, from all restores."""
    why, good = describe(finding), finding.bad_from - 1
    guard_decisions.roll_back(state, finding.attempt, good, why)
    state.protected = min(state.protected, good)
    state.emit(
        CheckpointBadEvent(
            step=finding.bad_from,
            message=why,
            corrupt=CorruptSince(finding.attempt, finding.bad_from),
        )
    )


def _report_faults(
    state: CoreState,
    verdict: CorruptionVerdict,
    evidence: Evidence,
    at: float,
    now: float,
    error: ErrorReport | None,
) -> None:
    """Report one fault for each named rank, or one fault without a rank."""
    fault = Fault(
        Cause.CORRUPTION,
        attempt=state.attempt,
        at=at,
        what=f"{describe(evidence.finding)}; {_verdict_text(verdict)}",
        step=evidence.finding.step,
        error=error,
        certain=error is not None,
    )
    source = verdict.evidence or evidence
    for rank in verdict.ranks:
        seat = source.seats[rank]
        named = replace(fault, rank=rank, agent=seat.agent, worker=seat.worker)
        judgement.report_fault(state, named, now)
    if not verdict.ranks:
        judgement.report_fault(state, fault, now)


def _verdict_text(verdict: CorruptionVerdict) -> str:
    if not verdict.ranks:
        return verdict.why
    return f"{format_ranks(verdict.ranks)}: {verdict.why}"
