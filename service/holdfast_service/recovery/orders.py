"""A decision written out: the world's members, the agents' orders, and the words for people."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast_service.placement import place_partners
from holdfast_service.ranks import Assignment
from holdfast_service.recovery.config import RecoveryConfig
from holdfast_service.recovery.roster import AgentRecord, sites
from holdfast_service.recovery.state import Member, State, World
from holdfast_service.registry import RestorePoint, restore_for
from holdfast_workers.messages import FormOrder, Partner, Seat


def build_world(
    state: State,
    result: Assignment,
    point: RestorePoint,
    records: list[AgentRecord],
    now: float,
) -> World:
    """The members of the attempt: seats, partners, and where each gets its state."""
    by_agent = {record.agent: record for record in records}
    seats = {placed.rank: placed.agent for placed in result.placed}
    partners = place_partners(state.config.mesh, seats, sites(records), frozenset(state.bad_links))
    members: dict[int, Member] = {}
    for placed in result.placed:
        record = by_agent[placed.agent]
        worker = state.roster.worker(placed.worker) if placed.worker is not None else None
        members[placed.rank] = Member(
            rank=placed.rank,
            agent=placed.agent,
            incarnation=record.incarnation,
            node_id=record.report.node_id,
            host=record.report.host,
            worker=placed.worker,
            role=_role(state, placed.rank, placed.agent, placed.worker),
            restore=restore_for(placed.rank, placed.agent, point),
            partner=partners[placed.rank],
            pid=worker.pid if worker is not None else None,
        )
    return World(attempt=state.attempt, restored_step=point.step, members=members, formed_at=now)


def orders_for(
    state: State, world: World, records: Mapping[str, AgentRecord]
) -> list[tuple[str, FormOrder]]:
    """One order per agent with ranks. Rank 0's agent hosts the store: its loss ends the attempt
    anyway, so the store adds no further way to fail."""
    store = records[world.members[0].agent].report
    orders: list[tuple[str, FormOrder]] = []
    for agent in dict.fromkeys(world.members[rank].agent for rank in sorted(world.members)):
        seats = tuple(
            Seat(
                rank=member.rank,
                worker=member.worker,
                restore=member.restore,
                partner=partner_of(member.partner, records),
            )
            for member in world.members.values()
            if member.agent == agent
        )
        order = FormOrder(
            attempt=world.attempt,
            mesh=dict(state.config.mesh),
            world_size=state.config.world_size,
            store_host=store.host,
            store_port=store.store_port,
            seats=seats,
        )
        orders.append((agent, order))
    return orders


def partner_of(agent: str | None, records: Mapping[str, AgentRecord]) -> Partner | None:
    return None if agent is None else records[agent].partner


def describe_decision(config: RecoveryConfig, result: Assignment, world: World) -> tuple[str, str]:
    """What was decided, and why in words."""
    if result.moved:
        ranks = [rank for index in result.moved for rank in config.groups[index]]
        agents = sorted({world.members[rank].agent for rank in ranks})
        return "replace the node", (
            f"the agent of ranks {_listed(ranks)} is gone; "
            f"{_listed(agents)} takes them over, the others keep their processes"
        )
    forked = [rank for rank, one in sorted(world.members.items()) if one.worker is None]
    if forked:
        return "replace the worker", (
            f"no process for ranks {_listed(forked)} is left, but their agents are healthy: "
            "fork anew there; the others keep their processes"
        )
    return "re-form in place", "every process is still there and keeps its rank"


def _role(state: State, rank: int, agent: str, worker: str | None) -> str:
    before = state.last_world.members.get(rank) if state.last_world else None
    if before is not None and before.agent == agent and worker is not None:
        return "kept" if before.worker in (None, worker) else "replaced"
    if worker is None:
        return "forked"
    return "first" if before is None else "standby"


def _listed(items: list[int] | list[str]) -> str:
    return ", ".join(str(item) for item in items)
