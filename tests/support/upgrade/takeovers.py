"""What a supervisor leaves to the supervisor of a later version: events and reports of the agents.

Agents outlive a supervisor. They answer its successor in the documents of `protocol/codec.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.support.simulation.simulated_cluster import SimulatedCluster

from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_workers.protocol import codec
from holdfast_workers.protocol.answers import AgentReport, KeptEvents


@dataclass(frozen=True)
class Takeover:
    """Documents of one job, and the main facts that its events show."""

    job: str
    at: float
    reports: list[str]
    events: str
    facts: dict[str, Any]

    def agent_reports(self) -> list[AgentReport]:
        return [codec.decode(report.encode(), AgentReport) for report in self.reports]

    def replayed(self) -> Facts:
        """As a supervisor does at its start."""
        return Facts.from_events(codec.decode(self.events.encode(), KeptEvents).events)


def left_by(job: str, cluster: SimulatedCluster) -> Takeover:
    alive = (agent for agent in cluster.agents.values() if agent.alive)
    return Takeover(
        job=job,
        at=cluster.now,
        reports=[codec.encode(agent.report()).decode() for agent in alive],
        events=codec.encode(KeptEvents(tuple(cluster.events))).decode(),
        facts=main_facts(Facts.from_events(cluster.events)),
    )


def main_facts(facts: Facts) -> dict[str, Any]:
    """The facts without which a successor would decide wrongly, as JSON."""
    incident = facts.incident
    return {
        "attempt": facts.attempt,
        "running": facts.running,
        "over": facts.over,
        "committed": facts.committed,
        "floor": facts.floor,
        "members": [[seat.rank, seat.agent, seat.worker] for seat in facts.members],
        "gone": _lists(facts.gone),
        "failures": list(facts.failures),
        "incidents": facts.incidents,
        "open incident": incident and [incident.number, str(incident.cause)],
        "saved": sorted(facts.saved),
        "stop": facts.stop and str(facts.stop.kind),
        "ended": facts.ended and facts.ended.code,
    }


def _lists(pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    return sorted(list(pair) for pair in pairs)
