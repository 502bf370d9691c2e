"""Which nodes have token sets from each other's caches, and the order that makes a standby."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_service.recovery.core_state.roster import AgentRecord
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import AttemptWorld
from holdfast_workers.protocol.commands import WarmUp
from holdfast_workers.protocol.messages import Partner

NEAR_NODES = 32
"""The most nodes that have them from each other: each connects to all of them."""


def near(state: CoreState, world: AttemptWorld, agent: str) -> tuple[Partner, ...]:
    """The nodes that this one may have token sets from: some with successive ranks, itself among
    them if it has ranks. A standby is no source: it may hold none."""
    if not state.config.spec.data.prepared:
        return ()
    hosts = near_hosts(world.hosts_in_order(), agent)
    records = [state.roster.find(host) for host in hosts]
    return tuple(record.partner for record in records if record is not None and record.live)


def near_hosts(hosts: Sequence[str], agent: str) -> list[str]:
    """The part of the hosts that has the agent; of another one, the first. Parts have about the
    same size, so that none has a single host."""
    parts = -(-len(hosts) // NEAR_NODES)
    parts_by_host = {host: place * parts // len(hosts) for place, host in enumerate(hosts)}
    part = parts_by_host.get(agent, 0)
    return [host for host in hosts if parts_by_host[host] == part]


def request_warm_up(state: CoreState, record: AgentRecord) -> None:
    """Make the agent a standby of the present attempt."""
    world = state.worlds.present
    caches = near(state, world, record.agent) if world is not None else ()
    state.request(WarmUp(record.agent, state.worlds.attempt, record.incarnation, caches))
