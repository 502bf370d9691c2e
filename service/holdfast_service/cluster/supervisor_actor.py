"""Runs the supervisor as a Ray actor: detached, named after its job, restarted without limit."""

from __future__ import annotations

import os
import threading

import ray

from holdfast_service.cluster.agents import RayAgents
from holdfast_service.cluster.ray_state import is_latest_process_of_actor
from holdfast_service.job_model.supervisor_protocol import (
    AvoidOrder,
    Cursors,
    FaultOrder,
    JobPlan,
    SizeOrder,
    StopOrder,
)
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_service.remote_tier.location import storage_options
from holdfast_service.supervisor.fence_record import open_fence
from holdfast_service.supervisor.supervisor import Supervisor
from holdfast_service.supervisor.supervisor_times import SupervisorTimes
from holdfast_workers import build, log_setup
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.fault_injection.kinds import Injection
from holdfast_workers.ipc.linux_processes import identify
from holdfast_workers.memory.peer_tls import TLS_VARIABLE, peer_tls
from holdfast_workers.protocol import codec
from holdfast_workers.protocol.signals import Signal

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
        """`document`: its `JobPlan`."""
        plan = codec.decode(document, JobPlan)
        log_setup.configure(timestamps=True)
        spec = plan.spec
        storage = storage_options(spec.checkpoint.remote, credentials)
        self._agents = agents = RayAgents(plan, secret, storage)
        self._supervisor = Supervisor(
            RecoveryConfig(plan, build=build.LOADED),
            agents,
            secret,
            open_storage(plan.remote_root, storage),
            open_fence(plan.remote_root, storage),
            is_latest_process_of_actor,
            SupervisorTimes(
                heartbeat_timeout_s=spec.recovery.heartbeat_timeout_s,
                finalize_s=spec.timeouts.publish_s + CALL_MARGIN_S,
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
