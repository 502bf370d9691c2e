"""An in-memory `Cluster` for the reconciler, with supervisors that tests script."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from holdfast_service.diagnosis.node_faults import InspectedNode
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.preparation import (
    SourceProgress,
    SourceRequest,
    WeightsProgress,
    WeightsRequest,
)
from holdfast_service.job_model.supervisor_protocol import (
    Capacity,
    ClusterUnavailable,
    Cursors,
    EventKind,
    GrowthRequest,
    JobPlan,
    LaunchRefused,
    NodeCapacity,
    PackagesAnswer,
    PathAnswer,
    Phase,
    SamplesAnswer,
    SizeOrder,
    StartWait,
    StopKind,
    StopOrder,
    SupervisorEvent,
    SupervisorReport,
    SupervisorUnavailable,
)
from holdfast_service.policy.quarantine import Avoided
from holdfast_workers.protocol.messages import Beat, LogLine, StepRow
from holdfast_workers.protocol.metrics import FOLDS
from holdfast_workers.protocol.processes import StorageOptions

MESH = {"dp_shard": 2, "tp": 2}


def three_nodes(roomy: bool = False) -> Capacity:
    """`roomy`: with room for all jobs of a test together."""
    nodes = tuple(NodeCapacity(f"node{n}", f"127.0.0.{n}", cpus=1.0, gpus=0.0) for n in range(3))
    return Capacity(nodes=nodes, can_grow=False, unlimited=roomy)


def row(attempt: int, step: int, loss: float = 1.5) -> StepRow:
    measured: dict[str, Any] = {name: 0.001 * place for place, name in enumerate(FOLDS, start=1)}
    return StepRow(
        attempt=attempt,
        step=step,
        at=1000.0 + step,
        loss=loss,
        grad_norm=0.5,
        lr=3e-4,
        tokens=4096,
        step_time_s=0.1,
        samples=f"s{step}",
        **measured,
    )


def line(seq: int, text: str, rank: int | None = 0, attempt: int = 1) -> LogLine:
    return LogLine(
        agent="n0",
        incarnation="a",
        seq=seq,
        at=1000.0 + seq,
        worker="n0.a.1",
        attempt=attempt,
        rank=rank,
        stream="stdout",
        text=text,
    )


@dataclass
class FakeSupervisor:
    """The state that one job's supervisor reports; tests modify it."""

    launch: JobPlan
    epoch: int = 1
    phase: Phase = Phase.STARTING
    step: int = 0
    attempt: int = 0
    events: list[SupervisorEvent] = field(default_factory=list)
    rows: list[StepRow] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    logs: list[LogLine] = field(default_factory=list)
    beats: list[Beat] = field(default_factory=list)
    start: StartWait | None = None
    orders: list[StopOrder] = field(default_factory=list)
    wanted_faults: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    avoided: list[dict[str, Avoided]] = field(default_factory=list)
    avoids: dict[str, Avoided] = field(default_factory=dict)  # as it reports
    sizes: list[SizeOrder] = field(default_factory=list)
    size: SizeOrder = field(default_factory=lambda: SizeOrder(None))  # as it reports
    obeys: bool = True
    rows_per_poll: int = 100
    build: str = ""

    @property
    def known_step(self) -> int | None:
        return self.step if self.step or self.rows else None

    def emit(self, kind: EventKind, at: float | None = None, **data: Any) -> None:
        seq = self.launch.last_event + len(self.events) + 1
        self.events.append(SupervisorEvent(seq, 2000.0 + seq if at is None else at, kind, data))

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.emit(EventKind.PHASE, phase=phase)

    def form(
        self,
        attempt: int,
        restore_step: int = 0,
        mesh: Mapping[str, int] | None = None,
        at: float | None = None,
    ) -> None:
        self.attempt = attempt
        members = [
            {
                "rank": rank,
                "worker": f"n{rank // 2}.a.{rank}",
                "agent": f"n{rank // 2}",
                "node_id": f"node{rank // 2}",
                "host": "127.0.0.1",
                "pid": 100 + rank,
                "role": "worker",
            }
            for rank in range(4)
        ]
        self.emit(
            EventKind.ATTEMPT_FORMING,
            at,
            attempt=attempt,
            mesh=mesh or MESH,
            world_size=prod((mesh or MESH).values()),
            members=members,
            standbys=[{"agent": "n2", "node_id": "node2", "workers": []}],
            restore={"step": restore_step, "tiers": {}, "sources": {}},
            cause_incident=None,
        )
        self.emit(
            EventKind.ATTEMPT_RUNNING,
            attempt=attempt,
            members=members,
            joined={"0": {"phases_s": {"restore": 0.01}}},
            first_step=restore_step + 1,
        )

    def run(self, attempt: int, first: int, last: int) -> None:
        """Add the steps `first` to `last`, each with its row and digest."""
        self.step = last
        for step in range(first, last + 1):
            self.rows.append(row(attempt, step))
            self.digests[step] = f"d{step}"

    def train(self, steps: int) -> None:
        """Form the first attempt and make `steps` steps."""
        self.form(1)
        self.enter(Phase.RUNNING)
        self.run(1, 1, steps)

    def end(self, outcome: str = "SUCCEEDED", code: str = "succeeded", **data: Any) -> None:
        self.phase = Phase.ENDED
        outcome_data = {"message": "", "traceback": None, "step": self.known_step, **data}
        self.emit(EventKind.ENDED, outcome=outcome, code=code, **outcome_data)

    def stop(self, order: StopOrder) -> None:
        outcome = {StopKind.CANCEL: "CANCELLED", StopKind.PAUSE: "PAUSED"}[order.kind]
        self.end(outcome, outcome.lower(), message=order.reason)

    def inject(self, number: int, fault: dict[str, Any]) -> None:
        self.wanted_faults.append((number, fault))

    def report(self, cursors: Cursors) -> SupervisorReport:
        rows = [r for r in self.rows if (r.attempt, r.step) > cursors.row][: self.rows_per_poll]
        logs = [x for x in self.logs if x.seq > cursors.logs.get(f"{x.agent}.{x.incarnation}", 0)]
        return SupervisorReport(
            epoch=self.epoch,
            phase=self.phase,
            step=self.known_step,
            attempt=self.attempt,
            avoided=self.avoids,
            size=self.size,
            events=tuple(event for event in self.events if event.seq > cursors.event),
            rows=tuple(rows),
            digests={r.step: self.digests[r.step] for r in rows if r.step in self.digests},
            logs=tuple(logs),
            beats=tuple(self.beats),
            start=self.start,
            build=self.build,
        )


