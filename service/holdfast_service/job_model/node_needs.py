"""The least that a job needs of each node, computed from its spec. Pure.

Figures are lower bounds, so that no node is refused that would do: of a model's state they count
what is certain (`placement/mesh_memory.py`), of processes those that always run. Nothing is known
of the state of a user's own function or recipe.
"""

from __future__ import annotations

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.placement.mesh_axes import Mesh
from holdfast_service.placement.mesh_memory import RankMemory
from holdfast_workers.protocol.node_needs import NodeNeeds

SLOTS = 2
"""States in a segment, as in `memory/segment.py`."""
SMALL_BYTES = 16 << 10
"""Size of a state beside tensors: counters, history of the guards, padding."""
NODE_TASKS = 8
WORKER_TASKS = 8
"""Threads of a worker beside those that compute."""
WORKER_BYTES = 32 << 20
"""Memory that each process has for itself."""


def needs_of(spec: JobSpec) -> NodeNeeds:
    """The needs of any node of the job, on whichever of its meshes needs most."""
    resources = spec.resources
    ranks = resources.workers_per_node
    tasks = NODE_TASKS + ranks * (WORKER_TASKS + resources.threads_per_worker)
    nodes = min(shape.nodes for shape in spec.shapes)
    rank = _largest_rank(spec)
    if rank is None:
        return NodeNeeds(tasks=tasks, nodes=nodes)
    shm = shm_bytes(spec, rank)
    on_host = 0 if resources.gpus_per_worker else rank.parameters + rank.gradients + rank.moments
    return NodeNeeds(shm, shm + ranks * (on_host + WORKER_BYTES), tasks, nodes)


def shm_bytes(spec: JobSpec, rank: RankMemory) -> int:
    """Size of the checkpoints in memory of a node's ranks and of the copies that it keeps."""
    memory = spec.checkpoint.memory
    if not memory.every_steps:
        return 0
    shape = spec.shapes[0]
    copies = min(memory.partner_copies, shape.nodes - 1)
    state = rank.parameters + rank.moments + SMALL_BYTES
    return spec.resources.workers_per_node * (1 + copies) * SLOTS * state


def _largest_rank(spec: JobSpec) -> RankMemory | None:
    model, limits = spec.mesh_limits.memory, spec.mesh_limits
    if model is None:
        return None
    meshes: list[Mesh] = [shape.mesh for shape in spec.shapes]
    found = [model.of(mesh, limits.micro_batches) for mesh in meshes]
    return max(found, key=lambda rank: rank.parameters)
