"""Ranks that compute more slowly than their peers: told at once, and left when it lasts.

Nothing waits for the end of this: training goes on. A rank that is slow for `straggler_patience_s`
is a fault of its node, and the ladder of decisions says whether there is a better place for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast_service.diagnosis.stragglers import Straggler
from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state.state import Stage, State, World
from holdfast_service.recovery.faults import judgement
from holdfast_workers.protocol.messages import StepRow


@dataclass
class Slow:
    """A rank that is slow, on the agent where it was seen to be."""

    what: Straggler
    agent: str
    since: float
    accused: bool = False


def remember(state: State, told: Mapping[int, Mapping[str, Any]]) -> None:
    """Ranks that a former supervisor has told to be slow, and nothing else since."""
    for rank, one in told.items():
        what = Straggler(rank, one["factor"], one["since_step"], one["step"])
        state.peer_times.slow[rank] = what
        state.slow[rank] = Slow(what, one["agent"], one["since"])


def measured(state: State, rows: Sequence[StepRow], now: float) -> None:
    """Steps were made: is anybody slow, or not any more?"""
    world = state.world
    if state.stage is not Stage.RUNNING or world is None:
        return
    _let_go(state, world)
    for row in rows:
        if row.attempt == world.attempt and len(row.compute_s) == len(world.members):
            for one in state.peer_times.take(row):
                _note(state, world, one, now)
    if state.config.replace_stragglers:
        _replace(state, world, now)


def _let_go(state: State, world: World) -> None:
    """Of those whose rank has left the node that was slow, nothing is known yet."""
    for rank, one in list(state.slow.items()):
        agent = world.members[rank].agent
        if agent != one.agent:
            del state.slow[rank]
            state.peer_times.forget(rank)
            _tell(state, one, "moved", f"its rank is on {agent} now")


def _note(state: State, world: World, one: Straggler, now: float) -> None:
    if one.recovered:
        before = state.slow.pop(one.rank, None)
        if before is not None:
            _tell(state, before, "recovered", f"as fast as its peers again at step {one.step}")
        return
    state.slow[one.rank] = slow = Slow(one, world.members[one.rank].agent, now)
    _tell(state, slow, "slow", _in_words(slow))


def _tell(state: State, one: Slow, standing: str, why: str) -> None:
    record = state.roster.record(one.agent)
    state.emit(
        EventKind.STRAGGLER,
        rank=one.what.rank,
        agent=one.agent,
        node_id=record.report.node_id if record is not None else "",
        host=record.report.host if record is not None else "",
        factor=one.what.factor,
        since_step=one.what.since_step,
        step=one.what.step,
        since=one.since,
        attempt=state.attempt,
        state=standing,
        why=why,
    )


def _in_words(one: Slow) -> str:
    return (
        f"rank {one.what.rank} on {one.agent} computes {one.what.factor:.2f} times as long as its "
        f"peers since step {one.what.since_step}"
    )


def _replace(state: State, world: World, now: float) -> None:
    for one in list(state.slow.values()):
        lasting = now - one.since >= state.config.straggler_patience_s
        if one.accused or not lasting or state.stop is not None:
            continue
        one.accused = True
        member = world.members[one.what.rank]
        fault = Fault(
            Cause.STRAGGLER,
            attempt=world.attempt,
            at=now,
            what=_in_words(one),
            rank=member.rank,
            agent=member.agent,
            step=state.committed,
            certain=False,
        )
        judgement.accuse(state, fault, now)
        if state.stage is not Stage.RUNNING:
            return
