"""What a job has on the cluster: named actors and placement groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import ray
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup

RELEASE_S = 5.0


def actors() -> list[tuple[str, str]]:
    """(namespace, name) of the named actors."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [(actor["namespace"], actor["name"]) for actor in found]


def groups() -> Iterator[tuple[str, PlacementGroup]]:
    """(name, group) of the existing placement groups, in all namespaces."""
    for group_id, group in ray.util.placement_group_table().items():
        if group["state"] != "REMOVED":
            yield group["name"], PlacementGroup(PlacementGroupID(bytes.fromhex(group_id)))


def kill_actors(named: list[tuple[str, str]]) -> None:
    """Let all agents release their resources concurrently, then kill all named actors."""
    handles = {}
    for space, name in named:
        with contextlib.suppress(ValueError):  # already gone
            handles[name] = ray.get_actor(name, space)
    freed = [handle.release.remote() for name, handle in handles.items() if "agent:" in name]
    if freed:
        ray.wait(freed, num_returns=len(freed), timeout=RELEASE_S)
    for handle in handles.values():
        ray.kill(handle, no_restart=True)
