"""The agents of a job as the recovery core knows them: which life, whether there, what they hold.

Promises: what an agent said in an earlier life is never taken for its present one, and a worker
once known dead is never offered again, in whatever order reports and signals arrive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from holdfast_service.placement.rank_assignment import Idle, Node, name_order
from holdfast_service.placement.replica_placement import Site
from holdfast_service.placement.restore_points import Copy
from holdfast_workers.protocol.messages import AgentReport, Partner, WorkerReport, WorkerState


class Arrival(Enum):
    """What a report says about the agent that sent it."""

    STALE = auto()  # of an earlier life
    NEW = auto()  # never seen before
    RESTARTED = auto()  # a new life; all of the former one's workers are gone
    BACK = auto()  # the same life, thought lost
    KNOWN = auto()  # nothing new but the report itself


@dataclass
class AgentRecord:
    report: AgentReport
    live: bool = True
    fenced: int = 0
    """The newest attempt whose fence it has answered in this life."""

    @property
    def agent(self) -> str:
        return self.report.agent

    @property
    def incarnation(self) -> str:
        return self.report.incarnation

    @property
    def partner(self) -> Partner:
        report = self.report
        return Partner(agent=report.agent, host=report.host, data_port=report.data_port)


class Roster:
    def __init__(self) -> None:
        self._agents: dict[str, AgentRecord] = {}
        self._past: set[tuple[str, str]] = set()
        self._dead: set[str] = set()
        self._doubted: set[str] = set()

    def take(self, report: AgentReport) -> Arrival:
        """Note a report that an agent is there."""
        if (report.agent, report.incarnation) in self._past:
            return Arrival.STALE
        record = self._agents.get(report.agent)
        if record is None:
            self._agents[report.agent] = AgentRecord(report)
            return Arrival.NEW
        if record.incarnation != report.incarnation:
            self._past.add((record.agent, record.incarnation))
            self._agents[report.agent] = AgentRecord(report)
            return Arrival.RESTARTED
        if record.live:
            if record.fenced:
                # Its inventory was taken behind the fence; this report may be older than that.
                inventory = record.report
                report = replace(report, workers=inventory.workers, held=inventory.held)
            # An agent that was ready once stays so in this life; a late report does not undo it.
            record.report = replace(report, ready=report.ready or record.report.ready)
            return Arrival.KNOWN
        record.report = report
        record.live, record.fenced = True, 0
        return Arrival.BACK

    def has_made_way(self, report: AgentReport, attempt: int) -> None:
        """The agent's answer to the fence of `attempt`: its inventory from here on."""
        record = self._agents[report.agent]
        if record.fenced == attempt and record.report.ready and not report.ready:
            return  # an answer to an earlier fence of the same attempt, overtaken by the later
        ready = report.ready or record.report.ready
        record.report, record.fenced = replace(report, ready=ready), attempt

    def lose(self, agent: str) -> None:
        """The agent is not there any more; whether it comes back is its affair."""
        record = self._agents.get(agent)
        if record is not None:
            record.live, record.fenced = False, 0

    def is_unfit(self, agent: str, why: str) -> None:
        """The agent can fork no workers any more in this life."""
        record = self._agents[agent]
        record.report = replace(record.report, failure={"message": why})

    def bury(self, worker: str) -> None:
        """The process is dead; ids are unique for ever, so this never ends."""
        self._dead.add(worker)

    def doubt(self, worker: str) -> None:
        """The process lives but is not to be given a rank again."""
        self._doubted.add(worker)

    def is_dead(self, worker: str) -> bool:
        return worker in self._dead

    def record(self, agent: str) -> AgentRecord | None:
        return self._agents.get(agent)

    def is_current(self, agent: str, incarnation: str) -> bool:
        """Whether `incarnation` is the life the agent is in, as far as is known."""
        record = self._agents.get(agent)
        return record is not None and incarnation in ("", record.incarnation)

    def has_met(self, agent: str, incarnation: str) -> bool:
        """Whether this life of the agent was ever heard."""
        record = self._agents.get(agent)
        now = record is not None and record.incarnation == incarnation
        return now or (agent, incarnation) in self._past

    def live(self) -> list[AgentRecord]:
        found = [record for record in self._agents.values() if record.live]
        return sorted(found, key=lambda record: name_order(record.agent))

    def highest_attempt(self) -> int:
        """The highest attempt any agent has been told of, dead ones included."""
        return max((record.report.attempt for record in self._agents.values()), default=0)

    def worker(self, worker: str) -> WorkerReport | None:
        for record in self._agents.values():
            for one in record.report.workers:
                if one.worker == worker:
                    return one
        return None

    def fenced(self, attempt: int) -> list[AgentRecord]:
        """The agents that have made way for `attempt`: only they can be in its world."""
        return [record for record in self.live() if record.fenced == attempt]

    def nodes(self, records: list[AgentRecord], ranks: Mapping[str, int]) -> list[Node]:
        """The agents as places for ranks. `ranks`: worker → rank in the last world. A worker that
        the last world does not name may have a rank of an older one."""
        return [
            Node(
                agent=record.agent,
                domain=record.report.domain,
                capacity=record.report.capacity,
                ready=record.report.ready and record.report.failure is None,
                idle=tuple(
                    _idle(one, ranks) for one in record.report.workers if self._may_sit(one)
                ),
            )
            for record in records
        ]

    def _may_sit(self, one: WorkerReport) -> bool:
        there = one.state in (WorkerState.WARM, WorkerState.PARKED)
        return there and one.worker not in self._dead and one.worker not in self._doubted


def _idle(one: WorkerReport, ranks: Mapping[str, int]) -> Idle:
    rank = ranks.get(one.worker, one.rank)
    if rank is None and one.expected is not None:
        return Idle(one.worker, one.expected, spare=True)
    return Idle(one.worker, rank)


def sites(records: list[AgentRecord]) -> list[Site]:
    """The agents as places for copies."""
    return [Site(one.agent, one.report.node_id, one.report.domain) for one in records]


def copies(records: list[AgentRecord]) -> list[Copy]:
    """Every memory checkpoint that these agents hold."""
    return [
        Copy(one.agent, one.incarnation, one.report.host, one.report.data_port, held)
        for one in records
        for held in one.report.held
    ]
