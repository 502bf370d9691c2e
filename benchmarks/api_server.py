"""The server of `benchmarks.api`: a whole control plane over a simulated cluster.

    python -m benchmarks.api_server DATA_DIR DATABASE_URL STEP_S

Everything above the supervisors is real: HTTP, store, reconciler, live hub. A job's supervisor is
an object that forms an attempt of four ranks at once and then makes a step every STEP_S seconds.
EVENTS_PER_S times a second a supervisor has an event; `DATA_DIR/events` gets a line for each: when
it happened (Unix seconds), and the seconds until the reconciler said that it is stored.
The server ends on SIGTERM or when its standard input closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from starlette.types import Scope

from benchmarks.api_token import TOKEN
from holdfast.rest.app import create_app
from holdfast.rest.connections import server_config
from holdfast.rest.http import authentication
from holdfast.rest.local_access import LocalAccess, Principal
from holdfast.rest.services import services_over
from holdfast_service.diagnosis.node_faults import InspectedNode
from holdfast_service.embedded_cluster import process_priority
from holdfast_service.job_model.supervisor_protocol import (
    Capacity,
    Cursors,
    EventKind,
    GrowthRequest,
    JobPlan,
    NodeCapacity,
    PackagesAnswer,
    PathAnswer,
    Phase,
    SizeOrder,
    StopKind,
    StopOrder,
    SupervisorEvent,
    SupervisorReport,
    SupervisorUnavailable,
)
from holdfast_service.policy.quarantine import Avoided
from holdfast_service.reconcile.reconciler import Reconciler
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_workers.protocol.messages import Beat, LogLine, StepRow
from holdfast_workers.protocol.processes import StorageOptions

RANKS = 4
EVENTS_PER_S = 5.0
_LINES_AT_ONCE = 10
MOST_ROWS = 50
"""Rows per report; older rows are dropped, as by an agent whose journal is full."""


@dataclass
class SimulatedSupervisor:
    """Derives its steps from the clock."""

    launch: JobPlan
    step_s: float
    began: float = field(default_factory=time.time)
    phase: Phase = Phase.RUNNING
    events: list[SupervisorEvent] = field(default_factory=list)
    _told: asyncio.Event = field(default_factory=asyncio.Event)
    unstored: list[SupervisorEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.attempt = self.launch.last_attempt + 1
        members = [
            {
                "rank": rank,
                "worker": f"n{rank // 2}.{self.launch.job_id[-6:]}.{rank}",
                "agent": f"n{rank // 2}",
                "node_id": f"node{rank // 2}",
                "host": f"10.0.0.{rank // 2}",
                "pid": 100 + rank,
                "role": "worker",
            }
            for rank in range(RANKS)
        ]
        self._emit(
            EventKind.ATTEMPT_FORMING,
            attempt=self.attempt,
            mesh={"dp_shard": RANKS, "tp": 1},
            world_size=RANKS,
            members=members,
            standbys=[],
            restore={"step": 0},
        )
        self._emit(EventKind.ATTEMPT_RUNNING, attempt=self.attempt, members=members, joined={})
        self._emit(EventKind.PHASE, phase=Phase.RUNNING)

    def stop(self, order: StopOrder) -> None:
        if self.phase is Phase.ENDED:
            return
        self.phase = Phase.ENDED
        outcome = {StopKind.CANCEL: "CANCELLED", StopKind.PAUSE: "PAUSED"}[order.kind]
        self._emit(EventKind.ENDED, outcome=outcome, code=outcome.lower(), message=order.reason)

    def report(self, cursors: Cursors) -> SupervisorReport:
        now = time.time()
        step = int((now - self.began) / self.step_s)
        attempt, stored = cursors.row
        after = stored if attempt == self.attempt else 0
        rows = [self._row(number) for number in range(max(after, step - MOST_ROWS) + 1, step + 1)]
        ended = self.phase is Phase.ENDED
        source = f"n0.{self.attempt}"
        lines = () if ended else (self._line(cursors.logs.get(source, 0) + 1, now, step),)
        return SupervisorReport(
            epoch=1,
            phase=self.phase,
            step=step,
            attempt=self.attempt,
            events=tuple(event for event in self.events if event.seq > cursors.event),
            rows=() if ended else tuple(rows),
            digests={} if ended else {row.step: f"{row.step:032x}" for row in rows},
            logs=lines,
            beats=() if ended else self._beats(step, now),
        )

    def happen(self) -> None:
        """Have an event whose way to the store is timed."""
        self._emit(EventKind.STANDBY, agent="n1", state="ready")
        self.unstored.append(self.events[-1])

    async def await_news(self, cursors: Cursors, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.events[-1].seq <= cursors.event:
                    self._told.clear()
                    await self._told.wait()
        return self.events[-1].seq > cursors.event

    def _emit(self, kind: EventKind, **data: Any) -> None:
        seq = self.launch.last_event + len(self.events) + 1
        self.events.append(SupervisorEvent(seq, time.time(), kind, data))
        self._told.set()

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

    def _beats(self, step: int, now: float) -> tuple[Beat, ...]:
        del now
        return tuple(
            Beat(rank, f"w{rank}", 100 + rank, self.attempt, step + 1, "backward", 0, 0.1, 10.0)
            for rank in range(RANKS)
        )


class SimulatedCluster:
    """A cluster of simulated supervisors with capacity for every job."""

    def __init__(self, step_s: float, times: Path) -> None:
        self._step_s = step_s
        self._times = times
        self._supervisors: dict[str, SimulatedSupervisor] = {}

    async def capacity(self) -> Capacity:
        nodes = tuple(NodeCapacity(f"node{n}", f"10.0.0.{n}", 64.0, 8.0) for n in range(8))
        return Capacity(nodes=nodes, can_grow=False, unlimited=True)

    async def ask_for_nodes(
        self, requests: Collection[GrowthRequest], may_start: Collection[str]
    ) -> None:
        """It has no autoscaler."""

    async def look_for_path(self, source: str, folder: bool, timeout_s: float) -> PathAnswer:
        return PathAnswer("10.0.0.1", True)

    async def install_packages(
        self, requirements: Sequence[str], timeout_s: float, avoid: Collection[str] = ()
    ) -> PackagesAnswer:
        return PackagesAnswer("10.0.0.1", tuple(requirements))

    async def ensure_supervisor(self, launch: JobPlan) -> bool:
        if launch.job_id in self._supervisors:
            return False
        self._supervisors[launch.job_id] = SimulatedSupervisor(launch, self._step_s)
        return True

    async def poll(self, job_id: str, cursors: Cursors) -> SupervisorReport:
        self._time_stored(self._of(job_id), cursors)
        return self._of(job_id).report(cursors)

    async def happen_forever(self) -> None:
        rng = random.Random(7)
        while True:
            await asyncio.sleep(rng.expovariate(EVENTS_PER_S))
            supervisors = self._supervisors.values()
            running = [found for found in supervisors if found.phase is Phase.RUNNING]
            if running:
                rng.choice(running).happen()

    def _time_stored(self, supervisor: SimulatedSupervisor, stored: Cursors) -> None:
        while supervisor.unstored and supervisor.unstored[0].seq <= stored.event:
            event = supervisor.unstored.pop(0)
            with self._times.open("a") as file:
                file.write(f"{event.at:.6f} {time.time() - event.at:.6f}\n")

    async def await_news(self, job_id: str, cursors: Cursors, timeout_s: float) -> bool:
        self._time_stored(self._of(job_id), cursors)
        return await self._of(job_id).await_news(cursors, timeout_s)

    async def stop(self, job_id: str, order: StopOrder) -> None:
        self._of(job_id).stop(order)

    async def inject(self, job_id: str, number: int, fault: dict[str, Any]) -> None:
        del job_id, number, fault

    async def avoid(self, job_id: str, nodes: Mapping[str, Avoided]) -> None:
        del job_id, nodes

    async def resize(self, job_id: str, order: SizeOrder) -> None:
        del job_id, order

    async def release(self, job_id: str) -> bool:
        self._supervisors.pop(job_id, None)
        return True

    async def inspect(
        self, store: tuple[str, StorageOptions] | None, deadline_s: float
    ) -> list[InspectedNode]:
        del store, deadline_s
        return []

    async def jobs_present(self) -> set[str]:
        return set(self._supervisors)

    def _of(self, job_id: str) -> SimulatedSupervisor:
        if job_id not in self._supervisors:
            raise SupervisorUnavailable(job_id)
        return self._supervisors[job_id]


def timed(
    check: Callable[[LocalAccess, Scope], Principal | None], file: Path
) -> Callable[[LocalAccess, Scope], Principal | None]:
    """The same check, which also writes when it was made and how long it took, a line for each."""
    lines: list[str] = []

    def timed_check(access: LocalAccess, scope: Scope) -> Principal | None:
        before = time.perf_counter()
        found = check(access, scope)
        lines.append(f"{time.time()} {time.perf_counter() - before}\n")
        if len(lines) == _LINES_AT_ONCE:
            with file.open("a") as out:
                out.writelines(lines)
            lines.clear()
        return found

    return timed_check


async def main(data_dir: Path, database_url: str, step_s: float) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    settings = Settings(
        data_dir=data_dir,
        database_url=database_url,
        check_data_paths=False,
        lease_s=60.0,
    )
    cluster = SimulatedCluster(step_s, data_dir / "events")
    store = await Store.open(settings)
    reconciler = Reconciler(store, cluster, settings)
    stopping = asyncio.Event()
    checks = timed(authentication.principal_of, data_dir / "checks")
    authentication.principal_of = checks  # type: ignore[assignment]
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
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    loop.add_reader(sys.stdin, stopping.set)  # the parent process is gone
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    print(server.servers[0].sockets[0].getsockname()[1], os.getpid(), flush=True)
    await stopping.wait()
    happening.cancel()
    server.should_exit = True
    await serving
    await driving
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
