"""Which nodes are set aside, for how long and why: pure.

A node is a machine, named by its address; where all nodes share the loopback address (the
embedded cluster), by Ray's id of it. It is `cordoned` by people and `quarantined` by the service,
after it had a part in several incidents within a window: for a time, which doubles with each
further quarantine. Either ends by itself when its time is over, and can be lifted before.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from holdfast_service.policy.causes import BLAMED, Cause


class Standing(StrEnum):
    READY = "ready"
    CORDONED = "cordoned"  # by somebody
    QUARANTINED = "quarantined"  # by the service


COUNTED = BLAMED | {Cause.NODE_UNWELL}
"""Causes of incidents that count: what speaks against a node within its job, and what a probe
found of it."""


@dataclass(frozen=True)
class QuarantineRules:
    """Times in seconds."""

    incidents: int = 3
    """So many within the window, and the node is quarantined. 0: the service sets none aside."""
    window_s: float = 3600.0
    first_s: float = 600.0
    longest_s: float = 86400.0
    forget_s: float = 86400.0
    """A node that was in use for so long begins again with `first_s`."""
    largest_share: float = 0.34
    """Of the nodes that are there and can run something; what befalls more of them is hardly the
    nodes' fault."""

    def leaves_enough(self, aside: int, there: int) -> bool:
        """Whether one more may be set aside, when `aside` of the `there` nodes are."""
        return self.incidents > 0 and aside + 1 <= self.largest_share * there


@dataclass(frozen=True)
class Trouble:
    """An incident that a node had a part in."""

    job: str
    incident: int
    cause: str
    at: float


@dataclass(frozen=True)
class Standings:
    """What is decided about a node; `until` None: for ever. `strikes`: quarantines in a row."""

    state: Standing = Standing.READY
    reason: str = ""
    since: float = 0.0
    until: float | None = None
    strikes: int = 0


@dataclass(frozen=True)
class Avoided:
    """A node on which no new rank is to be seated."""

    standing: Standing
    reason: str


def closed(avoided: Mapping[str, Avoided]) -> dict[str, Avoided]:
    """The nodes that no job may come to: those in quarantine are better than none."""
    return {name: one for name, one in avoided.items() if one.standing is Standing.CORDONED}


def node_name(node_id: str, host: str) -> str:
    """The name of the machine that Ray's node `node_id` is on, at the address `host`."""
    return node_id if _is_shared(host) else host


@lru_cache(maxsize=10_000)
def _is_shared(host: str) -> bool:
    """Whether many nodes have that address. (It is asked of every rank of every attempt.)"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return not host or host == "localhost"


def present(decided: Standings, now: float) -> Standing:
    """How the node stands now: a time that is over ends what it was set for."""
    over = decided.until is not None and decided.until <= now
    return Standing.READY if over else decided.state


def after_trouble(
    decided: Standings, troubles: Collection[Trouble], rules: QuarantineRules, now: float
) -> Standings | None:
    """What is to be decided now that the node has had these troubles; None: nothing new.

    Only what happened since the last decision counts: a quarantine, also one that was lifted,
    wipes the slate. What somebody has cordoned stays so.
    """
    if present(decided, now) is not Standing.READY or not rules.incidents:
        return None
    since = max(now - rules.window_s, decided.since)
    recent = sorted(
        (one for one in troubles if one.at > since and one.cause in COUNTED),
        key=lambda one: one.at,
    )
    if len(recent) < rules.incidents:
        return None
    return quarantined(decided, _in_words(recent, rules), rules, now)


def quarantined(decided: Standings, reason: str, rules: QuarantineRules, now: float) -> Standings:
    """Set aside by the service: each time in a row for twice as long."""
    free_since = decided.since if decided.until is None else max(decided.since, decided.until)
    strikes = 1 if now - free_since > rules.forget_s else decided.strikes + 1
    for_s = min(rules.longest_s, rules.first_s * 2.0 ** min(strikes - 1, 30))
    return Standings(Standing.QUARANTINED, reason, now, now + for_s, strikes)


def cordoned(decided: Standings, reason: str, until: float | None, now: float) -> Standings:
    return Standings(Standing.CORDONED, reason, now, until, decided.strikes)


def lifted(decided: Standings, now: float) -> Standings:
    """In use again, whoever had set it aside."""
    return Standings(Standing.READY, "", now, None, decided.strikes)


def _in_words(recent: list[Trouble], rules: QuarantineRules) -> str:
    causes = ", ".join(f"{one.cause} (job {one.job}, incident {one.incident})" for one in recent)
    return f"{len(recent)} incidents within {rules.window_s:g} s: {causes}"
