"""The members of a world, the orders to its agents, and the description of the seating.

Pure functions of the state and the chosen seats: they emit nothing and change no state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from holdfast_service.placement.rank_assignment import Assignment, format_ranks
from holdfast_service.placement.restore_points import RestorePoint, restore_for
from holdfast_service.placement.world_shape import ShapedAssignment, WorldShape
from holdfast_service.policy.decision_ladder import SeatingResult
from holdfast_service.recovery.core_state.roster import AgentRecord
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import AttemptWorld, Member
from holdfast_service.recovery.nodes import mesh_preference, node_eligibility
from holdfast_service.recovery.upkeep import save_intervals, token_caches
from holdfast_service.recovery.upkeep.partners import choose_partners
from holdfast_workers.protocol.messages import FormOrder, Seat, Tier


def store_agent(result: Assignment, records: list[AgentRecord]) -> str | None:
    """The agent whose rendezvous store serves the attempt: of the lowest rank whose node has a
    store. The loss of any host ends the attempt in any case, so the store adds no further point of
    failure. If no host has one, a standby's store serves. None: no store has answered the fence."""
    with_store = [record.agent for record in records if record.report.store_port]
    placed = sorted(result.placed, key=lambda placed: placed.rank)
    hosts = (rank.agent for rank in placed if rank.agent in with_store)
    return next(hosts, next(iter(with_store), None))


def build_world(
    state: CoreState,
    seats: ShapedAssignment,
    point: RestorePoint,
    records: list[AgentRecord],
    now: float,
) -> AttemptWorld:
    """Build the world of the attempt: seats, partners, and the restore source of each rank."""
    by_agent = {record.agent: record for record in records}
    shape, result = seats.shape, seats.assignment
    agents = {placed.rank: placed.agent for placed in result.placed}
    chosen = choose_partners(state, shape.mesh, agents, records)
    workers = (worker for record in records for worker in record.report.workers)
    pids: dict[str | None, int] = {worker.worker: worker.pid for worker in workers}
    busy: Counter[str] = Counter()
    members: dict[int, Member] = {}
    for placed in result.placed:
        record = by_agent[placed.agent]
        restore = restore_for(placed.rank, placed.agent, point, busy)
        if restore.tier is Tier.REMOTE and point.attempt in state.worlds.shapes:
            restore = replace(restore, mesh=state.worlds.shape_of(point.attempt).mesh_name)
        busy[restore.agent] += restore.tier is Tier.PARTNER_RAM
        members[placed.rank] = Member(
            rank=placed.rank,
            agent=placed.agent,
            incarnation=record.incarnation,
            node_id=record.report.node_id,
            host=record.report.host,
            worker=placed.worker,
            role=_role(state, placed.rank, placed.agent, placed.worker),
            restore=restore,
            partners=chosen.partners[placed.rank],
            pid=pids.get(placed.worker),
        )
    return AttemptWorld(
        attempt=state.worlds.attempt,
        shape=shape,
        restored_step=point.step,
        members=members,
        store=store_agent(result, records) or "",
        placement=chosen.placement,
        placed_at=now,
    )


def form_orders(
    state: CoreState, world: AttemptWorld, records: Mapping[str, AgentRecord]
) -> list[tuple[str, FormOrder]]:
    """The order of each agent with ranks."""
    store = records[world.store].report
    orders: list[tuple[str, FormOrder]] = []
    hosts = world.hosts_in_order()
    for node_rank, agent in enumerate(hosts):
        seats = tuple(
            Seat(
                rank=member.rank,
                worker=member.worker,
                restore=member.restore,
                partners=tuple(records[agent].partner for agent in member.partners),
            )
            for member in world.members.values()
            if member.agent == agent
        )
        order = FormOrder(
            attempt=world.attempt,
            mesh=world.shape.mesh,
            world_size=world.shape.world_size,
            store_host=store.host,
            store_port=store.store_port,
            seats=seats,
            intervals=save_intervals.current_intervals(state, world),
            skipped=state.progress.ledger.ranges,
            leased=state.config.spec.recovery.lease_s > 0,
            recheck=state.corruption.repeated_step,
            leave_after=state.config.next_change(world.restored_step),
            node_rank=node_rank,
            nodes=len(hosts),
            caches=token_caches.near(state, hosts, agent),
        )
        orders.append((agent, order))
    return orders


def seating(state: CoreState, result: Assignment, world: AttemptWorld) -> SeatingResult:
    """The moved and forked ranks, for the record of the decision."""
    before = state.worlds.shape if state.worlds.last is not None else world.shape
    ranks = tuple(rank for index in result.moved for rank in world.shape.groups[index])
    return SeatingResult(
        moved=ranks,
        forked=tuple(
            rank for rank, member in sorted(world.members.items()) if member.worker is None
        ),
        replaced=tuple(
            rank for rank, member in sorted(world.members.items()) if member.role == "replaced"
        ),
        onto=tuple(sorted({world.members[rank].agent for rank in ranks})),
        why_moved=_why_moved(state, result),
        resized=_resized(before, world.shape, mesh_preference.why_chosen(state, world.shape)),
        grown=before.world_size < world.shape.world_size,
        anew=_why_anew(state),
        is_program=state.config.runs_program,
    )


def _why_anew(state: CoreState) -> str:
    """Why nothing is known of the processes before; "" if the last world is known, or there was
    none."""
    if state.worlds.last is not None or state.incidents.current is None:
        return ""
    return "a supervisor that does not know the last attempt has given all ranks their places anew"


def _resized(before: WorldShape, after: WorldShape, why: str) -> str:
    if before.axes == after.axes:
        return ""
    return (
        f"{after.world_size} ranks ({after.name}) on {after.nodes} nodes in place of "
        f"{before.world_size} ({before.name}) on {before.nodes}{why}"
    )


def _why_moved(state: CoreState, result: Assignment) -> str:
    groups, homes = state.worlds.shape.groups, state.worlds.homes
    before = {homes[index].agent: groups[index] for index in result.moved}
    reasons = []
    for agent, ranks in before.items():
        record = state.roster.find(agent)
        is_live = record is not None and record.live
        why = node_eligibility.why_avoided(state, record) if record is not None and is_live else ""
        why = f" ({why})" if why else ""
        gone = f"the agent of {format_ranks(ranks)} is gone"
        reasons.append(f"the node of {format_ranks(ranks)} must be left{why}" if is_live else gone)
    return "; ".join(reasons)


def _role(state: CoreState, rank: int, agent: str, worker: str | None) -> str:
    before = state.worlds.last.members.get(rank) if state.worlds.last else None
    if before is not None and before.agent == agent and worker is not None:
        kept = "restarted" if state.config.runs_program else "kept"
        return kept if before.worker in (None, worker) else "replaced"
    if worker is None:
        return "forked"
    return "first" if before is None else "standby"
