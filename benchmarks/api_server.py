"""The server of `benchmarks.api`: a whole control plane over a simulated cluster.

Everything above the supervisors is real: HTTP, store, reconciler, live hub. A job's supervisor is
an object that forms an attempt of four ranks at once and then makes a step every `step_s` seconds.
EVENTS_PER_S times a second a supervisor has an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from starlette.types import Scope
from tests.support.service.fake_cluster import FakeCluster, FakeSupervisor

from benchmarks.api_figures import TOKEN
from holdfast.rest.app import create_app
from holdfast.rest.connections import server_config
from holdfast.rest.http import authentication
from holdfast.rest.local_access import LocalAccess, Principal
from holdfast.rest.services import services_over
from holdfast_service.embedded_cluster import process_priority
from holdfast_service.job_model.supervisor_protocol import (
    Capacity,
    Cursors,
    EventKind,
    JobPlan,
    NodeCapacity,
    Phase,
    SupervisorEvent,
    SupervisorReport,
)
from holdfast_service.reconcile.reconciler import Reconciler
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_workers.protocol.messages import Beat, LogLine, StepRow

RANKS = 4
EVENTS_PER_S = 5.0
MOST_ROWS = 50
"""Rows per report; older rows are dropped, as by an agent whose journal is full."""

Times = list[tuple[float, float]]


@dataclass
class SimulatedSupervisor(FakeSupervisor):
    """Derives its steps from the clock."""

    step_s: float = 1.0
    began: float = field(default_factory=time.time)
    unstored: list[SupervisorEvent] = field(default_factory=list)
    _told: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.form(self.launch.last_attempt + 1, mesh={"dp_shard": RANKS, "tp": 1})
        self.enter(Phase.RUNNING)

    def emit(self, kind: EventKind, at: float | None = None, **data: Any) -> None:
        super().emit(kind, time.time() if at is None else at, **data)
        self._told.set()

    def report(self, cursors: Cursors) -> SupervisorReport:
        now = time.time()
        self.step = step = int((now - self.began) / self.step_s)
        if self.phase is not Phase.ENDED:
            attempt, stored = cursors.row
            after = stored if attempt == self.attempt else 0
            first = max(after, step - MOST_ROWS) + 1
            self.rows = [self._row(number) for number in range(first, step + 1)]
            self.digests = {row.step: f"{row.step:032x}" for row in self.rows}
            seq = cursors.logs.get(f"n0.{self.attempt}", 0) + 1
            self.logs = [self._line(seq, now, step)]
            self.beats = [
                Beat(rank, f"w{rank}", 100 + rank, self.attempt, step + 1, "backward", 0, 0.1, 10.0)
                for rank in range(RANKS)
            ]
        return super().report(cursors)

    def happen(self) -> None:
        """Have an event whose way to the store is timed."""
        self.emit(EventKind.STANDBY, agent="n1", state="ready")
        self.unstored.append(self.events[-1])

    async def await_news(self, cursors: Cursors, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.events[-1].seq <= cursors.event:
                    self._told.clear()
                    await self._told.wait()
        return self.events[-1].seq > cursors.event

    def _row(self, step: int) -> StepRow:
        return StepRow(
            attempt=self.attempt,
            step=step,
            at=self.began + step * self.step_s,
            loss=3.0 / (1 + step / 100),
            grad_norm=0.5,
            lr=3e-4,
            tokens=65536,
            step_time_s=self.step_s * 0.98,
            loader_wait_s=0.001,
            samples=f"{step:016x}",
            compute_s=(self.step_s * 0.9,) * RANKS,
        )

    def _line(self, seq: int, now: float, step: int) -> LogLine:
        text = f"INFO step {step} done, loss {3.0 / (1 + step / 100):.4f}"
        return LogLine("n0", str(self.attempt), seq, now, "n0.a.0", self.attempt, 0, "stdout", text)


class TimedCluster(FakeCluster):
    """A cluster of simulated supervisors with capacity for every job."""

    def __init__(self, step_s: float) -> None:
        nodes = tuple(NodeCapacity(f"node{n}", f"10.0.0.{n}", 64.0, 8.0) for n in range(8))
        super().__init__(Capacity(nodes=nodes, can_grow=False, unlimited=True))
        self._step_s = step_s
        self.stored: Times = []
        """Of each event: when it happened, and the seconds until it was known to be stored."""
        self._simulated: dict[str, SimulatedSupervisor] = {}

    async def ensure_supervisor(self, launch: JobPlan) -> bool:
        if launch.job_id in self.supervisors:
            return False
        simulated = SimulatedSupervisor(launch, step_s=self._step_s)
        self.supervisors[launch.job_id] = self._simulated[launch.job_id] = simulated
        return True

    async def poll(self, job_id: str, cursors: Cursors) -> SupervisorReport:
        self._time_stored(job_id, cursors)
        return await super().poll(job_id, cursors)

    async def await_news(self, job_id: str, cursors: Cursors, timeout_s: float) -> bool:
        self._time_stored(job_id, cursors)
        self._supervisor(job_id)
        return await self._simulated[job_id].await_news(cursors, timeout_s)

    async def happen_forever(self) -> None:
        rng = random.Random(7)
        while True:
            await asyncio.sleep(rng.expovariate(EVENTS_PER_S))
            running = [job for job, of in self.supervisors.items() if of.phase is Phase.RUNNING]
            if running:
                self._simulated[rng.choice(running)].happen()

    def _time_stored(self, job_id: str, stored: Cursors) -> None:
        self._supervisor(job_id)
        unstored = self._simulated[job_id].unstored
        while unstored and unstored[0].seq <= stored.event:
            event = unstored.pop(0)
            self.stored.append((event.at, time.time() - event.at))


def timed_checks() -> Times:
    """When each check of a request's token was made from now on, and how long it took."""
    times: Times = []
    check = authentication.principal_of

    def timed(access: LocalAccess, scope: Scope) -> Principal | None:
        before = time.perf_counter()
        found = check(access, scope)
        times.append((time.time(), time.perf_counter() - before))
        return found

    authentication.principal_of = timed
    return times


