"""Keeps bundles off certain nodes, but only while the bundles are placed.

A label selector of a placement group holds for the group's life, so its bundles could not move to
these nodes later, when no other nodes may be left. Instead, the free CPUs of these nodes are
occupied briefly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from uuid import uuid4

import ray
from ray.util.placement_group import placement_group

from holdfast_service.cluster import actor_names
from holdfast_service.cluster.ray_state import free_cpus

NODE_ID_LABEL = "ray.io/node-id"  # Ray sets it on every node
PLACEMENT_S = 1.0


@contextlib.contextmanager
def occupied(node_ids: Collection[str], installation: str) -> Iterator[bool]:
    """Occupy all free CPUs of these nodes; yields True if there were any.

    The queue of the installation counts them as free. The placeholders belong to the calling
    process and end with it. Best effort: CPUs that become free meanwhile, or are not occupied in
    time, stay available.
    """
    free = free_cpus() if node_ids else {}
    free_on_node = {node_id: free[node_id] for node_id in node_ids if free.get(node_id, 0.0) > 0}
    placeholders = [
        placement_group(
            [{"CPU": cpus}],
            name=actor_names.occupying_group(installation, uuid4().hex),
            bundle_label_selector=[{NODE_ID_LABEL: node_id}],
        )
        for node_id, cpus in free_on_node.items()
    ]
    try:
        for placeholder in placeholders:
            placeholder.wait(PLACEMENT_S)
        yield bool(placeholders)
    finally:
        for placeholder in placeholders:
            ray.util.remove_placement_group(placeholder)
