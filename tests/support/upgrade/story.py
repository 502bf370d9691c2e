"""Jobs in every state, as the services, the recovery core and the store of this version write them.

The recovery core runs on the simulated cluster, so the events are its own. Clock, ids and seeds are
fixed: two runs write the same database.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.service.event_examples import recorded
from tests.support.service.fake_cluster import FakeCluster, line, row
from tests.support.simulation.simulated_agent import SimAgent
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_network import START

from holdfast_service.job_model.events.codec import decode
from holdfast_service.job_model.events.progress import SupervisorStartedEvent
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import Phase, State, StopKind, StopOrder
from holdfast_service.job_model.supervisor_protocol import (
    EventKind,
    JobPlan,
    NodeCapacity,
    SupervisorEvent,
    SupervisorReport,
)
from holdfast_service.policy.quarantine import QuarantineRules
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.services.code_packages import CodeService
from holdfast_service.services.fault_injection import InjectionService
from holdfast_service.services.jobs import JobService
from holdfast_service.services.nodes import NodeService
from holdfast_service.settings import Settings
from holdfast_service.store import nodes
from holdfast_service.store.engine import Store
from holdfast_service.store.models import LeaseOwner
from holdfast_service.store.projection import store_report
from holdfast_service.store.transaction import Effect, job_transaction
from holdfast_workers import build
from holdfast_workers.checkpoint.manifest import checkpoint_folder
from holdfast_workers.protocol.commands import TidyRemoteTier
from holdfast_workers.protocol.messages import Beat
from holdfast_workers.protocol.signals import RetentionDone

STEPS = 12
SPEC: dict[str, Any] = {
    "data": {"source": "/corpus"},
    "model": {"dim": 8, "layers": 1, "heads": 2, "kv_heads": 1, "sequence_length": 16},
    "train": {
        "steps": STEPS,
        "global_batch": 4,
        "micro_batch": 2,
        "seed": 11,
        "schedule": {"name": "constant", "warmup_steps": 2},
    },
    "parallel": {"dp_shard": 2},
    "resources": {"workers_per_node": 1, "standby_nodes": 1},
    "checkpoint": {"remote": {"every_steps": 4, "keep": 1}},
    "labels": {"owner": "ada"},
}
CODE_DATE = (2026, 11, 23, 0, 0, 0)
_REPORTED = (
    EventKind.GUARD_TRIPPED,
    EventKind.STRAGGLER,
    EventKind.CHECKPOINT_INTERVAL,
    EventKind.NODE_HEALTH,
)
"""Kinds that also change columns which the simulated jobs leave empty."""
_MEM_URI = re.compile(r"mem://(\d+)\.(\d+)")


@dataclass
class Clock:
    """Replaces `time.time`."""

    now: float = START

    def __call__(self) -> float:
        return self.now


class SmallCluster(SimulatedCluster):
    """Keeps the newest remote checkpoint only."""

    def _tidy(self, agent: SimAgent, effect: TidyRemoteTier) -> None:
        older = [uri for uri, found in self.remotes.items() if found.step < effect.step]
        for uri in older:
            del self.remotes[uri]
        deleted = dict.fromkeys(older, "older than the last 1")
        self.signal(agent, RetentionDone(effect.step, deleted), effect.attempt)


class Story:
    """Writes jobs into a store. `simulations`: job name -> its cluster."""

    def __init__(self, store: Store, settings: Settings, clock: Clock) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._jobs = JobService(store, FakeCluster(), settings)
        self.ids: dict[str, str] = {}
        self.simulations: dict[str, SimulatedCluster] = {}

    async def write(self, save_checkpoint: Callable[[str, int, int], None]) -> None:
        """`save_checkpoint(job, step, attempt)` writes the last remote checkpoint of a job."""
        await self._nodes()
        await self._ended_jobs()
        newest = max(self.simulations["succeeded"].remotes.values(), key=lambda found: found.step)
        save_checkpoint(self.ids["succeeded"], newest.step, newest.attempt)
        await self._live_jobs()
        await self._job_with_events_of_every_kind()
        await self._waiting_jobs()
        await self._requests_of_users()

    async def _nodes(self) -> None:
        seen = [NodeCapacity(f"n{n}-1", f"n{n}", cpus=4.0, gpus=0.0) for n in range(4)]
        async with self._store.write() as session:
            await nodes.record_seen(session, seen, self._clock.now)

    async def _ended_jobs(self) -> None:
        cluster = await self._simulated("succeeded")
        _until_step(cluster, 6)
        cluster.kill_rank(1)
        cluster.run()
        await self._report("succeeded")
        cluster = await self._simulated("failed")
        cluster.user_error_at = 3
        cluster.run()
        await self._report("failed")
        for name, stop in (("cancelled", StopKind.CANCEL), ("paused", StopKind.PAUSE)):
            cluster = await self._simulated(name)
            await self._stop_after_step(name, 5)
            cluster.run()
            await self._report(name)
            assert cluster.events[-1].data["code"] == name, stop
        async with job_transaction(self._store, self.ids["paused"]) as tx:
            await tx.record_done(Effect.RELEASE)
            tx.transition(State.PAUSED)

    async def _live_jobs(self) -> None:
        cluster = await self._simulated("running")
        _until_step(cluster, 3)
        cluster.kill_node("n1", back_after_s=1.0)
        _until_step(cluster, 10)
        await self._report("running")
        await self._hold_lease("running")
        cluster = await self._simulated("recovering")
        _until_step(cluster, 5)
        cluster.kill_rank(0)
        cluster.run_until(lambda: cluster.core.phase is Phase.RECOVERING)
        await self._report("recovering")
        for name in ("pausing", "cancelling"):
            await self._simulated(name)
            await self._stop_after_step(name, 2)

    async def _job_with_events_of_every_kind(self) -> None:
        job_id = await self._submit("every-kind")
        await self._start(job_id)
        events = dict(recorded())  # the last recorded of each kind
        await self._store_report(
            job_id,
            SupervisorReport(
                epoch=1,
                phase=Phase.STARTING,
                step=0,
                attempt=0,
                events=tuple(
                    SupervisorEvent(number, START, kind, events[kind])
                    for number, kind in enumerate(_REPORTED, 1)
                ),
            ),
        )
        async with job_transaction(self._store, job_id) as tx:
            for kind, data in events.items():
                tx.emit(decode(kind, data), data=data)
            tx.transition(State.CANCELLING)
            tx.end(State.CANCELLED, "cancelled", "cancelled by the user")

    async def _waiting_jobs(self) -> None:
        job_id = await self._submit("starting")
        async with job_transaction(self._store, job_id) as tx:
            await tx.record_intent(Effect.START)
            tx.transition(State.STARTING)
        package = await CodeService(self._store, self._settings).put(_package())
        job_id = await self._submit(
            "queued",
            init_from={"source": "succeeded", "what": "everything"},
            train={**SPEC["train"], "steps": STEPS + 4},
            code=package.code,
        )
        async with job_transaction(self._store, job_id) as tx:
            tx.wait_for("nodes", "3 nodes with 1 CPUs free are needed, 0 of 4 nodes have them")

    async def _requests_of_users(self) -> None:
        await NodeService(self._store).cordon("n3", "the fan is loud", None)
        faults = InjectionService(self._store, self._settings)
        await faults.inject(
            self.ids["running"], {"kind": "abort", "rank": 1, "at_step": 11}, "once"
        )

    # --- one job ------------------------------------------------------------------------------

    async def _submit(self, name: str, **changes: Any) -> str:
        job, _ = await self._jobs.submit({**SPEC, "name": name, **changes}, f"submit {name}")
        self.ids[name] = job.id
        return job.id

    async def _start(self, job_id: str) -> None:
        async with job_transaction(self._store, job_id) as tx:
            tx.transition(State.STARTING)
            await tx.record_done(Effect.START)
            tx.emit(SupervisorStartedEvent(created=True, times=1))

    async def _simulated(self, name: str) -> SimulatedCluster:
        """Submit and start a job; its training begins."""
        self._clock.now = START
        job_id = await self._submit(name)
        await self._start(job_id)
        spec = JobSpec.model_validate((await self._jobs.get(job_id)).spec)
        cluster = SmallCluster(
            RecoveryConfig(JobPlan(job_id, spec), build=build.LOADED), remote_every=4
        )
        self.simulations[name] = cluster
        return cluster

    async def _stop_after_step(self, name: str, step: int) -> None:
        """A user cancels or pauses the job, as its name says."""
        cluster = self.simulations[name]
        _until_step(cluster, step)
        await self._report(name)
        cancels = name.startswith("cancel")
        kind = StopKind.CANCEL if cancels else StopKind.PAUSE
        command: Callable[[str], Awaitable[object]]
        command = self._jobs.cancel if cancels else self._jobs.pause
        await command(self.ids[name])
        async with job_transaction(self._store, self.ids[name]) as tx:
            await tx.record_intent(Effect.CANCEL if cancels else Effect.PAUSE)
            tx.transition(State.CANCELLING if cancels else State.PAUSING)
        order = StopOrder(kind, f"{kind} was requested", cluster.now + 60)
        cluster.feed(inputs.StopRequested(order.kind, order.reason, order.deadline))

    async def _report(self, name: str) -> None:
        """Store what the supervisor knows, as two polls: the end of a job follows its last rows."""
        cluster, job_id = self.simulations[name], self.ids[name]
        self._clock.now = cluster.now
        folder = self._settings.job_dir(job_id) / "checkpoints"
        rows = tuple(
            replace(row(attempt, step), at=at, compute_s=(0.08, 0.09), own={"kl": 0.5})
            for attempt, step, at in cluster.step_times
        )
        for _ in range(2):
            await self._store_report(
                job_id,
                SupervisorReport(
                    epoch=1,
                    phase=cluster.core.phase,
                    step=cluster.core.committed,
                    attempt=cluster.core.attempt,
                    events=tuple(_stored(event, folder) for event in cluster.events),
                    rows=rows,
                    digests={row.step: f"{row.step:032x}" for row in rows},
                    logs=(replace(line(1, "loss 1.5"), at=cluster.now),),
                    beats=_beats(cluster),
                ),
            )

    async def _store_report(self, job_id: str, report: SupervisorReport) -> None:
        async with job_transaction(self._store, job_id) as tx:
            await store_report(tx, report, QuarantineRules(), hold_end=True)

    async def _hold_lease(self, name: str) -> None:
        """The server that wrote the database held the job when it was stopped."""
        async with self._store.write() as session:
            session.add(LeaseOwner(id="server", until=self._clock.now + 10))
        async with job_transaction(self._store, self.ids[name]) as tx:
            tx.job.lease_owner, tx.job.lease_token = "server", "token"


def _until_step(cluster: SimulatedCluster, step: int) -> None:
    cluster.run_until(
        lambda: cluster.core.stage is Stage.RUNNING and cluster.core.committed >= step
    )


def _stored(event: SupervisorEvent, folder: Path) -> SupervisorEvent:
    """The event with the URIs that checkpoints of the job have."""
    rewritten = _MEM_URI.sub(partial(_uri, folder), json.dumps(event.data))
    return replace(event, data=json.loads(rewritten))


def _uri(folder: Path, found: re.Match[str]) -> str:
    return str(folder / checkpoint_folder(int(found[1]), int(found[2])))


def _beats(cluster: SimulatedCluster) -> tuple[Beat, ...]:
    attempt = max(cluster.worlds, default=0)
    members = cluster.members_of(attempt) if attempt else []
    return tuple(
        Beat(rank, worker.name, worker.pid, attempt, worker.step, "forward", 0, 0.1, 1.0)
        for rank, _, worker in members
        if worker is not None
    )


def _package() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as package:
        package.writestr(zipfile.ZipInfo("mine.py", CODE_DATE), "RATE = 1\n")
    return content.getvalue()
