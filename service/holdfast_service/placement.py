"""Who keeps whose memory checkpoint: the partner agent of every rank, chosen purely.

Promises: a partner is always another agent on another node; agents that hold ranks come before
standbys, other failure domains before the own, and of those the one that shares the fewest mesh
coordinates with the rank, so that the loss of one whole tensor-, pipeline- or data-parallel group
leaves every shard somewhere. Load is balanced among equals and bounded by capacity if it can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast_service.ranks import name_order


@dataclass(frozen=True)
class Site:
    """An agent as a place for copies."""

    agent: str
    node_id: str
    domain: str
    capacity: int


def coordinates(rank: int, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """The rank's place on every axis, in the mesh's order (outermost first)."""
    found: list[int] = []
    for size in reversed(list(mesh.values())):
        found.append(rank % size)
        rank //= size
    return tuple(reversed(found))


def place_partners(
    mesh: Mapping[str, int],
    seats: Mapping[int, str],
    sites: Sequence[Site],
    avoid: frozenset[tuple[str, str]] = frozenset(),
) -> dict[int, str | None]:
    """The partner of every rank in `seats` (rank → agent); None where there is none to be had.

    `avoid` holds pairs (agent, partner) between which replication was seen to fail.
    """
    by_agent = {site.agent: site for site in sites}
    hosted: dict[str, list[tuple[int, ...]]] = {}
    for rank, agent in seats.items():
        hosted.setdefault(agent, []).append(coordinates(rank, mesh))
    load: Counter[str] = Counter()
    chosen: dict[int, str | None] = {}
    for rank in sorted(seats):
        home = by_agent[seats[rank]]
        here = coordinates(rank, mesh)

        def cost(
            site: Site, home: Site = home, here: tuple[int, ...] = here
        ) -> tuple[bool, bool, bool, int, int, int, tuple[int, str]]:
            ring = _distance(home.agent, site.agent, by_agent)
            return (
                site.agent not in hosted,
                load[site.agent] >= 2 * site.capacity,
                bool(home.domain) and site.domain == home.domain,
                _shared_axes(here, hosted.get(site.agent, [])),
                load[site.agent],
                ring,
                name_order(site.agent),
            )

        others = [
            site
            for site in sites
            if site.agent != home.agent
            and site.node_id != home.node_id
            and (home.agent, site.agent) not in avoid
        ]
        best = min(others, key=cost, default=None)
        chosen[rank] = None if best is None else best.agent
        if best is not None:
            load[best.agent] += 1
    return chosen


def _shared_axes(here: tuple[int, ...], others: Sequence[tuple[int, ...]]) -> int:
    """On how many axes some rank of the other agent has the same coordinate."""
    return sum(any(other[axis] == at for other in others) for axis, at in enumerate(here))


def _distance(agent: str, other: str, sites: Mapping[str, Site]) -> int:
    """Steps from `agent` to `other` around the ring of names: makes equals take turns."""
    ring = sorted(sites, key=name_order)
    return (ring.index(other) - ring.index(agent)) % len(ring)
