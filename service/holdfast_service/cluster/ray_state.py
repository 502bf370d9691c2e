"""Reads state that Ray exposes through no public function: free CPUs, draining nodes, and
which process runs an actor.

Each function queries the GCS, Ray's control service, and raises the errors of its client. Most of
Ray's queries wait without limit for a GCS that is away, and end the process if another cluster
answers instead. So `require_control_service` goes before them: it has a deadline.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import state
from ray._private.worker import global_worker
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from holdfast_workers.protocol.process_identity import ProcessIdentity

CONTROL_ANSWER_S = 1.0
"""How long a query waits for the GCS before its answer counts as unknown."""


@dataclass(frozen=True)
class RayNode:
    """A node as the GCS knows it, dead nodes included."""

    node_id: str
    host: str
    port: int
    """Port of the node's raylet."""
    alive: bool


class ControlServiceAway(ConnectionError):
    """The GCS does not answer: nothing is known about nodes, placements and actors."""


def require_control_service(timeout_s: float = CONTROL_ANSWER_S) -> None:
    """Raises ControlServiceAway unless the GCS of this process's cluster answers in time."""
    try:
        global_worker.gcs_client.check_alive([], timeout=timeout_s)
    except Exception as error:  # of many kinds: late, refused, of another cluster
        why = str(error).partition("\n")[0]
        raise ControlServiceAway(
            f"the GCS, Ray's control service, does not answer: {why}"
        ) from error


def nodes(timeout_s: float = CONTROL_ANSWER_S) -> list[RayNode]:
    """All nodes that the GCS knows. Raises an error of its client after the deadline."""
    found = global_worker.gcs_client.get_all_node_info(timeout=timeout_s)
    return [
        RayNode(
            node_id.hex(),
            info.node_manager_address,
            info.node_manager_port,
            info.state == GcsNodeInfo.ALIVE,
        )
        for node_id, info in found.items()
    ]


def own_cluster() -> tuple[str, str]:
    """The address of the GCS that this process is connected to, and the cluster's id."""
    client = global_worker.gcs_client
    return str(client.address), str(client.cluster_id.hex())


def free_cpus() -> dict[str, float]:
    """Node id → free CPUs, as last reported to the GCS."""
    require_control_service()
    found = state.available_resources_per_node()
    return {node: float(free.get("CPU", 0.0)) for node, free in found.items()}


def draining_nodes() -> dict[str, float | None]:
    """Node id → time of removal (Unix seconds; None: unknown) of every draining node.

    An autoscaler, a preemption notice or `ray drain-node` starts the draining.
    """
    require_control_service()
    found = state.state.get_draining_nodes()
    return {node: ms / 1000.0 if ms else None for node, ms in found.items()}


def runs(actor: ray.actor.ActorHandle, process: ProcessIdentity) -> bool:
    """Whether this process is the actor's present one, as far as the GCS knows."""
    require_control_service()
    row = state.state.actor_table(actor._actor_id.hex())
    return row.get("State") == "ALIVE" and _is_in(row, process)


def has_ended(actor: ray.actor.ActorHandle, process: ProcessIdentity) -> bool:
    """Whether the raylet of this process, once the actor's, has reported its end.

    False is no proof of life. A node that the GCS has given up proves nothing: its processes may
    live behind a cut link. An actor that was killed for good is DEAD before its process has ended.
    """
    require_control_service()
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
    require_control_service()
    context = ray.get_runtime_context()
    actor = state.actors(context.get_actor_id())
    if not actor or actor["State"] != "ALIVE":
        return None
    process = (actor["Address"]["NodeID"], actor["Pid"])
    return bool(process == (context.get_node_id(), os.getpid()))
