"""The agents of a job: their present incarnation, whether they are live, and what they hold.

Invariants, for any order of reports and signals: a report of an earlier incarnation never applies
to the present one, and a worker that was once known dead is never seated again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from holdfast_service.placement.rank_assignment import CandidateNode, IdleWorker, name_order
from holdfast_service.placement.replica_placement import Site
from holdfast_service.placement.restore_points import HeldCopy
from holdfast_workers.protocol.answers import AgentFailure, AgentReport, WorkerReport
from holdfast_workers.protocol.messages import Partner, WorkerState
from holdfast_workers.protocol.signals import SignalKind

AgentIncarnation = tuple[str, str]
"""(agent, incarnation)"""
MissedSignals = frozenset[tuple[SignalKind, str | None]]
"""(kind, worker) of signals that should have arrived."""


class Arrival(Enum):
    """How a report changes what is known of the agent that sent it."""

    STALE = auto()  # from an earlier incarnation
    NEW = auto()  # from an agent never seen before
    RESTARTED = auto()  # from a new incarnation; all workers of the former one are gone
    BACK = auto()  # from an agent that was reported lost, in the same incarnation
    KNOWN = auto()  # from a live agent in the same incarnation


@dataclass
class AgentRecord:
    """The last report of an agent in its present incarnation."""

    report: AgentReport
    live: bool = True
    fenced: int = 0
    """The newest attempt whose fence the agent has answered in this incarnation."""
    agent: str = field(init=False)
    incarnation: str = field(init=False)

    def __post_init__(self) -> None:
        self.agent, self.incarnation = self.report.agent, self.report.incarnation

    @property
    def partner(self) -> Partner:
        report = self.report
        return Partner(agent=report.agent, host=report.host, data_port=report.data_port)


class Roster:
    """All agents of the job by name, past incarnations, and workers that must not be seated."""

    def __init__(self) -> None:
        self._agents: dict[str, AgentRecord] = {}
        self._past: set[AgentIncarnation] = set()
        self._dead: set[str] = set()
        self._excluded: set[str] = set()
        self._missed: dict[str, MissedSignals] = {}

    def record_report(self, report: AgentReport) -> Arrival:
        """Record a report of an agent that is present."""
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
                # The inventory was taken behind the fence; this report may be older than that.
                inventory = record.report
                report = replace(
                    report,
                    workers=inventory.workers,
                    held=inventory.held,
                    store_port=inventory.store_port,
                )
            # An agent stays ready for its incarnation; a late report does not undo that.
            record.report = replace(report, ready=report.ready or record.report.ready)
            return Arrival.KNOWN
        record.report = report
        record.live, record.fenced = True, 0
        return Arrival.BACK

    def record_fence_answer(self, report: AgentReport, attempt: int) -> None:
        """Record the agent's answer to the fence of `attempt`: its inventory from now on."""
        record = self._agents[report.agent]
        if record.fenced == attempt and record.report.ready and not report.ready:
            return  # the answer to an earlier fence of the same attempt, overtaken by the later one
        ready = report.ready or record.report.ready
        record.report, record.fenced = replace(report, ready=ready), attempt

    def mark_lost(self, agent: str) -> None:
        """Record that the agent is lost; a later report may bring it back."""
        record = self._agents.get(agent)
        if record is not None:
            record.live, record.fenced = False, 0

    def mark_unfit(self, agent: str, why: str) -> None:
        """Record that the agent cannot fork workers any more in this incarnation."""
        record = self._agents[agent]
        record.report = replace(record.report, failure=AgentFailure(why))

    def mark_dead(self, worker: str) -> None:
        """Record that the process is dead. Worker names are never reused, so this is permanent."""
        self._dead.add(worker)

    def exclude_worker(self, worker: str) -> None:
        """Never seat this worker again, although its process lives."""
        self._excluded.add(worker)

    def record_missed_signals(self, agent: str, missed: MissedSignals) -> MissedSignals:
        """Record the signals that the agent's last poll showed to be missing. Returns those that
        the poll before had shown."""
        before = self._missed.get(agent, frozenset())
        self._missed[agent] = missed
        return before

    def is_dead(self, worker: str) -> bool:
        return worker in self._dead

    def find(self, agent: str) -> AgentRecord | None:
        return self._agents.get(agent)

    def near_domain_of(self, agent: str) -> str:
        """The domain of the agent's node within which ranks exchange most; "" if unknown."""
        record = self._agents.get(agent)
        return record.report.near if record is not None else ""

    def all(self) -> list[AgentRecord]:
        """All known agents, lost agents included."""
        return list(self._agents.values())

    def is_current(self, agent: str, incarnation: str) -> bool:
        """Whether `incarnation` is the agent's present one as far as known; "" always is."""
        record = self._agents.get(agent)
        return record is not None and incarnation in ("", record.incarnation)

    def has_seen(self, agent: str, incarnation: str) -> bool:
        """Whether this incarnation of the agent ever sent a report."""
        record = self._agents.get(agent)
        now = record is not None and record.incarnation == incarnation
        return now or (agent, incarnation) in self._past

    def live(self) -> list[AgentRecord]:
        live = [record for record in self._agents.values() if record.live]
        return sorted(live, key=lambda record: name_order(record.agent))

    def highest_attempt(self) -> int:
        """The highest attempt that any agent knows, lost agents included."""
        return max((record.report.attempt for record in self._agents.values()), default=0)

    def worker(self, worker: str) -> WorkerReport | None:
        for record in self._agents.values():
            for report in record.report.workers:
                if report.worker == worker:
                    return report
        return None

    def fenced(self, attempt: int) -> list[AgentRecord]:
        """The agents that have answered the fence of `attempt`: only they can join its world."""
        return [record for record in self.live() if record.fenced == attempt]

    def nodes(self, records: list[AgentRecord], ranks: Mapping[str, int]) -> list[CandidateNode]:
        """The agents as candidate nodes for ranks. `ranks`: worker → rank in the last world. A
        worker that the last world does not name may have a rank of an older world."""
        return [
            CandidateNode(
                agent=record.agent,
                domain=record.report.near,
                capacity=record.report.capacity,
                ready=record.report.ready and record.report.failure is None,
                idle=tuple(
                    _idle(worker, ranks)
                    for worker in record.report.workers
                    if self._is_seatable(worker)
                ),
            )
            for record in records
        ]

    def _is_seatable(self, worker: WorkerReport) -> bool:
        is_idle = worker.state in (WorkerState.WARM, WorkerState.PARKED)
        return is_idle and worker.worker not in self._dead and worker.worker not in self._excluded


