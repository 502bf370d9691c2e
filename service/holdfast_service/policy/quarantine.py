"""Decides which nodes are set aside (get no new ranks), for how long and why. Pure.

A node is a machine, named by its address; where all nodes share the loopback address (the
embedded cluster), by its Ray node id. People cordon a node; the service quarantines it after
several incidents within a window that blame it, for a time that doubles with each further
quarantine. Both end by themselves when their time is over, and can be lifted earlier.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from holdfast_service.policy.causes import NODE_BLAMING_CAUSES, Cause


class NodeStanding(StrEnum):
    READY = "ready"
    CORDONED = "cordoned"  # by a person
    QUARANTINED = "quarantined"  # by the service


COUNTED_CAUSES = NODE_BLAMING_CAUSES | {Cause.NODE_UNWELL}
"""Causes of incidents that count towards a quarantine: those that blame a node within its job, and
the findings of a health probe."""


@dataclass(frozen=True)
class QuarantineRules:
    """Limits of the quarantine; times in seconds."""

    incidents: int = 3
    """Number of incidents within the window that quarantines a node. 0: no quarantine at all."""
    window_s: float = 3600.0
    first_s: float = 600.0
    """Length of a node's first quarantine; each further one is twice as long."""
    longest_s: float = 86400.0
    forget_s: float = 86400.0
    """After this long in use, a node's next quarantine lasts `first_s` again."""
    largest_share: float = 0.34
    """Largest share of the usable nodes in quarantine at a time; a fault of more nodes than that
    is hardly the nodes' own."""

    def leaves_enough(self, aside: int, there: int) -> bool:
        """Whether one more node may be set aside, when `aside` of the `there` nodes already are."""
        return self.incidents > 0 and aside + 1 <= self.largest_share * there


@dataclass(frozen=True)
class NodeIncident:
    """An incident in which a node was involved."""

    job: str
    incident: int
    cause: str
    at: float


@dataclass(frozen=True)
class NodeDecision:
    """The last decision about a node. `until` None: no end. `strikes`: quarantines in a row."""

    state: NodeStanding = NodeStanding.READY
    reason: str = ""
    since: float = 0.0
    until: float | None = None
    strikes: int = 0


@dataclass(frozen=True)
class Avoided:
    """A node on which no new rank may be placed, and why."""

    standing: NodeStanding
    reason: str


def cordoned_only(avoided: Mapping[str, Avoided]) -> dict[str, Avoided]:
    """The nodes that no job may use. (Nodes in quarantine are used where no others are left.)"""
    return {name: node for name, node in avoided.items() if node.standing is NodeStanding.CORDONED}


def node_name(node_id: str, host: str) -> str:
    """The name of the machine that Ray's node `node_id` is on, at the address `host`."""
    return node_id if _is_shared(host) else host


@lru_cache(maxsize=10_000)
def _is_shared(host: str) -> bool:
    """Whether several nodes have that address. (Cached: called for each rank of each attempt.)"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return not host or host == "localhost"


def standing_at(decided: NodeDecision, now: float) -> NodeStanding:
    """The node's standing at `now`: a decision ends when its time is over."""
    over = decided.until is not None and decided.until <= now
    return NodeStanding.READY if over else decided.state


def decide_quarantine(
    decided: NodeDecision, incidents: Collection[NodeIncident], rules: QuarantineRules, now: float
) -> NodeDecision | None:
    """The new decision about a node with these incidents; None: no change.

    Only incidents since the last decision count: a quarantine, even one that was lifted, resets
    the count. A cordoned node stays cordoned.
    """
    if standing_at(decided, now) is not NodeStanding.READY or not rules.incidents:
        return None
    since = max(now - rules.window_s, decided.since)
    recent = sorted(
        (
            incident
            for incident in incidents
            if incident.at > since and incident.cause in COUNTED_CAUSES
        ),
        key=lambda incident: incident.at,
    )
    if len(recent) < rules.incidents:
        return None
    return quarantined(decided, _describe(recent, rules), rules, now)


def quarantined(
    decided: NodeDecision, reason: str, rules: QuarantineRules, now: float
) -> NodeDecision:
    """Quarantined by the service, twice as long as the quarantine before it in a row."""
    free_since = decided.since if decided.until is None else max(decided.since, decided.until)
    strikes = 1 if now - free_since > rules.forget_s else decided.strikes + 1
    for_s = min(rules.longest_s, rules.first_s * 2.0 ** min(strikes - 1, 30))
    return NodeDecision(NodeStanding.QUARANTINED, reason, now, now + for_s, strikes)


def cordoned(decided: NodeDecision, reason: str, until: float | None, now: float) -> NodeDecision:
    return NodeDecision(NodeStanding.CORDONED, reason, now, until, decided.strikes)


def uncordoned(decided: NodeDecision, now: float) -> NodeDecision:
    """The decision that puts a node in use again, after a cordon or a quarantine."""
    return NodeDecision(NodeStanding.READY, "", now, None, decided.strikes)


def _describe(recent: list[NodeIncident], rules: QuarantineRules) -> str:
    causes = ", ".join(
        f"{incident.cause} (job {incident.job}, incident {incident.incident})"
        for incident in recent
    )
    return f"{len(recent)} incidents within {rules.window_s:g} s: {causes}"
