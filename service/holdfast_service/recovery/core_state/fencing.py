"""Fencing: which agents must answer, and which hosts of an ended world may still step (P1).

A member that has left proves nothing about the others. Its last contribution to the step agreement
may still be on its way to them, over a link that recovers or into a node that was suspended; a rank
that receives it applies one more step. So each agent incarnation that hosted the world needs its
own proof before a new world forms: it has answered the fence, or its process has ended, or its
lease has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast_service.recovery.core_state.roster import AgentIncarnation, Roster

ANY_INCARNATION = ""
"""Stands for the incarnation of an ended lease that never sent a report to this supervisor."""


@dataclass
class Fencing:
    """The answers to the fence, and the proofs that an ended world has stopped."""

    leased: bool
    """Whether ranks step only with a lease. Otherwise a single proof counts for all hosts, because
    no other proof may ever arrive."""
    awaiting: frozenset[str] = frozenset()
    """Agents that have not answered their fence."""
    unproven: frozenset[AgentIncarnation] = frozenset()
    """Hosts of the last world that are not yet proven to have stopped stepping."""
    lapsed: frozenset[AgentIncarnation] = frozenset()
    """Incarnations whose ranks step no more: the process or its lease has ended. An empty
    incarnation stands for the one before this supervisor first reached the agent."""
    dead: frozenset[AgentIncarnation] = frozenset()
    """Incarnations that are known to have ended: late messages of them are stale."""
    condemned: frozenset[str] = frozenset()
    """Workers that are known not to leave their attempt by themselves."""

    def expect_answer(self, agent: str) -> None:
        self.awaiting |= {agent}

    def expect_no_answer(self, agent: str) -> None:
        """The agent is lost, or a new incarnation has replaced the one that was asked."""
        self.awaiting -= {agent}

    def record_answer(self, agent: str, incarnation: str) -> None:
        """The agent has answered the fence: its ranks of older attempts have stopped."""
        self.expect_no_answer(agent)
        self.record_stopped(agent, incarnation)

    def expect_no_answers(self) -> None:
        """A new fence begins, or the deadline of the present one is over."""
        self.awaiting = frozenset()

    def condemn(self, worker: str) -> None:
        """The fence kills this worker instead of waiting for it to leave."""
        self.condemned |= {worker}

    def pardon_all(self) -> None:
        """A new attempt runs: the workers of former attempts are gone."""
        self.condemned = frozenset()

    def require_proof(self, hosts: Iterable[AgentIncarnation]) -> None:
        """Require a proof of stop for these hosts of an ended world."""
        self.unproven = frozenset(hosts)

    def record_member_left(self) -> None:
        """A member is known to have left the ended world, which counts as a proof for all hosts if
        there are no leases."""
        if not self.leased:
            self.unproven = frozenset()

    def record_stopped(self, agent: str, incarnation: str) -> None:
        """Record the proof for an incarnation."""
        if (agent, incarnation) in self.unproven:
            self.unproven -= {(agent, incarnation)}
            self.record_member_left()

    def record_alive(self, agent: str, incarnation: str) -> None:
        """The incarnation sent a report: its lease has been renewed."""
        self.lapsed -= {(agent, incarnation)}

    def record_lease_ended(self, agent: str, incarnation: str) -> None:
        self.lapsed |= {(agent, incarnation)}

    def record_ended(self, agent: str, incarnation: str) -> None:
        """Record that the process of the incarnation has ended."""
        self.dead |= {(agent, incarnation)}
        self.record_lease_ended(agent, incarnation)
        self.record_stopped(agent, incarnation)

    def record_replaced(self, agent: str) -> None:
        """A new incarnation of the agent is there. With leases it proves nothing: ranks of the
        former one may live until their lease ends."""
        if not self.leased and any(host == agent for host, _ in self.unproven):
            self.unproven = frozenset()

    def is_proof_missing(self, roster: Roster) -> bool:
        """Whether a rank of the last world may still step, as far as known."""
        for agent, incarnation in self.unproven:
            met = roster.has_seen(agent, incarnation)
            if (agent, incarnation if met else ANY_INCARNATION) in self.lapsed:
                self.record_stopped(agent, incarnation)
        return bool(self.unproven)
