"""Recovery from silent corruption: replicas that must hold the same state differ.

No state that may be corrupt is used again. The step is computed again. The rank that computed
different bits is named as soon as the evidence allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from holdfast_service.recovery.core_state.stage_timer import WITH_WORLD, Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.faults import guard_decisions
from holdfast_workers.protocol.findings import ReplicaFinding
from holdfast_workers.protocol.messages import ErrorReport
from holdfast_workers.protocol.signals import Signal
from holdfast_workers.state.replicas import describe

_UNDER_WAY = WITH_WORLD - {Stage.FINISHING}
"""Stages in which a recomputed step may name a rank. The step may be known before all ranks are
known to have joined (FORMING), or while another fault waits for its judgement (GATHERING)."""


def handle_corruption(
    state: CoreState, signal: Signal, finding: ReplicaFinding, error: ErrorReport
) -> tuple[Fault, ...]:
    """The faults of a rank that left its attempt because its ranks found differing replicas."""
    world = state.worlds.present
    if world is None or not state.corruption.begin(finding.attempt):
        return ()  # another rank has already reported it
    _discard_corrupt_state(state, finding)
    seats = {
        rank: RankHolder(member.agent, member.worker) for rank, member in world.members.items()
    }
    evidence = Evidence(finding, seats, state.corruption.refereed_rank)
    verdict = judge_corruption(
        evidence, state.corruption.unexplained, repeatable=state.config.repeatable
    )
    state.corruption.record_verdict(verdict, evidence)
    return _faults(state, verdict, evidence, signal.at, error)


def handle_recomputed(
    state: CoreState, signal: Signal, digests: Sequence[str]
) -> tuple[Fault, ...]:
    """The step was computed again, and the replicas agree: the digests may name a rank."""
    before = state.corruption.unexplained
    if before is None or signal.attempt != state.worlds.attempt:
        return ()
    verdict = after_repeat(before, digests, repeatable=state.config.repeatable)
    state.corruption.close()
    if verdict.ranks and state.timer.stage in _UNDER_WAY:
        return _faults(state, verdict, before, signal.at, None)
    _amend_closed_incident(state, _verdict_text(verdict))
    return ()


def expire_recheck(state: CoreState, attempt: int, step: int, now: float) -> None:
    """End the recheck if its outcome is lost. The ranks report the outcome once, before any later
    step is known: if it does not arrive within `recheck_wait_s` after a later `step`, no agent is
    kept without ranks for it any longer."""
    world = state.worlds.present
    if world is None or attempt != world.attempt:
        return
    if state.corruption.is_outcome_lost(attempt, step, now, state.config.recheck_wait_s):
        state.corruption.close()
        _amend_closed_incident(
            state, "the step was repeated, but the report of which rank had differed was lost"
        )


def _amend_closed_incident(state: CoreState, evidence: str) -> None:
    amended = state.incidents.add_late_evidence(Cause.CORRUPTION, evidence)
    if amended is not None:
        state.emit(IncidentUpdatedEvent.of(amended))


def _discard_corrupt_state(state: CoreState, finding: ReplicaFinding) -> None:
    """Exclude every copy of the possibly corrupt state, in every tier, from all restores."""
    why, good = describe(finding), finding.bad_from - 1
    guard_decisions.roll_back(state, finding.attempt, good, why)
    state.progress.limit_protected(good)
    state.emit(
        CheckpointBadEvent(
            step=finding.bad_from,
            message=why,
            corrupt=CorruptSince(finding.attempt, finding.bad_from),
        )
    )


def _faults(
    state: CoreState,
    verdict: CorruptionVerdict,
    evidence: Evidence,
    at: float,
    error: ErrorReport | None,
) -> tuple[Fault, ...]:
    """One fault for each named rank, or one fault without a rank."""
    fault = Fault(
        Cause.CORRUPTION,
        attempt=state.worlds.attempt,
        at=at,
        what=f"{describe(evidence.finding)}; {_verdict_text(verdict)}",
        step=evidence.finding.step,
        error=error,
        certain=error is not None,
    )
    seats = (verdict.evidence or evidence).seats
    named = (
        replace(fault, rank=rank, agent=seats[rank].agent, worker=seats[rank].worker)
        for rank in verdict.ranks
    )
    return tuple(named) or (fault,)


def _verdict_text(verdict: CorruptionVerdict) -> str:
    if not verdict.ranks:
        return verdict.why
    return f"{format_ranks(verdict.ranks)}: {verdict.why}"
