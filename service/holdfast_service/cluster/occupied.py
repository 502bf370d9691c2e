"""Keeping bundles off some nodes while they are placed, and only then.

A label selector of a placement group holds for the group's life: its bundles could not come to
these nodes later either, when they may be the only ones left. What is free on them is taken for a
moment instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import ray
from ray.util.placement_group import placement_group

from holdfast_service.cluster.ray_state import free_cpus

NODE_ID_LABEL = "ray.io/node-id"  # which Ray gives every node
PLACEMENT_S = 1.0


@contextlib.contextmanager
def occupied(node_ids: Sequence[str]) -> Iterator[bool]:
    """No processor that is free on these nodes can be had by others; True if there were any.

    What takes them belongs to the calling process, and ends with it. Best effort: what becomes
    free meanwhile, or is not taken in time, can be had.
    """
    free = free_cpus() if node_ids else {}
    free_on_node = {node_id: free[node_id] for node_id in node_ids if free.get(node_id, 0.0) > 0}
    placeholders = [
        placement_group([{"CPU": cpus}], bundle_label_selector=[{NODE_ID_LABEL: one}])
        for one, cpus in free_on_node.items()
    ]
    try:
        for placeholder in placeholders:
            placeholder.wait(PLACEMENT_S)
        yield bool(placeholders)
    finally:
        for placeholder in placeholders:
            ray.util.remove_placement_group(placeholder)
