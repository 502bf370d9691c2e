"""A job under a real supervisor on local agents: the whole recovery, without Ray or REST.

`SupervisedRun` starts the job, collects its events, causes real faults, and returns the outcome.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.nodes.local_agents import LocalAgents
from tests.support.ranks import may_end
from tests.support.simulation.core_config import core_config

from holdfast_service.job_model.supervisor_protocol import (
    Cursors,
    EventKind,
    StopKind,
    StopOrder,
    SupervisorEvent,
    is_next_event,
)
from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.supervisor.fence_record import FenceRecord, open_fence
from holdfast_service.supervisor.supervisor import Supervisor
from holdfast_service.supervisor.supervisor_times import SupervisorTimes
from holdfast_workers.checkpoint.fence_objects import FenceFloor
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.fault_injection.kinds import Injection
from holdfast_workers.ipc.environment import PASSED_ON_VARIABLE
from holdfast_workers.ipc.linux_processes import identify
from holdfast_workers.protocol.answers import WorkerReport
from holdfast_workers.protocol.messages import StepRow
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.spec import (
    CheckpointSpec,
    MemoryTierSpec,
    ModelSpec,
    ParallelSpec,
    RemoteTierSpec,
    ScheduleSpec,
    TrainingSpec,
    TrainSpec,
)

MICRO_BATCH = 2


def small_training(
    steps: int = 20, *, blocks: int = 1, micro_batches: int = 1, **changes: Any
) -> TrainingSpec:
    """A job of four ranks whose step takes some 25 ms on two cores: the step time determines the
    time of most recovery tests. `micro_batches`: number per rank and step."""
    parallel: ParallelSpec = changes.pop("parallel", ParallelSpec(dp_shard=2, tp=2))
    shares = parallel.dp_replicate * parallel.dp_shard
    fields: dict[str, Any] = {
        "model": ModelSpec(dim=64, layers=blocks, heads=4, kv_heads=2, sequence_length=64),
        "train": TrainSpec(
            steps=steps,
            global_batch=MICRO_BATCH * micro_batches * shares,
            micro_batch=MICRO_BATCH,
            schedule=ScheduleSpec(warmup_steps=5),
        ),
        "parallel": parallel,
        "checkpoint": CheckpointSpec(
            memory=MemoryTierSpec(every_steps=1), remote=RemoteTierSpec(every_steps=0, keep=3)
        ),
        **changes,
    }
    return TrainingSpec(**fields)


@contextmanager
def small_agents(folder: Path, seats: int = 1, **options: Any) -> Iterator[LocalAgents]:
    """Agents of a job of one rank, which `ensure` starts."""
    training = small_training(parallel=ParallelSpec())
    dump, mesh = training.model_dump(mode="json"), training.parallel.mesh
    agents = LocalAgents(seats, dump, mesh, 1, folder / "checkpoints", **options)
    try:
        yield agents
    finally:
        agents.close()


class SupervisedRun:
    """A job, its agents and its supervisor. `kill` sends real signals."""

    def __init__(
        self,
        folder: Path,
        training: TrainingSpec,
        *,
        standbys: int = 1,
        workers_per_node: int = 2,
        chaos: list[dict[str, Any]] | None = None,
        config: dict[str, Any] | None = None,
        resumes: SupervisedRun | None = None,
        remote: str | None = None,
        storage: StorageOptions | None = None,
        agents: type[LocalAgents] = LocalAgents,
        times: SupervisorTimes | None = None,
        **agent_config: Any,
    ) -> None:
        """`resumes`: continues that run from its remote checkpoints and history, on other nodes."""
        self.training = training
        self.folder = folder
        self.remote_root = folder / "job" / "checkpoints"
        storage = storage or StorageOptions()
        self.remote = open_storage(remote or str(self.remote_root), storage)
        self.fence = open_fence(self.remote.uri, storage)
        usual = {
            "shapes": (WorldShape.of(training.parallel.mesh, workers_per_node),),
            "standby_nodes": standbys,
            "standby_wait_s": 20.0,
        }
        self._config = core_config(training=training, **{**usual, **(config or {})})
        plan = folder / "chaos.json"
        plan.write_text(json.dumps(chaos or []))
        os.environ["HOLDFAST_CHAOS"] = str(plan)
        os.environ[PASSED_ON_VARIABLE] = "HOLDFAST_TEST_*,HOLDFAST_BENCH_*"
        may_end.forbid(folder / "may-end")
        self._times = times or SupervisorTimes(poll_s=0.1)
        self.agents = agents(
            self._config.best_shape.nodes + standbys,
            training.model_dump(mode="json"),
            training.parallel.mesh,
            workers_per_node,
            self.remote_root,
            remote=self.remote.uri,
            storage=storage,
            **agent_config,
        )
        self.cursors: Cursors = resumes.cursors if resumes else Cursors()
        self.events: list[SupervisorEvent] = list(resumes.events) if resumes else []
        self.rows: dict[int, StepRow] = dict(resumes.rows) if resumes else {}
        self.all_rows: list[StepRow] = list(resumes.all_rows) if resumes else []
        self.digests: dict[int, str] = dict(resumes.digests) if resumes else {}
        self.logs: list[str] = []
        self._injected = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self.cluster_answers = True
        self.supervisor = self._supervise()

    def _supervise(self) -> Supervisor:
        # It stands for the supervisor's process: the supervisor is a thread of this one.
        process = subprocess.Popen(["sleep", "infinity"])
        self._processes.append(process)
        event, attempt = self.cursors.event, self.cursors.row[0]
        plan = replace(self._config.plan, last_event=event, last_attempt=attempt)
        supervisor = Supervisor(
            replace(self._config, plan=plan),
            self.agents,
            self.agents.secret,
            self.remote,
            self.fence,
            is_latest=lambda: self.supervisor is supervisor if self.cluster_answers else None,
            times=self._times,
            process=identify(process.pid),
            kill_self=lambda: threading.Thread(target=self._die, args=(supervisor,)).start(),
        )
        self.agents.on_signal = supervisor.signal
        threading.Thread(target=supervisor.run, daemon=True).start()
        return supervisor

    def lose_supervisor(self) -> None:
        """End the supervisor without cleanup; its successor has only the agents' and the files'
        state."""
        self.end_supervisor()
        self.start_supervisor()

    def end_supervisor(self) -> None:
        """End it; the job is without one until `start_supervisor`."""
        self.agents.on_signal = lambda _: None
        self.supervisor.halt()
        self._end_processes()

    def start_supervisor(self) -> None:
        self.supervisor = self._supervise()

    def _die(self, supervisor: Supervisor) -> None:
        """End this supervisor; as on Ray, only the latest gets a successor."""
        if supervisor is self.supervisor:
            self.lose_supervisor()
        else:
            supervisor.halt()

    def close(self) -> None:
        for name in ("HOLDFAST_CHAOS", PASSED_ON_VARIABLE, may_end.VARIABLE):
            os.environ.pop(name, None)
        self.supervisor.halt()
        self.agents.close()
        self._end_processes()

    def _end_processes(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    # --- observing --------------------------------------------------------------------------------

    def poll(self) -> None:
        """Fetch events, rows and logs as the reconciler does."""
        report = self.supervisor.report(self.cursors)
        self.events.extend(report.events)
        for event in report.events:
            if event.kind == EventKind.ATTEMPT_FORMING:  # it computes the later steps again
                restored = event.data["restore"]["step"]
                self.digests = {s: d for s, d in self.digests.items() if s <= restored}
        for row in report.rows:
            self.rows[row.step] = row
            self.all_rows.append(row)
        self.digests.update(report.digests)
        self.logs.extend(line.text for line in report.logs)
        logs = dict(self.cursors.logs)
        for line in report.logs:
            logs[f"{line.agent}.{line.incarnation}"] = line.seq
        last = report.rows[-1] if report.rows else None
        self.cursors = Cursors(
            event=self.events[-1].seq if self.events else 0,
            row=(last.attempt, last.step) if last else self.cursors.row,
            logs=logs,
        )

    def wait(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Poll until `condition` holds; the error contains the run's story."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.poll()
            if condition():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"condition not met in {timeout_s} s\n{self.story()}")
            time.sleep(0.01)

    def wait_step(self, step: int, timeout_s: float = 60.0) -> None:
        self.wait(lambda: step in self.rows, timeout_s)

    def wait_end(self, timeout_s: float = 120.0) -> dict[str, Any]:
        """The data of the ENDED event, and all rows and digests gathered."""
        may_end.allow()
        self.wait(lambda: bool(self.of(EventKind.ENDED)), timeout_s)
        for _ in range(3):
            self.poll()
        return self.of(EventKind.ENDED)[-1]

    def stop(self, kind: StopKind, within_s: float = 60.0) -> None:
        """Send a stop order as the reconciler does."""
        order = StopOrder(kind, "requested by the test", time.time() + within_s)
        self.supervisor.stop(order)

    def has_all_events(self) -> bool:
        """Whether no event is missing among those of each supervisor."""
        numbers = [0, *(event.seq for event in self.events)]
        return all(is_next_event(new, last) for last, new in pairwise(numbers))

    def of(self, kind: EventKind) -> list[dict[str, Any]]:
        return [event.data for event in self.events if event.kind == kind]

    def workers(self) -> dict[int, tuple[str, WorkerReport]]:
        """(seat, worker) by rank, of the newest attempt."""
        found: dict[int, tuple[str, WorkerReport]] = {}
        for seat in self.agents.seats:
            try:
                report = self.agents.report(seat, 5.0)
            except Exception:
                continue
            for worker in report.workers:
                if worker.rank is not None and worker.attempt == report.attempt:
                    found[worker.rank] = (seat, worker)
        return found

    def fence_floor(self) -> FenceFloor:
        """The fence as a further supervisor would read it."""
        fence = FenceRecord(self.fence)
        floor = fence.read(60.0)
        fence.close()
        assert floor is not None
        return floor

    def phases(self) -> set[str]:
        """The phases of all ranks, as last reported."""
        return {beat.phase for beat in self.supervisor.report(self.cursors).beats}

    def newest_step(self) -> int:
        """The newest step of the rows fetched so far; 0 without rows."""
        return max(self.rows, default=0)

    def pids(self) -> dict[int, int]:
        return {rank: worker.pid for rank, (_, worker) in self.workers().items()}

    def member(self, rank: int) -> dict[str, Any]:
        """The rank of the newest attempt that ran. Asks no agent: one that starts answers late."""
        self.poll()
        members = self.of(EventKind.ATTEMPT_RUNNING)[-1]["members"]
        return next(member for member in members if member["rank"] == rank)

    def seat_of(self, rank: int) -> str:
        return str(self.member(rank)["agent"])

    def story(self) -> str:
        lines = [f"{e.seq} {e.at:.3f} {e.kind} {json.dumps(e.data)[:1500]}" for e in self.events]
        return "\n".join([*lines, *self.logs[-40:]])

    # --- faults -----------------------------------------------------------------------------------

    def kill(self, *ranks: int) -> None:
        for pid in [self.member(rank)["pid"] for rank in ranks]:
            os.kill(pid, signal.SIGKILL)

    def inject(self, kind: str, **options: Any) -> int:
        """Inject a fault as the reconciler does; returns the fault's number."""
        self._injected += 1
        self.supervisor.inject(self._injected, Injection.of({"kind": kind, **options}))
        return self._injected


@contextmanager
def supervised(folder: Path, training: TrainingSpec, **options: Any) -> Iterator[SupervisedRun]:
    run = SupervisedRun(folder, training, **options)
    try:
        yield run
    finally:
        run.close()
