"""Who keeps whose memory checkpoints: chosen for a new world, mended and told while it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.durability import protection
from holdfast_service.placement.replica_placement import Partners, Placement, place_partners
from holdfast_service.recovery.core_state.effects import FreeMemory, SetPartners
from holdfast_service.recovery.core_state.roster import AgentRecord, sites
from holdfast_service.recovery.core_state.state import Member, Stage, State
from holdfast_service.recovery.nodes import node_eligibility


@dataclass(frozen=True)
class Chosen:
    """`placement` is what is counted on. `partners`: who is asked to keep copies; beside the
    placement's those over links that failed a while ago, for ranks that lack somebody else."""

    placement: Placement
    partners: Mapping[int, Partners]


def choose_partners(
    state: State,
    seats: Mapping[int, str],
    records: list[AgentRecord],
    keep: Mapping[int, Partners] | None = None,
) -> Chosen:
    """The best partners for the ranks seated so, among the agents that are there."""
    places = sites(records)
    place = partial(place_partners, state.config.mesh, seats, places)
    copies, avoid = state.config.memory_copies, _poor_links(state, seats, records)
    placement = place(copies=copies, avoid=avoid, keep=keep)
    if not (avoid and placement.cost.missing):
        return Chosen(placement, placement.partners)
    tried = place(copies=copies, keep=placement.partners)
    return Chosen(placement, tried.partners)


def _poor_links(
    state: State, seats: Mapping[int, str], records: list[AgentRecord]
) -> frozenset[tuple[str, str]]:
    """(agent, partner) to be taken only where there is no other: replication failed over it, or the
    partner's node is about to go."""
    going = [one.agent for one in records if node_eligibility.drains(state, one.agent)]
    leaving = {(agent, partner) for agent in set(seats.values()) for partner in going}
    return frozenset(state.bad_links) | leaving


def link_failed(state: State, agent: str, partner: str, now: float) -> None:
    """Replication over this link fails: another partner is better, if there is one."""
    state.bad_links[agent, partner] = now + state.config.avoid_link_s
    mend_partners(state, now)


def trust_links_again(state: State, now: float) -> None:
    """What failed once may work by now."""
    left = {link: until for link, until in state.bad_links.items() if now < until}
    if len(left) < len(state.bad_links):
        state.bad_links = left
        mend_partners(state, now)


def mend_partners(state: State, now: float) -> None:
    """Every rank with a partner lost, unreachable or missing gets the best one there is.

    Partners that still serve stay: a new one has to be sent everything first.
    """
    world = state.world
    if world is None or state.stage not in (Stage.FORMING, Stage.RUNNING, Stage.FINISHING):
        return
    records = {record.agent: record for record in state.roster.live()}
    seats = {rank: member.agent for rank, member in world.members.items()}
    if not set(seats.values()) <= set(records):
        return  # a host is gone: the next attempt places anew
    poor = _poor_links(state, seats, list(records.values()))
    serving = {
        rank: tuple(
            one for one in member.partners if one in records and (member.agent, one) not in poor
        )
        for rank, member in world.members.items()
    }
    counted_on: Mapping[int, Partners] = {r: one.partners for r, one in world.members.items()}
    if world.placement is not None:
        counted_on = world.placement.partners
    chosen = choose_partners(state, seats, list(records.values()), keep=serving)
    for rank, member in sorted(world.members.items()):
        if set(chosen.partners[rank]) == set(member.partners):
            continue
        member.partners = chosen.partners[rank]
        world.placed_at, world.freed = now, False
        tell_partners(state, world.attempt, rank, member)
    world.placement = chosen.placement
    if state.stage is not Stage.FORMING and counted_on != chosen.placement.partners:
        tell_protection(state)


def tell_partners(state: State, attempt: int, rank: int, member: Member) -> None:
    """Ask the rank's agent to replicate to the partners that it has now."""
    records = [state.roster.record(one) for one in member.partners]
    partners = tuple(record.partner for record in records if record is not None)
    member.partners_told = False
    state.ask(SetPartners(member.agent, attempt, rank, partners, member.incarnation))


def tell_protection(state: State) -> None:
    """What memory protects against from now on, and what not."""
    world = state.world
    if world is not None and world.placement is not None:
        state.emit(EventKind.MEMORY_PLACED, attempt=world.attempt, **protection(world.placement))


def free_former(state: State, attempt: int, protected_step: int, now: float) -> None:
    """Once this world's partners hold newer states of all ranks, nobody needs what former hosts
    and partners still have."""
    world = state.world
    if world is None or world.freed or attempt != world.attempt:
        return
    if not all(member.partners_told for member in world.members.values()):
        return  # some rank's replicas may still go to a former partner, and lie nowhere else
    settled = now - world.placed_at >= state.config.free_after_s
    if state.stage is not Stage.RUNNING or not settled or protected_step <= world.restored_step:
        return
    world.freed = True
    mesh = dict(state.config.mesh)
    members = world.members.values()
    for record in state.roster.live():
        own = frozenset(one.rank for one in members if one.agent == record.agent)
        kept = frozenset(one.rank for one in members if record.agent in one.partners)
        state.ask(FreeMemory(record.agent, world.attempt, mesh, own, kept, record.incarnation))
