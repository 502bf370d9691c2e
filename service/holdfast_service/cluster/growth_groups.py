"""Placement groups that show Ray's autoscaler which nodes queued jobs lack.

A group that has its place keeps it until any job starts, so that no other program takes the new
nodes and the autoscaler does not find them idle; the queue counts them as free. Groups belong to
the connection of the server that asked, and end with it. Names follow from what is asked for, so
several servers ask for the same once. `request_resources` is never used: it has one value per
cluster, which belongs to other programs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

import ray
import structlog
from ray._raylet import PlacementGroupID
from ray.exceptions import RaySystemError
from ray.util.placement_group import PlacementGroup, placement_group

from holdfast_service.cluster import actor_names
from holdfast_service.cluster.occupied import NODE_ID_LABEL
from holdfast_service.cluster.seat_groups import PENDING
from holdfast_service.job_model.supervisor_protocol import GrowthRequest

_log = structlog.get_logger()


def show(installation: str, requests: Iterable[GrowthRequest], may_start: Collection[str]) -> None:
    """Ask for exactly these nodes. Other groups are removed, but for those that have their place
    and are of jobs that may start."""
    wanted = {name_of(installation, request): request for request in requests}
    keep_place = tuple(actor_names.growth_group(installation, job, "") for job in may_start)
    found: set[str] = set()
    for group_id, name, state in _groups(installation):
        found.add(name)
        is_right = name in wanted if state == PENDING else name.startswith(keep_place)
        if not is_right:
            _remove(group_id)
    for name in wanted.keys() - found:
        _ask(name, wanted[name])


def give_way(installation: str, job_id: str) -> None:
    """A job starts, perhaps where groups have their place."""
    own = actor_names.growth_group(installation, job_id, "")
    for group_id, name, state in _groups(installation):
        if state != PENDING or name.startswith(own):
            _remove(group_id)


def name_of(installation: str, request: GrowthRequest) -> str:
    bundle, labels = sorted(request.bundle.items()), sorted(request.labels.items())
    asked = repr((request.nodes, bundle, labels, request.off)).encode()
    digest = hashlib.sha256(asked).hexdigest()[:16]
    return actor_names.growth_group(installation, request.job, digest)


def _groups(installation: str) -> list[tuple[str, str, str]]:
    """The id, name and state of each group."""
    return [
        (group_id, group["name"], group["state"])
        for group_id, group in ray.util.placement_group_table().items()
        if actor_names.is_growth_group(group["name"], installation) and group["state"] != "REMOVED"
    ]


def _remove(group_id: str) -> None:
    ray.util.remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))


def _ask(name: str, request: GrowthRequest) -> None:
    off = {NODE_ID_LABEL: f"!in({','.join(request.off)})"} if request.off else {}
    selector = {**request.labels, **off}
    try:
        placement_group(
            [dict(request.bundle)] * request.nodes,
            strategy="STRICT_SPREAD",
            name=name,
            bundle_label_selector=[selector] * request.nodes if selector else None,
        )
    except RaySystemError as error:  # another server has just asked for the same, by this name
        _log.info("growth.not_asked", job=request.job, error=str(error))
        return
    _log.info("growth.asked", job=request.job, what=request.what)
