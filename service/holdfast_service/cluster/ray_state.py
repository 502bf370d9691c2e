"""What Ray knows of its nodes and tells by no public function: what is free, and what drains.

Both ask the GCS and wait for its answer. They raise what its client raises.
"""

from __future__ import annotations

from ray._private import state


def free_cpus() -> dict[str, float]:
    """Node id → processors that nobody has taken, as the GCS heard last."""
    found = state.available_resources_per_node()
    return {node: float(free.get("CPU", 0.0)) for node, free in found.items()}


def draining_nodes() -> dict[str, float | None]:
    """Node id → when it will be taken away (Unix seconds), of nodes of which Ray was told so: by
    an autoscaler, by a preemption notice, by `ray drain-node`. None: nobody said when."""
    found = state.state.get_draining_nodes()
    return {node: ms / 1000.0 if ms else None for node, ms in found.items()}
