"""Retry of commands whose failure is no fault, until they succeed or their agent is lost.

Meanwhile the core relies only on confirmed results. A retry waits for the next known step, so that
a call that fails at once does not spin. No attempt needs these commands to continue.
"""

from __future__ import annotations

from holdfast_service.recovery.core_state.inputs import CommandFailed, PartnersSet
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.upkeep import save_intervals, token_caches
from holdfast_service.recovery.upkeep.partners import request_partners
from holdfast_workers.protocol.commands import CommandKind

REPEATED_COMMANDS = frozenset(
    {
        CommandKind.SET_PARTNERS,
        CommandKind.SET_INTERVALS,
        CommandKind.FREE_MEMORY,
        CommandKind.WARM_UP,
    }
)


def record_failure(state: CoreState, event: CommandFailed) -> None:
    """Record that a command failed. If it is of this attempt, it is repeated."""
    state.add_evidence(f"command {event.command} failed on agent {event.agent}: {event.why}")
    if event.attempt != state.worlds.attempt or event.command not in REPEATED_COMMANDS:
        return
    if state.worlds.present is None or not state.roster.is_current(event.agent, event.incarnation):
        return
    if event.command is CommandKind.FREE_MEMORY:
        state.worlds.present.repeat_freeing()
    else:
        state.worlds.present.repeat_later(event.agent, event.command)


def handle_partners_set(state: CoreState, event: PartnersSet) -> None:
    """Record that an agent confirmed the partners of a rank."""
    world = state.worlds.present
    if world is None or event.attempt != world.attempt:
        return
    if not state.roster.is_current(event.agent, event.incarnation):
        return
    member = world.members[event.rank]
    if member.agent == event.agent:
        member.confirm_partners(event.partners)


def repeat_failed_commands(state: CoreState) -> None:
    """Repeat the commands that have failed since the last call."""
    world = state.worlds.present
    if world is None or state.timer.stage not in (Stage.RUNNING, Stage.FINISHING):
        return
    for agent, command in world.take_commands_to_repeat():
        record = state.roster.find(agent)
        if record is None or not record.live:
            continue
        if command is CommandKind.SET_PARTNERS:
            for rank, member in sorted(world.members.items()):
                if member.agent == agent and not member.partners_confirmed:
                    request_partners(state, world.attempt, rank, member)
        elif command is CommandKind.SET_INTERVALS:
            save_intervals.request_intervals(state)
        elif command is CommandKind.WARM_UP and agent not in world.hosts():
            token_caches.request_warm_up(state, record)
