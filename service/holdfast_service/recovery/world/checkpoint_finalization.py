"""Checkpoints of the remote tier: who writes which manifest, and what a finished one means."""

from __future__ import annotations

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.restore_points import RemoteCheckpoint
from holdfast_service.recovery.core_state.effects import FinalizeCheckpoint
from holdfast_service.recovery.core_state.inputs import CheckpointFinalized, RemoteCheckpoints
from holdfast_service.recovery.core_state.save_ledger import Pending
from holdfast_service.recovery.core_state.state import Stage, State
from holdfast_service.recovery.upkeep import remote_cleanup_orders, remote_outage
from holdfast_service.recovery.world import attempt_formation, outcome
from holdfast_workers.protocol.messages import Signal

_RECOVERING = (Stage.GATHERING, Stage.FENCING, Stage.FORMING)


def hand_out(state: State, now: float) -> None:
    """Give every complete set of shards that nobody works on to a living agent."""
    if state.stage in (Stage.ENDED, Stage.ASSEMBLING, Stage.ADOPTING):
        return
    for pending in list(state.saves.pending.values()):
        if not state.line.holds(pending.attempt, pending.step, formed_too=True):
            state.saves.drop(pending.attempt, pending.step)
        elif pending.agent is None and pending.not_before <= now:
            _give(state, pending)


def replace_known(state: State, given: RemoteCheckpoints, now: float) -> None:
    """The remote tier was listed anew; it may hold what nobody lived to tell of."""
    state.saves.known, state.saves.problem = given.known, given.problem
    if not given.known:
        if state.stage is Stage.WAITING:
            attempt_formation.decide(state, now)  # it says what it waits for
        return
    state.saves.remotes = {one.uri: one for one in given.found}
    for damaged in given.damaged:
        if damaged.uri not in state.saves.bad_uris:
            state.saves.bad_uris.add(damaged.uri)
            state.emit(
                EventKind.CHECKPOINT_BAD, step=damaged.step, uri=damaged.uri, message=damaged.why
            )
    announce(state, now)
    if state.stage is Stage.WAITING:
        attempt_formation.decide(state, now)
    if state.stage is Stage.FINISHING and outcome.is_durable(state):
        attempt_formation.finish(state, now)


def announce(state: State, now: float) -> None:
    """Tell of every finished checkpoint of the present history, once in the life of the job."""
    for one in sorted(state.saves.remotes.values(), key=lambda one: (one.step, one.attempt)):
        known = one.uri in state.saves.announced or one.uri in state.saves.bad_uris
        if known or not state.line.holds(one.attempt, one.step, formed_too=True):
            continue
        state.saves.finished(one)
        state.saves.announced.add(one.uri)
        state.emit(
            EventKind.CHECKPOINT_SAVED,
            step=one.step,
            attempt=one.attempt,
            tier="remote",
            uri=one.uri,
            nbytes=one.nbytes,
            mesh=dict(state.config.mesh),
            metrics=dict(one.metrics),
        )
        remote_outage.over(state, now, f"step {one.step} is in the remote tier")


def finalized(state: State, given: CheckpointFinalized, now: float) -> None:
    """A manifest is durable. One that history has passed by meanwhile is never used."""
    if given.uri in state.saves.bad_uris:
        return
    if not state.line.holds(given.attempt, given.step, formed_too=True):
        state.saves.drop(given.attempt, given.step)
        state.saves.bad_uris.add(given.uri)
        message = f"a later attempt started before step {given.step} of attempt {given.attempt}"
        state.emit(EventKind.CHECKPOINT_BAD, step=given.step, uri=given.uri, message=message)
        remote_cleanup_orders.begin(
            state, given.step
        )  # retention must not take it for the newest good one
        return
    state.saves.finished(
        RemoteCheckpoint(given.step, given.attempt, given.uri, given.nbytes, given.metrics)
    )
    announce(state, now)
    remote_cleanup_orders.begin(state, given.step)
    if given.step >= outcome.last_step(state):
        _last_is_durable(state, now)


def tidied(state: State, signal: Signal, now: float) -> None:
    """Retention is through with the remote tier, or gave up: the next one takes the rest."""
    for uri, why in signal.detail["deleted"].items():
        gone = state.saves.remotes.pop(uri, None)
        if gone is not None:
            state.emit(EventKind.CHECKPOINT_DELETED, step=gone.step, uri=uri, why=why)
    if signal.detail["message"]:
        state.note(f"retention failed on {signal.agent}: {signal.detail['message']}")
    if state.saves.tidying == signal.detail["step"]:
        state.saves.tidying = None
        if state.stage is Stage.FINISHING:
            attempt_formation.finish(state, now)


def _last_is_durable(state: State, now: float) -> None:
    if state.stage is Stage.FINISHING:
        attempt_formation.finish(state, now)
    elif state.stage is Stage.WAITING or (state.stop is not None and state.stage in _RECOVERING):
        outcome.conclude(state, now)
    # Else amid a recovery: the attempt that it ends in tells the last state's digest, and no more.


def _give(state: State, pending: Pending) -> None:
    hosts = state.world.hosts() if state.world is not None else set()
    chosen = min(
        state.roster.live(),
        key=lambda one: (one.agent == pending.last, one.agent not in hosts),
        default=None,
    )
    if chosen is None:
        return
    pending.agent = chosen.agent
    state.ask(
        FinalizeCheckpoint(
            chosen.agent, pending.step, pending.attempt, pending.records, chosen.incarnation
        )
    )
