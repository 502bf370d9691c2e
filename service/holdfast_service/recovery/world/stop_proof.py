"""That the ranks of an ended world step no more: known of each host before another forms (P1).

That one member has left is no proof for the others. What it brought to its last agreement may still
be on its way to them: over a link that mends, or into a node that stood still and goes on; whoever
hears it then applies one step more. So each life of an agent that hosted the world is proven by
itself: it has answered the fence, or its process has ended, or it holds, for its lease has ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_service.recovery.core_state.state import Life, State

ANY_LIFE = ""
"""Of a lease that has ended: whichever life of the agent had it, if it was never heard here."""


def is_needed(state: State, lives: Iterable[Life]) -> None:
    """These hosted a world that has ended."""
    state.unproven = set(lives)


def found(state: State, agent: str, incarnation: str) -> None:
    """This life has stopped. Without leases, it has to do for all: no other proof may ever come."""
    life = (agent, incarnation)
    if life not in state.unproven:
        return
    state.unproven = state.unproven - {life} if state.config.lease_s else set()


def is_missing(state: State) -> bool:
    """Whether some rank of the last world may still step, as far as is known."""
    for agent, incarnation in tuple(state.unproven):
        met = state.roster.has_met(agent, incarnation)
        if ((agent, incarnation if met else ANY_LIFE)) in state.lapsed:
            found(state, agent, incarnation)
    return bool(state.unproven)
