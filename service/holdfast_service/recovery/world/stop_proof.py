"""Proof that the ranks of an ended world step no more, host by host, before a new world forms (P1).

A member that has left proves nothing about the others. Its last contribution to the step agreement
may still be on its way to them, over a link that recovers or into a node that was suspended; a rank
that receives it applies one more step. So each agent incarnation that hosted the world needs its
own proof: it has answered the fence, or its process has ended, or its lease has ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_service.recovery.core_state.state import AgentIncarnation, CoreState

ANY_INCARNATION = ""
"""Stands for the incarnation of an ended lease that never sent a report to this supervisor."""


def require_proof(state: CoreState, hosts: Iterable[AgentIncarnation]) -> None:
    """Require a proof of stop for these hosts of an ended world."""
    state.unproven = set(hosts)


def record_stopped(state: CoreState, agent: str, incarnation: str) -> None:
    """Record the proof for an incarnation. Without leases it counts for all hosts, because no other
    proof may ever arrive."""
    host = (agent, incarnation)
    if host not in state.unproven:
        return
    state.unproven = state.unproven - {host} if state.config.lease_s else set()


def is_proof_missing(state: CoreState) -> bool:
    """Whether a rank of the last world may still step, as far as known."""
    for agent, incarnation in tuple(state.unproven):
        met = state.roster.has_seen(agent, incarnation)
        if ((agent, incarnation if met else ANY_INCARNATION)) in state.lapsed:
            record_stopped(state, agent, incarnation)
    return bool(state.unproven)
