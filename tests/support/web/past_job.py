"""Writes the past of a job into the store as a server would have stored it, report by report.

Every report goes through `store_report`, with the time at which it came. A job that is still alive
then gets a supervisor in the cluster of the tests, which a reconciler finds and polls: its state
stays live for as long as the server runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from tests.support.service.fake_cluster import FakeSupervisor
from tests.support.service.live_server import LiveServer
from tests.support.web import seed_series
from tests.support.web.seed_events import queued_job

from holdfast_service.job_model.attempt_parts import JoinTimes, StandbyAgent
from holdfast_service.job_model.events.attempts import (
    AttemptEndedEvent,
    AttemptFormingEvent,
    AttemptRunningEvent,
    ProgramAttachedEvent,
    ProgramResumedEvent,
    RestorePlan,
    SeatedRank,
)
from holdfast_service.job_model.events.checkpoints import CheckpointSavedEvent
from holdfast_service.job_model.events.codec import numbered
from holdfast_service.job_model.events.incidents import (
    IncidentClosedEvent,
    IncidentOpenedEvent,
    IncidentRecord,
)
from holdfast_service.job_model.events.kinds import JobEvent
from holdfast_service.job_model.events.progress import (
    EndedEvent,
    JobReleasedEvent,
    PhaseEvent,
    SupervisorStartedEvent,
)
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import Phase, State
from holdfast_service.job_model.supervisor_protocol import (
    Cursors,
    JobPlan,
    StartWait,
    SupervisorReport,
)
from holdfast_service.policy.quarantine import QuarantineRules
from holdfast_service.store.engine import Store
from holdfast_service.store.projection import store_report
from holdfast_service.store.transaction import Effect, job_transaction
from holdfast_workers.protocol.messages import Beat, LogLine, StepRow

START_S = 9.0
"""From the first order of an attempt to its first step."""


@dataclass
class PastJob:
    """A job at the moment `at` of its past; each call moves it on."""

    store: Store
    spec: JobSpec
    at: float
    hosts: Sequence[str] = ()
    """The machines of its ranks, in order."""
    standbys: Sequence[str] = ()
    mesh: Mapping[str, int] = field(default_factory=dict)
    step_s: float = 1.0
    reports: frozenset[str] = frozenset({"loss", "grad_norm", "lr", "tokens"})
    """The measurements that its rows have."""
    id: str = ""
    phase: Phase = Phase.STARTING
    attempt: int = 0
    step: int | None = None
    incidents: int = 0
    _events: int = 0
    _lines: int = 0

    async def submit(self) -> None:
        self.id = await queued_job(self.store, self.spec, self.at)

    async def start(self, waited_s: float = 3.0) -> None:
        """It is admitted, and its supervisor is started."""
        self.at += waited_s
        async with job_transaction(self.store, self.id, now=self.at) as tx:
            await tx.record_intent(Effect.START)
            tx.transition(State.STARTING)
            intent = await tx.record_done(Effect.START)
            tx.emit(SupervisorStartedEvent(created=True, times=intent.times))

    async def form(self, restored: int = 0, incident: int | None = None) -> None:
        """The next attempt is announced."""
        self.attempt += 1
        await self.report(
            AttemptFormingEvent(
                attempt=self.attempt,
                mesh=self.mesh,
                world_size=self.ranks,
                members=self.members(),
                standbys=tuple(
                    StandbyAgent(agent=f"s{n}", node_id=f"ray-{host}", host=host)
                    for n, host in enumerate(self.standbys)
                ),
                restore=RestorePlan(step=restored, is_own=self.spec.brings_program),
                cause_incident=incident,
            )
        )

    async def run(
        self, first: int | None = None, took_s: float = START_S, level: int = 0, plugin: str = ""
    ) -> None:
        """The announced attempt runs; its first step is `first`. `level`: of a program."""
        self.at += took_s
        joined = JoinTimes(phases_s={"rendezvous": 0.4, "build": 1.9, "restore": 0.2})
        running = AttemptRunningEvent(
            attempt=self.attempt,
            members=self.members(),
            joined=dict.fromkeys(range(self.ranks), joined),
            first_step=first,
        )
        attached = [
            ProgramAttachedEvent(attempt=self.attempt, level=level, integration=plugin)
        ] * bool(level)
        await self.enter(Phase.RUNNING, running, *attached)

    async def enter(self, phase: Phase, *events: JobEvent) -> None:
        self.phase = phase
        await self.report(*events, PhaseEvent(phase=phase))

    async def train(self, steps: int) -> None:
        """Make so many steps, and report all of them."""
        first, since = (self.step or 0) + 1, self.at
        self.at += steps * self.step_s
        self.step = first + steps - 1
        rows = [self.row(first + n, since + (n + 1) * self.step_s) for n in range(steps)]
        await self.report(rows=rows)

    async def write(self, lines: Sequence[str], every_s: float = 0.4, rank: int = 0) -> None:
        """A rank writes lines. `every_s`: the time between two; they end now."""
        begun = self.at - every_s * len(lines)
        per_node = self.spec.resources.workers_per_node
        logged = [
            LogLine(
                agent=f"n{rank // per_node}",
                incarnation="a",
                seq=self._lines + n,
                at=begun + every_s * n,
                worker=f"n{rank // per_node}.a.{rank}",
                attempt=self.attempt,
                rank=rank,
                stream="stdout",
                text=text,
            )
            for n, text in enumerate(lines, 1)
        ]
        self._lines += len(lines)
        await self.report(logs=logged)

    async def save(self, folder: str, nbytes: int) -> None:
        """The state of the present step is durable."""
        step = self.step or 0
        await self.report(
            CheckpointSavedEvent(
                step=step,
                attempt=self.attempt,
                uri=f"{folder}/step-{step:08d}.{self.attempt}",
                nbytes=nbytes,
                mesh=self.mesh,
                metrics={"loss": round(self.row(step, self.at).loss, 4)},
            )
        )

    async def fail(self, record: IncidentRecord, phase: Phase = Phase.RECOVERING) -> IncidentRecord:
        """A fault ends the attempt; the incident stays open. Returns it with its numbers."""
        self.incidents += 1
        opened = replace(
            record,
            incident=self.incidents,
            causes=(record.cause,),
            attempt=self.attempt,
            next_attempt=self.attempt + 1,
            failures=(self.at,) * (record.cause != "resize"),
            lost=tuple(replace(item, attempt=self.attempt) for item in record.lost),
            signalled_at=self.at,
            opened_at=self.at,
        )
        ended = AttemptEndedEvent(
            attempt=self.attempt, reason=record.evidence[0], last_step=self.step
        )
        await self.enter(phase, IncidentOpenedEvent(record=opened), ended)
        return opened

    async def recover(self, opened: IncidentRecord, level: int = 0, plugin: str = "") -> None:
        """The next attempt runs, and closes the incident."""
        restored = opened.restored_step
        await self.form(restored or 0, opened.incident)
        took_s = sum(opened.phases_s.values())
        if restored is not None:
            self.step = restored
        await self.run(None if restored is None else restored + 1, took_s, level, plugin)
        if self.spec.brings_program and restored is not None:
            await self.report(
                ProgramResumedEvent(
                    attempt=self.attempt,
                    restored_step=restored,
                    first_step=restored + 1,
                    steps_lost=opened.steps_lost,
                )
            )
        closed = replace(
            opened,
            phases_s={**opened.phases_s, "total": took_s},
            closed_at=self.at,
            joined_attempt=self.attempt,
            resolution=f"attempt {self.attempt} runs",
        )
        await self.report(IncidentClosedEvent(record=closed))

    async def end(
        self, outcome: State, code: str, message: str, traceback: str | None = None
    ) -> None:
        """It ends, and leaves the cluster."""
        self.phase = Phase.ENDED
        await self.report(
            EndedEvent(
                outcome=outcome, code=code, message=message, traceback=traceback, step=self.step
            )
        )
        async with job_transaction(self.store, self.id, now=self.at + 1) as tx:
            await tx.record_done(Effect.RELEASE)
            tx.emit(JobReleasedEvent())
            tx.job.cleaned = True

    async def report(
        self,
        *events: JobEvent,
        rows: Sequence[StepRow] = (),
        logs: Sequence[LogLine] = (),
    ) -> None:
        """Store what its supervisor reports now."""
        begin, self._events = self._events + 1, self._events + len(events)
        report = SupervisorReport(
            epoch=1,
            phase=self.phase,
            step=self.step,
            attempt=self.attempt,
            events=tuple(numbered(begin + n, self.at, event) for n, event in enumerate(events)),
            rows=tuple(rows),
            logs=tuple(logs),
            beats=self.beats("forward") if rows else (),
        )
        async with job_transaction(self.store, self.id, now=self.at) as tx:
            await store_report(tx, report, QuarantineRules(), hold_end=False)

    def live(
        self, server: LiveServer, phase: str = "forward", start: StartWait | None = None
    ) -> FakeSupervisor:
        """Its supervisor from now on. It goes on with the steps that the job has reported, unless
        the job starts."""
        plan = JobPlan(
            job_id=self.id,
            spec=self.spec,
            last_event=self._events,
            last_attempt=self.attempt,
            last_incident=self.incidents,
        )
        supervisor = TrainingSupervisor(plan, phase=self.phase, attempt=self.attempt, start=start)
        if self.phase is Phase.RUNNING and self.step is not None:
            supervisor.past = self
        supervisor.step = self.step or 0
        supervisor.beats = list(self.beats(phase))
        server.cluster.supervisors[self.id] = supervisor
        return supervisor

    @property
    def ranks(self) -> int:
        return prod(self.mesh.values())

    def members(self) -> tuple[SeatedRank, ...]:
        per_node = self.spec.resources.workers_per_node
        return tuple(
            SeatedRank(
                rank=rank,
                worker=f"n{rank // per_node}.a.{rank}",
                agent=f"n{rank // per_node}",
                incarnation="a",
                node_id=f"ray-{self.hosts[rank // per_node]}",
                host=self.hosts[rank // per_node],
                pid=4100 + rank,
                role="first" if self.attempt == 1 else "kept",
            )
            for rank in range(self.ranks)
        )

    def beats(self, phase: str) -> tuple[Beat, ...]:
        return tuple(
            Beat(
                rank=seat.rank,
                worker=seat.worker or "",
                pid=seat.pid or 0,
                attempt=self.attempt,
                step=(self.step or 0) + bool(self.reports and self.step is not None),
                phase=phase,
                micro_batch=0,
                age_s=0.02 + 0.01 * (seat.rank % 3),
                limit_s=4.2,
            )
            for seat in self.members()
        )

    def row(self, step: int, at: float) -> StepRow:
        made = seed_series.row(self.attempt, step, at)
        compute_s = tuple(
            0.8 * self.step_s * (1 + 0.03 * math.sin(7 * rank + step / 9))
            for rank in range(self.ranks)
        )
        is_program, has = self.spec.brings_program, self.reports
        return replace(
            made,
            loss=made.loss if "loss" in has else math.nan,
            grad_norm=made.grad_norm if "grad_norm" in has else math.nan,
            lr=made.lr if "lr" in has else math.nan,
            tokens=524_288 if "tokens" in has else 0,
            step_time_s=0.97 * self.step_s,
            compute_s=compute_s,
            loader_wait_s=0.0 if is_program else made.loader_wait_s,
            checkpoint_wait_s=0.0 if is_program else made.checkpoint_wait_s,
            protected_step=-1 if is_program else made.protected_step,
        )


@dataclass
class TrainingSupervisor(FakeSupervisor):
    """Makes the steps of a job as its time passes, once it has one."""

    past: PastJob | None = None

    def report(self, cursors: Cursors) -> SupervisorReport:
        job = self.past
        while job is not None and not self.orders and job.at + job.step_s <= time.time():
            job.at += job.step_s
            self.step += 1
            self.rows.append(job.row(self.step, job.at))
            self.beats = [replace(beat, step=self.step + 1) for beat in self.beats]
        return super().report(cursors)
