"""A core state in the middle of a job, for tests of single handlers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.simulation.core_config import core_config
from tests.support.simulation.simulated_agent import SimAgent

from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import AttemptWorld, Member
from holdfast_workers.protocol.messages import Restore, Tier

NOW = 1_000_000.0


def running_state(
    incarnations: Mapping[str, str] | None = None,
    restores: Mapping[int, Restore] | None = None,
    **changes: Any,
) -> CoreState:
    """Attempt 1 with two ranks on n0 and two on n1, and n2 as a standby. `incarnations`: of agents
    when the world was formed; `restores`: of ranks."""
    shape = WorldShape.of({"dp_shard": 2, "tp": 2}, 2)
    config = core_config((shape,), standby_nodes=1, steps=30, **changes)
    state = CoreState.started(config, NOW)
    members: dict[int, Member] = {}
    for at, name in enumerate(("n0", "n1", "n2")):
        agent = SimAgent(name, config)
        agent.become_ready()
        report = agent.report()
        state.roster.record_report(report)
        for rank, worker in zip((2 * at, 2 * at + 1), report.workers, strict=True):
            if rank < shape.world_size:
                members[rank] = Member(
                    rank=rank,
                    agent=name,
                    incarnation=(incarnations or {}).get(name, report.incarnation),
                    node_id=report.node_id,
                    host=report.host,
                    worker=worker.worker,
                    role="first",
                    restore=(restores or {}).get(rank, Restore(Tier.INIT, 0)),
                    partners=(),
                    joined=True,
                )
    world = AttemptWorld(state.worlds.announce_attempt(0), shape, 0, members, is_running=True)
    state.worlds.begin(world, state.roster)
    state.progress.start_attempt(world.attempt, 0)
    state.progress.record_step(world.attempt, 10)
    state.timer.enter(Stage.RUNNING, NOW, None)
    return state
