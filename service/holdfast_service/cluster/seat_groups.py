"""Placement groups of an elastic job: one for each seat, so that nodes come and go singly.

A group is asked for off the nodes of the job's other seats. As that choice holds for the life of a
group, only one group is pending at a time, and it is made anew when the other seats have moved. A
group that has lost its node is removed: its seat is asked for anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group

from holdfast_service.cluster import actor_names as names
from holdfast_service.cluster.occupied import NODE_ID_LABEL

PLACED, PENDING = "CREATED", "PENDING"


@dataclass(frozen=True)
class SeatGroup:
    """A group as Ray's table shows it. `node` "": it has none."""

    seat: str
    group_id: str
    state: str
    node: str = ""


@dataclass(frozen=True)
class GroupPlan:
    """What to do about the groups: remove some, and ask for the group of one seat."""

    remove: tuple[SeatGroup, ...] = ()
    ask_for: str | None = None
    off: frozenset[str] = frozenset()
    """The nodes that the new group must not be on."""


def plan_groups(
    seats: Sequence[str],
    groups: Sequence[SeatGroup],
    alive: frozenset[str],
    avoided: frozenset[str],
    asked_off: Mapping[str, frozenset[str]],
    is_kept: Callable[[str], bool] = lambda _: True,
) -> GroupPlan:
    """Pure. `is_kept`: a seat that is not kept has no group. `asked_off`: the nodes that each
    pending group was asked to be off; a group that is missing in it was asked for by a former
    supervisor."""
    placed: dict[str, SeatGroup] = {}
    lost: list[SeatGroup] = []
    for group in sorted(groups, key=lambda group: seats.index(group.seat)):
        if group.state != PLACED:
            continue
        taken = {other.node for other in placed.values()}
        if is_kept(group.seat) and group.node in alive and group.node not in taken:
            placed[group.seat] = group
        else:
            lost.append(group)
    off = frozenset(group.node for group in placed.values()) | avoided
    waiting = [group for group in groups if group.state == PENDING]
    right = [
        group for group in waiting if is_kept(group.seat) and asked_off.get(group.seat) == off
    ][:1]
    others = [g for g in groups if g.state not in (PLACED, PENDING)]
    remove = (*lost, *(group for group in waiting if group not in right), *others)
    named = {group.seat for group in groups}
    free = next((seat for seat in seats if seat not in named and is_kept(seat)), None)
    return GroupPlan(remove, None if right else free, off)


class SeatGroups:
    """Carries out the plans, one pass per call of `refresh`."""

    def __init__(
        self,
        installation: str,
        job_id: str,
        seats: Sequence[str],
        is_kept: Callable[[str], bool],
        bundle: dict[str, float],
        labels: dict[str, str],
        avoided: Callable[[], Sequence[str]],
    ) -> None:
        """`labels`: the label selector that the job asks for. `avoided()`: ids of nodes."""
        self._prefix = names.placement_group(installation, job_id) + ":"
        self._seats = seats
        self._is_kept = is_kept
        self._bundle = bundle
        self._labels = labels
        self._avoided = avoided
        self._asked_off: dict[str, frozenset[str]] = {}

    def refresh(self, free_seat: Callable[[str], None]) -> dict[str, PlacementGroup]:
        """One pass: returns the placed groups by seat. `free_seat` ends the actor of a seat whose
        group is removed."""
        nodes = ray.nodes()
        alive = frozenset(node["NodeID"] for node in nodes if node["Alive"])
        groups = self._groups()
        avoided = frozenset(self._avoided())
        plan = plan_groups(self._seats, groups, alive, avoided, self._asked_off, self._is_kept)
        for group in plan.remove:
            free_seat(group.seat)
            self._asked_off.pop(group.seat, None)
            ray.util.remove_placement_group(_handle(group))
        if plan.ask_for is not None:
            self._ask(plan.ask_for, plan.off)
        removed = {group.group_id for group in plan.remove}
        return {
            group.seat: _handle(group)
            for group in groups
            if group.state == PLACED and group.group_id not in removed
        }

    def _ask(self, seat: str, off: frozenset[str]) -> None:
        not_on = {NODE_ID_LABEL: f"!in({','.join(sorted(off))})"} if off else {}
        selector = {**self._labels, **not_on}
        placement_group(
            [self._bundle],
            strategy="STRICT_PACK",
            name=self._prefix + seat,
            lifetime="detached",
            bundle_label_selector=[selector] if selector else None,
        )
        self._asked_off[seat] = off

    def _groups(self) -> list[SeatGroup]:
        found = []
        for group_id, group in ray.util.placement_group_table().items():
            name, state = group["name"], group["state"]
            seat = name.removeprefix(self._prefix)
            if name.startswith(self._prefix) and state != "REMOVED" and seat in self._seats:
                node = next(iter(group["bundles_to_node_id"].values()), "")
                found.append(SeatGroup(seat, group_id, state, node))
        return found


def _handle(group: SeatGroup) -> Any:
    return PlacementGroup(PlacementGroupID(bytes.fromhex(group.group_id)))
