"""A job of four ranks on the simulated cluster, and readers of its events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.simulation.core_config import core_config
from tests.support.simulation.simulated_cluster import SimulatedCluster

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.worlds import Member


def cluster(
    standbys: int = 1,
    *,
    mesh: Mapping[str, int] | None = None,
    workers_per_node: int = 2,
    **changes: Any,
) -> SimulatedCluster:
    """`changes` may name the `shapes` of the job; without, it has one mesh. See `core_config`."""
    fields: dict[str, Any] = {
        "shapes": (WorldShape.of(mesh or {"dp_shard": 2, "tp": 2}, workers_per_node),),
        "steps": 30,
        **changes,
    }
    return SimulatedCluster(core_config(standby_nodes=standbys, **fields))


def running(job: SimulatedCluster, step: int = 10) -> SimulatedCluster:
    job.run_until(lambda: job.core.stage is Stage.RUNNING and job.core.committed >= step)
    return job


def present(job: SimulatedCluster) -> Mapping[int, Member]:
    """Rank → its place in the present world; empty between worlds."""
    world = job.core.state.worlds.present
    return {} if world is None else world.members


def is_live(job: SimulatedCluster, agent: str) -> bool:
    record = job.core.state.roster.find(agent)
    return record is not None and record.live


def closed(job: SimulatedCluster) -> list[dict[str, Any]]:
    return job.emitted(EventKind.INCIDENT_CLOSED)


def forming(job: SimulatedCluster) -> list[dict[str, Any]]:
    return job.emitted(EventKind.ATTEMPT_FORMING)


def members(event: dict[str, Any]) -> dict[int, tuple[str, str | None]]:
    return {member["rank"]: (member["agent"], member["worker"]) for member in event["members"]}
