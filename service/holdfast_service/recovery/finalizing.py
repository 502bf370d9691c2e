"""Checkpoints of the remote tier: who writes which manifest, and what a finished one means."""

from __future__ import annotations

from holdfast_service.recovery import ending, forming
from holdfast_service.recovery.effects import FinalizeCheckpoint
from holdfast_service.recovery.inputs import CheckpointFinalized, RemoteCheckpoints
from holdfast_service.recovery.saves import Pending
from holdfast_service.recovery.state import Stage, State
from holdfast_service.registry import RemoteCheckpoint
from holdfast_service.reports import EventKind


def hand_out(state: State) -> None:
    """Give every complete set of shards that nobody works on to a living agent."""
    if state.stage in (Stage.ENDED, Stage.ASSEMBLING, Stage.ADOPTING):
        return
    for pending in list(state.saves.pending.values()):
        if not state.line.holds(pending.attempt, pending.step, formed_too=True):
            state.saves.drop(pending.attempt, pending.step)
        elif pending.agent is None:
            _give(state, pending)


def replace_known(state: State, given: RemoteCheckpoints, now: float) -> None:
    """The remote tier was listed anew; it may hold what nobody lived to tell of."""
    state.saves.remotes = {one.uri: one for one in given.found}
    announce(state)
    if state.stage is Stage.FINISHING and ending.is_durable(state):
        forming.finish(state, now)


def announce(state: State) -> None:
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
        )


def finalized(state: State, given: CheckpointFinalized, now: float) -> None:
    """A manifest is durable. One that history has passed by meanwhile is never used."""
    if given.uri in state.saves.bad_uris:
        return
    if not state.line.holds(given.attempt, given.step, formed_too=True):
        state.saves.drop(given.attempt, given.step)
        state.saves.bad_uris.add(given.uri)
        message = f"a later attempt started before step {given.step} of attempt {given.attempt}"
        state.emit(EventKind.CHECKPOINT_BAD, step=given.step, uri=given.uri, message=message)
        return
    state.saves.finished(RemoteCheckpoint(given.step, given.attempt, given.uri, given.nbytes))
    announce(state)
    for uri in given.deleted:
        gone = state.saves.remotes.pop(uri, None)
        if gone is not None:
            state.emit(EventKind.CHECKPOINT_DELETED, step=gone.step, uri=uri, why="retention")
    if given.step >= state.config.steps:
        _last_is_durable(state, now)


def _last_is_durable(state: State, now: float) -> None:
    if state.stage is Stage.FINISHING:
        forming.finish(state, now)
    elif state.stage not in (Stage.RUNNING, Stage.ASSEMBLING, Stage.ADOPTING):
        ending.succeed(state, now)  # amid a recovery: there is nothing left to recover


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
