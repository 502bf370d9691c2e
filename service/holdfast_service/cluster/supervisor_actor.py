"""The supervisor as a Ray actor: detached, named after its job, restarted by Ray without end."""

from __future__ import annotations

import threading
from pathlib import Path

from holdfast_service.cluster.agents import RayAgents
from holdfast_service.job_spec import JobSpec
from holdfast_service.recovery.config import RecoveryConfig
from holdfast_service.reports import Cursors, JobLaunch, SupervisorReport
from holdfast_service.supervisor import Supervisor
from holdfast_workers.messages import Signal


class SupervisorActor:
    """Translates between Ray calls and one `Supervisor`."""

    def __init__(self, launch: JobLaunch, secret: bytes) -> None:
        spec = JobSpec.model_validate(launch.spec)
        job_dir = Path(launch.data_dir)
        remote_root = remote_folder(spec, job_dir)
        agents = RayAgents(
            launch.job_id, spec, secret, str(remote_root), str(job_dir.parent.parent / "cache")
        )
        self._supervisor = Supervisor(
            launch,
            recovery_config(spec),
            agents,
            secret,
            remote_root,
            spec.checkpoint.remote.keep,
        )
        threading.Thread(target=self._supervisor.run, name="supervisor", daemon=True).start()

    def signal(self, signal: Signal) -> None:
        self._supervisor.signal(signal)

    def poll(self, cursors: Cursors) -> SupervisorReport:
        return self._supervisor.report(cursors)

    def cancel(self, reason: str) -> None:
        self._supervisor.cancel(reason)


def remote_folder(spec: JobSpec, job_dir: Path) -> Path:
    """Where the job's remote checkpoints lie."""
    uri = spec.checkpoint.remote.uri
    if uri is None:
        return job_dir / "checkpoints"
    return Path(uri.removeprefix("file://")) / job_dir.name


def recovery_config(spec: JobSpec) -> RecoveryConfig:
    """What the recovery core needs of a job's spec."""
    return RecoveryConfig(
        mesh=spec.parallel.mesh,
        world_size=spec.parallel.world_size,
        workers_per_node=spec.resources.workers_per_node,
        standby_nodes=spec.resources.standby_nodes,
        steps=spec.train.steps,
        memory_every_steps=spec.checkpoint.memory.every_steps,
        max_failures=spec.recovery.max_failures,
        window_s=spec.recovery.window_s,
        wait_for_replacement_s=spec.recovery.wait_for_replacement_s,
    )
