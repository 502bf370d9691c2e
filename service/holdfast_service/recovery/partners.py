"""New partners for ranks whose partner is gone, while the attempt goes on."""

from __future__ import annotations

from holdfast_service.placement import place_partners
from holdfast_service.recovery.effects import SetPartner
from holdfast_service.recovery.roster import sites
from holdfast_service.recovery.state import Stage, State


def mend_partners(state: State) -> None:
    """Every rank whose partner is lost, unreachable or missing gets the best one there is.

    Partners that still serve stay: a new one has to be sent everything first.
    """
    world = state.world
    if world is None or state.stage not in (Stage.FORMING, Stage.RUNNING, Stage.FINISHING):
        return
    records = {record.agent: record for record in state.roster.live()}
    seats = {rank: member.agent for rank, member in world.members.items()}
    if not set(seats.values()) <= set(records):
        return  # a host is gone: the next attempt places anew
    best = place_partners(
        state.config.mesh, seats, sites(list(records.values())), frozenset(state.bad_links)
    )
    for rank, member in sorted(world.members.items()):
        serves = member.partner in records and (
            (member.agent, member.partner) not in state.bad_links
        )
        if serves or best[rank] == member.partner:
            continue
        member.partner = best[rank]
        chosen = best[rank]
        partner = records[chosen].partner if chosen is not None else None
        state.ask(SetPartner(member.agent, world.attempt, rank, partner, member.incarnation))
