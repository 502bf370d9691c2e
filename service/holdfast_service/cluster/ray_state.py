"""Reads node state that Ray exposes through no public function: free CPUs and draining nodes.

Both functions query the GCS, block for its answer, and raise the errors of its client.
"""

from __future__ import annotations

from ray._private import state


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
