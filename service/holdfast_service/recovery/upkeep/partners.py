"""Replication partners, which keep the ranks' memory checkpoints.

Partners are chosen for a new world and replaced while it runs. A former copy is freed only when all
present partners hold newer states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from holdfast_service.job_model.events.attempts import MemoryPlacedEvent
from holdfast_service.placement.durability import protection
from holdfast_service.placement.replica_placement import Partners, Placement, place_partners
from holdfast_service.recovery.core_state.roster import AgentRecord, sites
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import Member
from holdfast_service.recovery.nodes import node_eligibility
from holdfast_workers.protocol.commands import FreeMemory, SetPartners


@dataclass(frozen=True)
class ChosenPartners:
    """`placement` counts for durability. `partners` are asked to keep copies: the partners of the
    placement and, for ranks that lack partners, those over links that failed a while ago."""

    placement: Placement
    partners: Mapping[int, Partners]


def choose_partners(
    state: CoreState,
    mesh: Mapping[str, int],
    seats: Mapping[int, str],
    records: list[AgentRecord],
    keep: Mapping[int, Partners] | None = None,
) -> ChosenPartners:
    """The best partners for ranks of `mesh` in these seats, among the available agents."""
    places = sites(records)
    place = partial(place_partners, mesh, seats, places, equality=state.config.replica_equality)
    copies = state.config.spec.checkpoint.memory.partner_copies
    avoid = _links_to_avoid(state, seats, records)
    placement = place(copies=copies, avoid=avoid, keep=keep)
    if not (avoid and placement.cost.missing):
        return ChosenPartners(placement, placement.partners)
    tried = place(copies=copies, keep=placement.partners)
    return ChosenPartners(placement, tried.partners)


def _links_to_avoid(
    state: CoreState, seats: Mapping[int, str], records: list[AgentRecord]
) -> frozenset[tuple[str, str]]:
    """(agent, partner) links that are used only if there is no other: replication over the link
    failed, or the partner's node is draining."""
    going = [
        record.agent for record in records if node_eligibility.is_draining(state, record.agent)
    ]
    leaving = {(agent, partner) for agent in set(seats.values()) for partner in going}
    return frozenset(state.nodes.bad_links) | leaving


def handle_link_failed(state: CoreState, agent: str, partner: str, now: float) -> None:
    """Avoid a link over which replication failed, if there is another partner."""
    state.nodes.avoid_link(agent, partner, now + state.config.avoid_link_s)
    mend_partners(state, now)


def trust_links_again(state: CoreState, now: float) -> None:
    """Stop avoiding links whose failure is long enough ago."""
    if state.nodes.bad_links and state.nodes.trust_links_again(now):
        mend_partners(state, now)


def mend_partners(state: CoreState, now: float) -> None:
    """Give the best available partner to every rank whose partner is lost, unreachable or missing.

    Serving partners stay, because a new partner must first receive the complete state.
    """
    world = state.worlds.present
    if world is None or state.timer.stage not in (Stage.FORMING, Stage.RUNNING, Stage.FINISHING):
        return
    records = {record.agent: record for record in state.roster.live()}
    seats = {rank: member.agent for rank, member in world.members.items()}
    if not set(seats.values()) <= set(records):
        return  # a host is gone: the next attempt chooses partners
    poor = _links_to_avoid(state, seats, list(records.values()))
    serving = {
        rank: tuple(
            partner
            for partner in member.partners
            if partner in records and (member.agent, partner) not in poor
        )
        for rank, member in world.members.items()
    }
    counted_on = world.counted_partners()
    chosen = choose_partners(state, world.shape.mesh, seats, list(records.values()), keep=serving)
    for rank, member in sorted(world.members.items()):
        if set(chosen.partners[rank]) == set(member.partners):
            continue
        member.change_partners(chosen.partners[rank])
        world.delay_freeing(now)
        request_partners(state, world.attempt, rank, member)
    world.place(chosen.placement)
    if state.timer.stage is not Stage.FORMING and counted_on != chosen.placement.partners:
        emit_protection(state)


def request_partners(state: CoreState, attempt: int, rank: int, member: Member) -> None:
    """Order the rank's agent to replicate to the rank's present partners."""
    records = [state.roster.find(partner) for partner in member.partners]
    partners = tuple(record.partner for record in records if record is not None)
    state.request(SetPartners(member.agent, attempt, rank, partners, member.incarnation))


def emit_protection(state: CoreState) -> None:
    """Emit which losses the memory checkpoints protect against from now on."""
    world = state.worlds.present
    if not state.has_memory_checkpoints:
        return
    if world is not None and world.placement is not None:
        kept = protection(world.placement)
        state.emit(MemoryPlacedEvent(attempt=world.attempt, protection=kept))


def free_former_copies(state: CoreState, attempt: int, protected_step: int, now: float) -> None:
    """Free the copies of former hosts and partners when this world's partners hold newer states of
    all ranks."""
    world = state.worlds.present
    if world is None or world.freed or attempt != world.attempt:
        return
    if not all(member.partners_confirmed for member in world.members.values()):
        return  # a rank may still replicate to a former partner, which then has the only copy
    settled = now - world.placed_at >= state.config.free_after_s
    if (
        state.timer.stage is not Stage.RUNNING
        or not settled
        or protected_step <= world.restored_step
    ):
        return
    world.record_freed()
    mesh = world.shape.mesh
    members = world.members.values()
    for record in state.roster.live():
        own = frozenset(member.rank for member in members if member.agent == record.agent)
        kept = frozenset(member.rank for member in members if record.agent in member.partners)
        state.request(FreeMemory(record.agent, world.attempt, mesh, own, kept, record.incarnation))
