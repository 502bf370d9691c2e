"""Which nodes have token sets from each other's caches, and the order that makes a standby."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_service.recovery.core_state.roster import AgentRecord
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_workers.protocol.commands import WarmUp
from holdfast_workers.protocol.messages import Partner

NEAR_NODES = 32
"""The most nodes that have them from each other: each connects to all of them."""


def near(state: CoreState, hosts: Sequence[str], agent: str) -> tuple[Partner, ...]:
    """The nodes that this one may have token sets from: some of the `hosts`, which have successive
    ranks, itself among them if it is one. A standby is no source: it may hold none."""
    if not hosts or not state.config.spec.data.prepared:
        return ()
    records = [state.roster.find(host) for host in near_hosts(hosts, agent)]
    return tuple(record.partner for record in records if record is not None and record.live)


def near_hosts(hosts: Sequence[str], agent: str) -> Sequence[str]:
    """The part of the hosts that has the agent; of another one, the first. Parts have about the
    same size, so that none has a single host."""
    count, parts = len(hosts), -(-len(hosts) // NEAR_NODES)
    part = hosts.index(agent) * parts // count if agent in hosts else 0
    first, end = (-(-edge * count // parts) for edge in (part, part + 1))
    return hosts[first:end]


def request_warm_up(state: CoreState, record: AgentRecord) -> None:
    """Make the agent a standby of the present attempt."""
    world = state.worlds.present
    caches = near(state, world.hosts_in_order(), record.agent) if world is not None else ()
    state.request(WarmUp(record.agent, state.worlds.attempt, record.incarnation, caches))
