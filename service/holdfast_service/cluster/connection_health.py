"""Decides whether the connection to Ray is usable, waits for its head, or must be made anew. Pure.

A driver keeps its connection while the GCS is away: its calls to actors go on, and Ray's client
finds the GCS again. Other things end a connection for good, and Ray reports none of them as such:
the driver's own raylet dies (tasks fail and new actors are never placed), the cluster ends or
another one answers at its address, or a GCS that answers others does not answer this client.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Link(StrEnum):
    """State of the connection."""

    READY = "ready"
    DOUBTFUL = "doubtful"
    """The last look failed; not long enough to draw a conclusion."""
    HEAD_AWAY = "head_away"
    """The GCS answers nobody: wait for it."""
    LOST = "lost"
    """Only a new connection helps."""


@dataclass(frozen=True)
class Sight:
    """One look at the connection, at `at` (monotonic seconds)."""

    at: float
    answers: bool
    """Whether the GCS has answered this connection's client."""
    raylet: bool | None = None
    """Whether the GCS counts the connection's own raylet as alive; None: it does not know it, or
    has not answered."""
    head: bool = False
    """Whether the GCS has answered a fresh client."""
    same_cluster: bool = True
    """Whether that answer came from the cluster of this connection."""
    ended: bool = False
    """Whether that cluster is known to have ended for good."""


@dataclass(frozen=True)
class Patience:
    """How long a failure lasts, in seconds and in looks in a row, before a connection that others
    could have counts as lost."""

    lost_after_s: float
    lost_after_looks: int = 3


@dataclass(frozen=True)
class LinkHealth:
    """Judges the connection by the looks so far."""

    link: Link = Link.READY
    why: str = ""
    failing_since: float | None = None
    """Time of the first of the present row of failed looks, during which the GCS answered a fresh
    client."""
    failures: int = 0
    away_since: float | None = None


def judge(health: LinkHealth, sight: Sight, patience: Patience) -> LinkHealth:
    """The health after a further look. LOST is final until a new connection is made."""
    if health.link is Link.LOST:
        return health
    if sight.head and not sight.same_cluster:
        return LinkHealth(
            Link.LOST, "another Ray cluster answers at the address: the old one is gone"
        )
    if sight.ended:
        return LinkHealth(Link.LOST, "the Ray cluster has ended")
    if sight.answers:
        return _answered(health, sight, patience)
    if sight.head:
        return _failed(health, sight, patience, "the GCS answers others, but not this connection")
    since = sight.at if health.away_since is None else health.away_since
    why = (
        f"the GCS, Ray's control service, has not answered for {sight.at - since:.0f} s; "
        "running jobs train on"
    )
    return LinkHealth(Link.HEAD_AWAY, why, away_since=since)


def _answered(health: LinkHealth, sight: Sight, patience: Patience) -> LinkHealth:
    if sight.raylet:
        return LinkHealth()
    if sight.raylet is False:
        return LinkHealth(Link.LOST, "the raylet that this server was attached to has died")
    return _failed(health, sight, patience, "the GCS does not know this server's raylet")


def _failed(health: LinkHealth, sight: Sight, patience: Patience, why: str) -> LinkHealth:
    since = sight.at if health.failing_since is None else health.failing_since
    failing = replace(
        LinkHealth(Link.DOUBTFUL, why), failing_since=since, failures=health.failures + 1
    )
    lasted = sight.at - since >= patience.lost_after_s
    if lasted and failing.failures >= patience.lost_after_looks:
        return replace(failing, link=Link.LOST)
    return failing