class FakeCluster:
    """Implements `supervisor_protocol.Cluster`; counts the calls and fails on request."""

    def __init__(self, capacity: Capacity | None = None) -> None:
        self.nodes = capacity or three_nodes()
        self.supervisors: dict[str, FakeSupervisor] = {}
        self.starts: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.inspected: list[InspectedNode] = []
        self.looks = 0  # number of searches for present jobs
        self.releases: Counter[str] = Counter()
        self.unreachable = False
        self.paths: set[str] = set()  # of files that the nodes have
        self.packages: PackagesAnswer | None = None  # None: no node answers
        self.installations = 0
        self.asked_for: list[GrowthRequest] = []  # of its autoscaler
        self.tells = False  # whether supervisors tell news
        self.token_sets: tuple[SourceProgress, ...] | None = None  # None: being listed
        self.samples = SamplesAnswer()
        self.sources_asked: list[SourceRequest] = []
        self.weights: WeightsProgress | None = None  # None: its configuration is being read
        self.weights_asked: list[WeightsRequest] = []
        self.refuses_faults = False
        self.silent: set[str] = set()  # jobs whose supervisor does not answer
        self.poison: set[str] = set()  # jobs whose poll raises an unexpected error
        self.sticky: set[str] = set()  # jobs whose release never completes
        self.refusal: LaunchRefused | None = None  # of every job that has no supervisor yet

    async def capacity(self) -> Capacity:
        self._reach()
        return self.nodes

    async def ask_for_nodes(
        self, requests: Collection[GrowthRequest], may_start: Collection[str]
    ) -> None:
        self._reach()
        self.asked_for = [*requests]

    async def look_for_path(self, source: str, folder: bool, timeout_s: float) -> PathAnswer:
        self._reach()
        return PathAnswer("10.0.0.1", source in self.paths)

    async def install_packages(
        self, requirements: Sequence[str], timeout_s: float, avoid: Collection[str] = ()
    ) -> PackagesAnswer:
        self._reach()
        self.installations += 1
        if self.packages is None:
            await asyncio.sleep(timeout_s)
            raise ClusterUnavailable("the node does not answer")
        return self.packages

    async def prepare_tokens(self, requests: Sequence[SourceRequest]) -> tuple[SourceProgress, ...]:
        self._reach()
        self.sources_asked = [*requests]
        begun = tuple(SourceProgress(request.source.path) for request in requests)
        return begun if self.token_sets is None else self.token_sets

    async def prepare_weights(self, request: WeightsRequest) -> WeightsProgress:
        self._reach()
        self.weights_asked.append(request)
        return self.weights or WeightsProgress(request.folder)

    async def read_samples(self, spec: JobSpec, count: int) -> SamplesAnswer:
        self._reach()
        return replace(self.samples, samples=self.samples.samples[:count])

    async def ensure_supervisor(self, launch: JobPlan) -> bool:
        self._reach()
        self.asked[launch.job_id] += 1
        if launch.job_id in self.supervisors:
            return False
        if self.refusal is not None:
            raise self.refusal
        self.supervisors[launch.job_id] = FakeSupervisor(launch)
        self.starts[launch.job_id] += 1
        return True

    async def poll(self, job_id: str, cursors: Cursors) -> SupervisorReport:
        self._reach()
        if job_id in self.poison:
            raise RuntimeError("an unexpected report")
        return self._supervisor(job_id).report(cursors)

    async def await_news(self, job_id: str, cursors: Cursors, timeout_s: float) -> bool:
        """Only with `tells`; other tests depend on polls alone."""
        self._reach()
        deadline = time.monotonic() + (timeout_s if self.tells else 0.0)
        while time.monotonic() < deadline:
            report = self._supervisor(job_id).report(cursors)
            if report.events or any(row.attempt > cursors.row[0] for row in report.rows):
                return True
            await asyncio.sleep(0.005)
        return False

    async def stop(self, job_id: str, order: StopOrder) -> None:
        self._reach()
        supervisor = self._supervisor(job_id)
        supervisor.orders.append(order)
        if supervisor.obeys and supervisor.phase is not Phase.ENDED:
            supervisor.stop(order)

    async def inject(self, job_id: str, number: int, fault: dict[str, Any]) -> None:
        self._reach()
        if self.refuses_faults:
            raise SupervisorUnavailable("the supervisor refuses faults")
        self._supervisor(job_id).inject(number, fault)

    async def avoid(self, job_id: str, nodes: dict[str, Avoided]) -> None:
        self._reach()
        supervisor = self._supervisor(job_id)
        supervisor.avoided.append(nodes)
        supervisor.avoids = nodes

    async def resize(self, job_id: str, order: SizeOrder) -> None:
        self._reach()
        supervisor = self._supervisor(job_id)
        supervisor.sizes.append(order)
        supervisor.size = order

    async def release(self, job_id: str) -> bool:
        self._reach()
        self.releases[job_id] += 1
        if job_id in self.sticky:
            return False
        self.supervisors.pop(job_id, None)
        return True

    async def inspect(
        self, store: tuple[str, StorageOptions] | None, deadline_s: float
    ) -> list[InspectedNode]:
        self._reach()
        return self.inspected

    async def jobs_present(self) -> set[str]:
        self._reach()
        self.looks += 1
        return set(self.supervisors)

    def _reach(self) -> None:
        if self.unreachable:
            raise ClusterUnavailable("no head answers")

    def _supervisor(self, job_id: str) -> FakeSupervisor:
        if job_id in self.silent or job_id not in self.supervisors:
            raise SupervisorUnavailable(f"no supervisor of {job_id}")
        return self.supervisors[job_id]
