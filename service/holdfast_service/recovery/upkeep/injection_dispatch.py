"""Faults that somebody asked for, on their way to who is to bring them about.

One of a rank or of its node goes to the agent that hosts the rank: of the present world, or of the
last one while the next is being formed. If that agent is gone it waits for the next world. Each
goes out once: what then becomes of it is seen like any other fault.
"""

from __future__ import annotations

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.recovery.core_state.effects import InjectFault
from holdfast_service.recovery.core_state.inputs import CommandFailed, FaultWanted
from holdfast_service.recovery.core_state.roster import AgentRecord
from holdfast_service.recovery.core_state.state import State
from holdfast_workers.fault_injection.kinds import Victim


def hand_out(state: State) -> None:
    """Give out what can be given out now."""
    waiting, state.wanted_faults = state.wanted_faults, []
    for wanted in waiting:
        if wanted.fault.victim is Victim.NODES:
            agents = state.roster.live()
        else:
            agents = [record for record in (_host(state, wanted),) if record is not None]
        for record in agents:
            state.ask(InjectFault(record.agent, wanted.number, wanted.fault, record.incarnation))
        if not agents:
            state.wanted_faults.append(wanted)


def failed(state: State, given: CommandFailed) -> None:
    state.emit(EventKind.FAULT_FAILED, agent=given.agent, why=given.why)


def _host(state: State, wanted: FaultWanted) -> AgentRecord | None:
    world = state.world or state.last_world
    if world is None:
        return None
    member = world.members[wanted.fault.rank or 0]
    record = state.roster.record(member.agent)
    there = record is not None and record.live and record.incarnation == member.incarnation
    return record if there else None
