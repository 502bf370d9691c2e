"""Ranks that compute more slowly than their peers: emitted at once, a fault if it lasts.

Training goes on meanwhile. A rank that is slow for `straggler_patience_s` counts as a fault of its
node, and the decision ladder decides whether a better node is available.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from holdfast_service.diagnosis.stragglers import Straggler
from holdfast_service.job_model.events.health import StragglerEvent
from holdfast_service.placement.mesh_axes import pipeline_ranks
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state.slow_ranks import SlowRank
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import AttemptWorld
from holdfast_workers.protocol.messages import StepRow


def handle_step_rows(state: CoreState, rows: Sequence[StepRow], now: float) -> Iterable[Fault]:
    """Evaluate new steps: emit which ranks became slow or recovered; a rank that is slow for too
    long is a fault."""
    world = state.worlds.present
    if state.timer.stage is not Stage.RUNNING or world is None:
        return ()
    _drop_moved_ranks(state, world)
    stages = pipeline_ranks(world.shape.mesh)
    for row in rows:
        if row.attempt == world.attempt and len(row.compute_s) == len(world.members):
            for straggler in state.slow.add_row(row, stages):
                _record_change(state, world, straggler, now)
    replaces = state.config.spec.detection.replace_stragglers
    return _lasting_stragglers(state, world, now) if replaces else ()


def _drop_moved_ranks(state: CoreState, world: AttemptWorld) -> None:
    """Forget slow ranks that have moved to another node: their speed there is not known yet."""
    hosts = {rank: member.agent for rank, member in world.members.items()}
    for slow in state.slow.remove_moved(hosts):
        agent = hosts[slow.straggler.rank]
        _emit_change(state, slow, "moved", f"the rank runs on {agent} now")


def _record_change(state: CoreState, world: AttemptWorld, straggler: Straggler, now: float) -> None:
    if straggler.recovered:
        before = state.slow.record_recovered(straggler.rank)
        if before is not None:
            _emit_change(
                state, before, "recovered", f"as fast as its peers again at step {straggler.step}"
            )
        return
    slow = state.slow.record_slow(straggler, world.members[straggler.rank].agent, now)
    _emit_change(state, slow, "slow", _describe(slow))


def _emit_change(state: CoreState, slow: SlowRank, standing: str, why: str) -> None:
    record = state.roster.find(slow.agent)
    state.emit(
        StragglerEvent(
            rank=slow.straggler.rank,
            agent=slow.agent,
            node_id=record.report.node_id if record is not None else "",
            host=record.report.host if record is not None else "",
            factor=slow.straggler.factor,
            since_step=slow.straggler.since_step,
            step=slow.straggler.step,
            since=slow.since,
            attempt=state.worlds.attempt,
            state=standing,
            why=why,
        )
    )


def _describe(slow: SlowRank) -> str:
    return (
        f"rank {slow.straggler.rank} on {slow.agent} takes {slow.straggler.factor:.2f} times as "
        f"long as its peers to compute, since step {slow.straggler.since_step}"
    )


def _lasting_stragglers(state: CoreState, world: AttemptWorld, now: float) -> Iterator[Fault]:
    """The faults of ranks that are slow for too long, each found after the one before was reported:
    if that one ends the attempt, the speed of the other ranks is measured again."""
    for slow in state.slow.ranks.values():
        if state.timer.stage is not Stage.RUNNING or state.ending.stop is not None:
            return
        if slow.reported or now - slow.since < state.config.spec.detection.straggler_patience_s:
            continue
        state.slow.mark_reported(slow.straggler.rank)
        member = world.members[slow.straggler.rank]
        yield Fault(
            Cause.STRAGGLER,
            attempt=world.attempt,
            at=now,
            what=_describe(slow),
            rank=member.rank,
            agent=member.agent,
            step=state.progress.committed,
            certain=False,
        )
