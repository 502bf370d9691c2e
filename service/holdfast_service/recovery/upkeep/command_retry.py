"""Commands whose failure condemns nobody: they are asked for again until they get through, or their
agent is lost. What the core believes meanwhile is only what was confirmed.

Asked again when the next steps are known to be made, so that a call that fails at once does not
spin. Nothing here is needed for an attempt to go on.
"""

from __future__ import annotations

from holdfast_service.recovery.core_state.effects import WarmUp
from holdfast_service.recovery.core_state.inputs import CommandFailed, PartnersSet
from holdfast_service.recovery.core_state.state import Stage, State
from holdfast_service.recovery.upkeep import save_intervals
from holdfast_service.recovery.upkeep.partners import tell_partners


def failed(state: State, given: CommandFailed) -> None:
    """A command of this attempt did not get through."""
    if state.world is None or not state.roster.is_current(given.agent, given.incarnation):
        return
    if given.command == "free_memory":
        state.world.freed = False  # said anew to all, once what it follows from is certain
    else:
        state.world.untold.add((given.agent, given.command))


def partners_set(state: State, given: PartnersSet) -> None:
    """An agent replicates a rank to these partners by now."""
    world = state.world
    if world is None or given.attempt != world.attempt:
        return
    if not state.roster.is_current(given.agent, given.incarnation):
        return
    member = world.members[given.rank]
    if member.agent == given.agent and member.partners == given.partners:
        member.partners_told = True


def ask_again(state: State) -> None:
    """For everything that failed since the last time."""
    world = state.world
    if world is None or state.stage not in (Stage.RUNNING, Stage.FINISHING):
        return
    untold, world.untold = world.untold, set()
    for agent, command in sorted(untold):
        record = state.roster.record(agent)
        if record is None or not record.live:
            continue
        if command == "set_partners":
            for rank, member in sorted(world.members.items()):
                if member.agent == agent and not member.partners_told:
                    tell_partners(state, world.attempt, rank, member)
        elif command == "set_intervals":
            save_intervals.tell(state)
        elif command == "warm_up" and agent not in world.hosts():
            state.ask(WarmUp(agent, world.attempt, record.incarnation))
