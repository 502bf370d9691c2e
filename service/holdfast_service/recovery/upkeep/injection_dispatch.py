"""Dispatch of requested faults to the agents that inject them.

A fault of a rank or of its node goes to the agent that hosts the rank in the present world, or in
the last world while the next one forms. If that agent is gone, the fault waits for the next world;
if the mesh has no such rank, the fault has failed. Each fault is dispatched once; its consequences
are detected like those of any other fault.
"""

from __future__ import annotations

from holdfast_service.job_model.events.health import FaultFailedEvent
from holdfast_service.recovery.core_state.inputs import CommandFailed, FaultRequested
from holdfast_service.recovery.core_state.roster import AgentRecord
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_workers.fault_injection.kinds import Victim
from holdfast_workers.protocol.commands import InjectFault


def dispatch(state: CoreState) -> None:
    """Dispatch the requested faults that an agent can inject now."""
    for wanted in state.inbox.take_faults():
        missing = _missing_rank(state, wanted)
        if missing:
            state.emit(FaultFailedEvent(agent="", why=missing))
            continue
        if wanted.fault.victim is Victim.NODES:
            agents = state.roster.live()
        else:
            agents = [record for record in (_find_host(state, wanted),) if record is not None]
        for record in agents:
            state.request(
                InjectFault(
                    record.agent, wanted.number, wanted.fault.document(), record.incarnation
                )
            )
        if not agents:
            state.inbox.keep_fault(wanted)


def handle_inject_failed(state: CoreState, event: CommandFailed) -> None:
    state.emit(FaultFailedEvent(agent=event.agent, why=event.why))


def _missing_rank(state: CoreState, wanted: FaultRequested) -> str:
    """Why the fault cannot be injected; "" if its rank exists, or no world does."""
    world, rank = state.worlds.present or state.worlds.last, wanted.fault.rank or 0
    if wanted.fault.victim is Victim.NODES or world is None or rank in world.members:
        return ""
    return f"the present mesh, {world.shape.name}, has no rank {rank}"


def _find_host(state: CoreState, wanted: FaultRequested) -> AgentRecord | None:
    world = state.worlds.present or state.worlds.last
    if world is None:
        return None
    member = world.members[wanted.fault.rank or 0]
    record = state.roster.find(member.agent)
    is_host_live = record is not None and record.live and record.incarnation == member.incarnation
    return record if is_host_live else None