def _idle(worker: WorkerReport, ranks: Mapping[str, int]) -> IdleWorker:
    rank = ranks.get(worker.worker, worker.rank)
    if rank is None and worker.expected is not None:
        mesh = worker.expected_mesh
        return IdleWorker(worker.worker, worker.expected, spare=True, mesh=mesh)
    return IdleWorker(worker.worker, rank)


def sites(records: list[AgentRecord]) -> list[Site]:
    """The agents as sites for memory checkpoints. Where no label names a failure domain, the
    machine is the domain of all nodes on it, unless every agent is on this one machine."""
    machines: dict[str, list[str]] = {}
    for record in sorted(records, key=lambda record: name_order(record.agent)):
        machines.setdefault(_machine(record), []).append(record.agent)

    def domain(record: AgentRecord) -> str:
        machine = _machine(record)
        agents = machines[machine]
        distinguishes = machine and 1 < len(agents) < len(records)
        return record.report.domain or (f"machine of {agents[0]}" if distinguishes else "")

    return [Site(record.agent, record.report.node_id, domain(record)) for record in records]


def copies(records: list[AgentRecord]) -> list[HeldCopy]:
    """All memory checkpoints that these agents hold."""
    return [
        HeldCopy(
            record.agent, record.incarnation, record.report.host, record.report.data_port, held
        )
        for record in records
        for held in record.report.held
    ]


def _machine(record: AgentRecord) -> str:
    """The machine that runs the agent; "" if unknown."""
    process = record.report.process
    return process.machine if process is not None else ""