def serve(connection: Connection, data_dir: Path, database_url: str, step_s: float) -> None:
    """Send the port; answer each message with the times of stored events and of checks. End when
    the connection does."""
    asyncio.run(_serve(connection, data_dir, database_url, step_s))


async def _serve(connection: Connection, data_dir: Path, database_url: str, step_s: float) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    settings = Settings(
        data_dir=data_dir,
        database_url=database_url,
        check_data_paths=False,
        lease_s=60.0,
    )
    cluster = TimedCluster(step_s)
    store = await Store.open(settings)
    reconciler = Reconciler(store, cluster, settings)
    stopping = asyncio.Event()
    checks = timed_checks()
    services = replace(
        services_over(store, cluster, settings, reconciler.wake),
        stopping=stopping,
        access=LocalAccess(TOKEN),
    )
    config = server_config(create_app(services), host="127.0.0.1", port=0, backlog=4096)
    server = uvicorn.Server(config)
    process_priority.collect_garbage_rarely()  # as `holdfast serve` does
    driving = asyncio.create_task(reconciler.run(stopping))
    serving = asyncio.create_task(server.serve())
    happening = asyncio.create_task(cluster.happen_forever())
    loop = asyncio.get_running_loop()

    def answer() -> None:
        try:
            connection.recv()
            connection.send((cluster.stored, checks))
        except EOFError:
            loop.remove_reader(connection.fileno())
            stopping.set()

    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    connection.send(server.servers[0].sockets[0].getsockname()[1])
    loop.add_reader(connection.fileno(), answer)
    await stopping.wait()
    happening.cancel()
    server.should_exit = True
    await serving
    await driving
    await store.close()
