"""Reads state that Ray exposes through no public function: free CPUs, draining nodes, and
which process runs an actor.

Each function queries the GCS, blocks for its answer, and raises the errors of its client.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from ray._private import state

from holdfast_workers.protocol.process_identity import ProcessIdentity


def free_cpus() -> dict[str, float]:
    """Node id → free CPUs, as last reported to the GCS."""
    found = state.available_resources_per_node()
    return {node: float(free.get("CPU", 0.0)) for node, free in found.items()}


def draining_nodes() -> dict[str, float | None]:
    """Node id → time of removal (Unix seconds; None: unknown) of every draining node.

    An autoscaler, a preemption notice or `ray drain-node` starts the draining.
    """
    found = state.state.get_draining_nodes()
    return {node: ms / 1000.0 if ms else None for node, ms in found.items()}


def runs(actor: ray.actor.ActorHandle, process: ProcessIdentity) -> bool:
    """Whether this process is the actor's present one, as far as the GCS knows."""
    row = state.state.actor_table(actor._actor_id.hex())
    return row.get("State") == "ALIVE" and _is_in(row, process)


def has_ended(actor: ray.actor.ActorHandle, process: ProcessIdentity) -> bool:
    """Whether the raylet of this process, once the actor's, has reported its end.

    False is no proof of life. A node that the GCS has given up proves nothing: its processes may
    live behind a cut link. An actor that was killed for good is DEAD before its process has ended.
    """
    row = state.state.actor_table(actor._actor_id.hex())
    restarting = row.get("State") == "RESTARTING" and _is_in(row, process)
    replaced = row.get("State") == "ALIVE" and not _is_in(row, process)
    if not (restarting or replaced):
        return False
    return any(node["Alive"] and node["NodeID"] == process.node_id for node in ray.nodes())


def _is_in(row: dict[str, Any], process: ProcessIdentity) -> bool:
    return (row["Address"]["NodeID"], row["Pid"]) == (process.node_id, process.pid)


def is_latest_process_of_actor() -> bool | None:
    """Whether this process, which runs an actor, is the actor's latest process. None while the
    actor starts, restarts or has no process."""
    context = ray.get_runtime_context()
    actor = state.actors(context.get_actor_id())
    if not actor or actor["State"] != "ALIVE":
        return None
    process = (actor["Address"]["NodeID"], actor["Pid"])
    return bool(process == (context.get_node_id(), os.getpid()))
