"""What is known of the nodes: health, avoided and draining nodes, due checks, and bad links.

Values only; `recovery/nodes/node_eligibility.py` decides which node may run ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from holdfast_service.policy.quarantine import Avoided
from holdfast_workers.protocol.findings import HealthFinding


@dataclass(frozen=True)
class AgentHealth:
    """Health of the node of an agent in one incarnation. `number` grows with each of its health
    reports."""

    incarnation: str
    number: int = -1
    reported: tuple[HealthFinding, ...] = ()
    measured: Mapping[str, float] = field(default_factory=dict)
    unreached: HealthFinding | None = None
    """The finding of a failed network check; None if the node is reached."""

    findings: tuple[HealthFinding, ...] = field(init=False)
    """All findings that hold now."""

    def __post_init__(self) -> None:
        unreached = () if self.unreached is None else (self.unreached,)
        object.__setattr__(self, "findings", (*self.reported, *unreached))


@dataclass(frozen=True)
class UncheckedAgent:
    """An incarnation of an agent whose node must be checked before use. `due`: when to request the
    check, or to repeat it."""

    incarnation: str
    due: float


@dataclass
class NodeRecords:
    """Health by agent, standing by node name, removals by node id."""

    health: dict[str, AgentHealth] = field(default_factory=dict)
    """Agent → the last health report of its node."""
    avoided: Mapping[str, Avoided] = field(default_factory=dict)
    """Nodes that the control plane avoids, by name."""
    draining: dict[str, float | None] = field(default_factory=dict)
    """Ids of nodes that the cluster is about to remove → when, if known."""
    unchecked: dict[str, UncheckedAgent] = field(default_factory=dict)
    """Agents whose node may be used again after a check."""
    bad_links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(agent, partner) over which replication failed → until when the link is avoided."""

    def health_of(self, agent: str, incarnation: str) -> AgentHealth:
        """The health of the agent's node in this incarnation; empty if it is unknown."""
        known = self.health.get(agent)
        if known is None or known.incarnation != incarnation:
            return AgentHealth(incarnation)
        return known

    def record_health(self, agent: str, health: AgentHealth) -> bool:
        """Record the health of an agent's node. True if findings or measurements changed."""
        before = self.health_of(agent, health.incarnation)
        self.health[agent] = health
        same = {finding.key for finding in before.findings} == {
            finding.key for finding in health.findings
        }
        return not same or before.measured != health.measured

    def replace_avoided(self, nodes: Mapping[str, Avoided]) -> set[str]:
        """Replace the set of avoided nodes; returns the names of those that may be used again."""
        back = self.avoided.keys() - nodes.keys()
        self.avoided = dict(nodes)
        return back

    def add_draining(self, nodes: Mapping[str, float | None]) -> set[str]:
        """Record draining nodes; returns the ids that were not known to drain. A drained node never
        returns under its id."""
        new = nodes.keys() - self.draining.keys()
        self.draining.update(nodes)
        return new

    def require_check(self, agent: str, incarnation: str, due: float) -> None:
        """The agent's node must be checked before it gets a rank."""
        self.unchecked[agent] = UncheckedAgent(incarnation, due)

    def repeat_check(self, agent: str, due: float) -> None:
        """Check the agent's node again at `due` unless the check has ended by then."""
        self.unchecked[agent] = replace(self.unchecked[agent], due=due)

    def end_check(self, agent: str) -> None:
        """The agent's node has been checked."""
        self.unchecked.pop(agent, None)

    def avoid_link(self, agent: str, partner: str, until: float) -> None:
        """Avoid the link, over which replication failed, if there is another."""
        self.bad_links = {**self.bad_links, (agent, partner): until}

    def trust_links_again(self, now: float) -> bool:
        """Stop avoiding links whose failure is long enough ago. False if there are none."""
        left = {link: until for link, until in self.bad_links.items() if now < until}
        changed, self.bad_links = len(left) < len(self.bad_links), left
        return changed

    def forget_links_of(self, agent: str) -> None:
        """A new incarnation of the agent has other connections."""
        self.bad_links = {link: at for link, at in self.bad_links.items() if agent not in link}
