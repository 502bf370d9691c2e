"""Runs the supervisor as a Ray actor: detached, named after its job, restarted without limit."""

from __future__ import annotations

import os
import threading

import ray

from holdfast_service.cluster.agents import RayAgents
from holdfast_service.cluster.ray_state import is_latest_process_of_actor
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.supervisor_protocol import (
    AvoidOrder,
    Cursors,
    FaultOrder,
    JobLaunch,
    SizeOrder,
    StopOrder,
)
from holdfast_service.placement.restore_points import InitialCheckpoint
from holdfast_service.policy.checkpoint_intervals import auto_tiers
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig, ScheduledShape
from holdfast_service.remote_tier.location import storage_options
from holdfast_service.supervisor.agent_commands import CallTimes
from holdfast_service.supervisor.fence_record import open_fence
from holdfast_service.supervisor.supervisor import Supervisor, SupervisorTimes
from holdfast_workers import build, log_setup
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.fault_injection.kinds import Injection
from holdfast_workers.ipc.linux_processes import identify
from holdfast_workers.memory.peer_tls import TLS_VARIABLE, peer_tls
from holdfast_workers.protocol import codec
from holdfast_workers.protocol.signals import Signal
from holdfast_workers.state.replicas import replica_equality

CALL_MARGIN_S = 10.0
"""How much longer a call to an agent may take than what the agent does in it."""
CALLS = 32
"""Threads for calls that are answered at once."""
WAITING_CALLS = "waiting"
"""The concurrency group of calls that wait: they take no thread from others."""
CONCURRENCY_GROUPS = {WAITING_CALLS: 4}


class SupervisorActor:
    """Translates between Ray calls, which carry documents of `protocol/codec.py`, and one
    `Supervisor`."""

    def __init__(self, document: bytes, secret: bytes, credentials: dict[str, str] | None) -> None:
        """`document`: its `JobLaunch`."""
        launch = codec.decode(document, JobLaunch)
        log_setup.configure(timestamps=True)
        spec = JobSpec.model_validate(launch.spec)
        remote_root = launch.remote_root
        storage = storage_options(spec.checkpoint.remote, credentials)
        self._agents = agents = RayAgents(
            launch.installation,
            launch.job_id,
            spec,
            secret,
            remote_root,
            storage,
            launch.avoid,
            launch.reserved,
            launch.packages,
            launch.given,
        )
        self._supervisor = Supervisor(
            launch,
            recovery_config(spec, launch.origin, launch.skipped),
            agents,
            secret,
            open_storage(remote_root, storage),
            open_fence(remote_root, storage),
            is_latest_process_of_actor,
            SupervisorTimes(
                heartbeat_timeout_s=spec.recovery.heartbeat_timeout_s,
                calls=CallTimes(finalize_s=spec.timeouts.publish_s + CALL_MARGIN_S),
            ),
            tls=peer_tls(os.environ.get(TLS_VARIABLE, "")),
            process=identify(os.getpid(), ray.get_runtime_context().get_node_id()),
        )
        threading.Thread(target=self._supervisor.run, name="supervisor", daemon=True).start()

    def signal(self, document: bytes) -> None:
        """Take in a `Signal`."""
        self._supervisor.signal(codec.decode(document, Signal))

    def poll(self, document: bytes) -> bytes:
        """The `SupervisorReport` after the document's `Cursors`."""
        return codec.encode(self._supervisor.report(codec.decode(document, Cursors)))

    def await_news(self, document: bytes, timeout_s: float) -> bool:
        """See `Cluster.await_news`; the document has the `Cursors`."""
        return self._supervisor.await_news(codec.decode(document, Cursors), timeout_s)

    def order(self, document: bytes) -> None:
        """Carry out a `StopOrder`, a `FaultOrder`, an `AvoidOrder` or a `SizeOrder`."""
        match codec.decode(document, StopOrder, FaultOrder, AvoidOrder, SizeOrder):
            case StopOrder() as order:
                self._supervisor.stop(order)
            case FaultOrder(number=number, fault=fault):
                self._supervisor.inject(number, Injection.of(fault))
            case AvoidOrder(nodes=nodes):
                self._supervisor.avoid(nodes)
            case SizeOrder() as size:
                if not size.holds_all:  # then the nodes of the last order still hold
                    self._agents.grow_off(size.held_off or ())
                self._supervisor.resize(size)


NO_LAST_STEP = 2**53
"""A program decides itself which step is its last."""


def recovery_config(
    spec: JobSpec, origin: InitialCheckpoint | None, skipped: tuple[tuple[int, int], ...] = ()
) -> RecoveryConfig:
    """The recovery core's configuration from a job's spec, its resolved `init_from` (`origin`) and
    its ledger of skipped windows."""
    install_s = spec.timeouts.install_s if spec.runtime_env.pip else 0.0
    leave_s = spec.program.leave_s if spec.brings_program else RecoveryConfig.leave_timeout_s
    return RecoveryConfig(
        shapes=spec.shapes,
        standby_nodes=spec.resources.standby_nodes,
        steps=NO_LAST_STEP if spec.brings_program else spec.train.steps,
        schedule=tuple(ScheduledShape(*entry) for entry in spec.schedule),
        intervals=spec.checkpoint.first_intervals,
        auto=auto_tiers(spec),
        overhead_target=spec.checkpoint.overhead_target,
        memory_copies=spec.checkpoint.memory.partner_copies,
        max_failures=spec.recovery.max_failures,
        max_preemptions=spec.recovery.max_preemptions,
        max_without_progress=spec.recovery.max_without_progress,
        window_s=spec.recovery.window_s,
        wait_for_replacement_s=spec.recovery.wait_for_replacement_s + install_s,
        build=build.LOADED,
        runs_program=spec.brings_program,
        replica_equality=replica_equality(spec),
        repeatable=spec.train.deterministic == "strict",
        requeue=spec.recovery.on_shortage == "queue",
        grow_after_s=spec.recovery.grow_after_s,
        grow_min_gain=spec.recovery.grow_min_gain,
        micro_batches=spec.mesh_limits.micro_batches,
        meshes_are_listed=bool(spec.resources.nodes and spec.resources.nodes.preferred),
        assemble_wait_s=spec.recovery.assemble_wait_s,
        lease_s=spec.recovery.lease_s,
        start_timeout_s=spec.timeouts.start_s + install_s,
        form_timeout_s=spec.timeouts.form_s,
        load_timeout_s=spec.timeouts.load_s or 0.0,
        first_step_timeout_s=spec.timeouts.first_step_s,
        finish_timeout_s=spec.timeouts.finish_s,
        leave_timeout_s=leave_s,
        stall_limit_s=spec.detection.stall_limit_s,
        replace_stragglers=spec.detection.replace_stragglers,
        straggler_patience_s=spec.detection.straggler_patience_s,
        initial=origin,
        skipped=skipped,
    )
