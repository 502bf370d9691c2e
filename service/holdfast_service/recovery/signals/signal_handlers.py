"""Signals of workers and agents: select those of the present world, and pass each to its room.

Signals may be repeated, early or late. A signal of another incarnation, attempt or worker changes
nothing; only the death of a worker is always recorded. A signal that shows a fault returns it; the
core reports it before the next signal.
"""

from __future__ import annotations

from typing import assert_never

from holdfast_service.policy.causes import Fault
from holdfast_service.recovery.core_state.stage_timer import WITH_WORLD, Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import Member
from holdfast_service.recovery.faults import (
    corruption,
    guard_decisions,
    hang_suspicion,
    judgement,
    node_eviction,
    rank_failures,
)
from holdfast_service.recovery.signals import agent_lifecycle
from holdfast_service.recovery.upkeep import partners, remote_tier
from holdfast_service.recovery.world import attempt_progress, checkpoint_finalization
from holdfast_workers.protocol import signals

_OfPresentRank = (
    signals.WorkerFailed
    | signals.WorkerJoined
    | signals.FirstStep
    | signals.WorkerDone
    | signals.WorkerLeft
    | signals.PartnerLost
    | signals.SourcesLost
    | signals.RankStalled
    | signals.ProgramAttached
)
"""Signals that say something only of a rank of the present attempt."""


def handle_signal(state: CoreState, signal: signals.Signal, now: float) -> tuple[Fault, ...]:
    """Handle one signal, which may be repeated, early or late. Returns the faults that it shows."""
    if signal.kind is signals.SignalKind.WORKER_EXITED and signal.worker is not None:
        state.roster.mark_dead(signal.worker)  # true in any state of the core
    if state.timer.stage is Stage.ADOPTING:
        state.inbox.keep_signal(signal)
        return ()
    if not state.roster.is_current(signal.agent, signal.incarnation):
        return ()
    return _dispatch(state, signal, now)


def _dispatch(  # noqa: PLR0912  (one per kind)
    state: CoreState, signal: signals.Signal, now: float
) -> tuple[Fault, ...]:
    faults: tuple[Fault, ...] = ()
    match signal.detail:
        case signals.WorkerExited() as exited:
            member = _find_member(state, signal)
            faults = rank_failures.handle_exit(state, signal, member, exited)
        case signals.ShardFailed() as failed:
            faults = rank_failures.handle_failed_shard(state, signal, failed)
        case signals.DamagedShard() as damaged:
            member = _member_of_attempt(state, signal)
            faults = rank_failures.handle_damaged_shard(state, signal, member, damaged)
        case signals.StepRecomputed(digests=digests):
            faults = corruption.handle_recomputed(state, signal, digests)
        case signals.GuardTripReported(trip=trip):
            guard_decisions.apply_guard_trip(state, signal.attempt, trip)
        case signals.NodeUnwell(health=health):
            node_eviction.handle_health_signal(state, signal.agent, health)
        case signals.ShardSaved(shard=shard):
            state.saves.record_shards((shard,), state.progress.line, state.worlds)
        case signals.ShardDelayed() as delayed:
            remote_tier.handle_delayed_shard(state, signal, delayed, now)
        case signals.RetentionDone() as done:
            checkpoint_finalization.handle_tidied(state, signal.agent, done, now)
        case signals.ZygoteLost(unfit=unfit):
            _handle_zygote_lost(state, signal.agent, unfit)
        case signals.StoreLost(port=port):
            faults = agent_lifecycle.handle_store_lost(state, signal, port)
        case of_rank:
            present = _member_of_attempt(state, signal)
            if present is not None:
                faults = _dispatch_to_rank(state, signal, of_rank, present, now)
    return faults


def _dispatch_to_rank(
    state: CoreState, signal: signals.Signal, detail: _OfPresentRank, member: Member, now: float
) -> tuple[Fault, ...]:
    match detail:
        case signals.WorkerFailed() as failure:
            return rank_failures.handle_failure(state, signal, member, failure)
        case signals.SourcesLost() as lost:  # the rank is about to fail
            judgement.distrust_origins(state, member.restore, set(lost.origins), lost.message)
        case signals.RankStalled(beat=beat):
            if not member.has_stopped:
                hang_suspicion.handle_rank_stalled(state, beat.step, signal.at, now)
        case signals.WorkerJoined() as joined:
            attempt_progress.record_joined(state, member, dict(joined.phases_s), now)
        case signals.FirstStep() as first:
            attempt_progress.record_first_step(state, signal.attempt, first, now)
        case signals.WorkerDone() as done:
            return attempt_progress.record_done(state, member, signal.attempt, done, now)
        case signals.WorkerLeft(step=step):
            return attempt_progress.record_left(state, member, signal.attempt, step, now)
        case signals.PartnerLost(partner=partner):
            if partner:
                partners.handle_link_failed(state, signal.agent, partner, now)
        case signals.ProgramAttached() as attached:
            attempt_progress.record_attached(state, attached)
        case other:
            assert_never(other)
    return ()


def _find_member(state: CoreState, signal: signals.Signal) -> Member | None:
    """The member of the present world that the signal refers to."""
    world = state.worlds.present
    if world is None or state.timer.stage not in WITH_WORLD:
        return None
    for member in world.members.values():
        if member.worker is not None and member.worker == signal.worker:
            return member if member.agent == signal.agent else None
    if signal.attempt != world.attempt or signal.rank is None:
        return None
    seated = world.members.get(signal.rank)
    return seated if seated is not None and seated.agent == signal.agent else None


def _member_of_attempt(state: CoreState, signal: signals.Signal) -> Member | None:
    """The member, if the signal is from the present attempt; its process is then known."""
    member, world = _find_member(state, signal), state.worlds.present
    if member is None or world is None or signal.attempt != world.attempt:
        return None
    if signal.worker is not None and not state.roster.is_dead(signal.worker):
        member.record_worker(signal.worker, signal.pid)
    return member


def _handle_zygote_lost(state: CoreState, agent: str, unfit: str) -> None:
    if unfit:
        state.roster.mark_unfit(agent, unfit)
        state.add_evidence(f"agent {agent} cannot run workers any more: {unfit}")
    else:
        state.add_evidence(f"the zygote of agent {agent} died and is being restarted")
