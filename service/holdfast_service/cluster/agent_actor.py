"""Runs the node agent as a Ray actor that knows its node and its supervisor's name.

The actor is detached, one per bundle of the job's placement group, and restarted by Ray without
limit. It never dies with its supervisor.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import structlog

from holdfast_service.cluster import actor_names
from holdfast_service.cluster.rank_metrics import RankMetrics
from holdfast_service.cluster.ray_for_ranks import (
    NodesCluster,
    uses_ray,
    variables_for_ranks,
)
from holdfast_service.cluster.ray_state import (
    ControlServiceAway,
    has_ended,
    require_control_service,
)
from holdfast_service.embedded_cluster.processes import CLUSTER_MARK
from holdfast_service.job_model.resources_spec import DomainsSpec
from holdfast_workers import log_setup
from holdfast_workers.agent import reforming
from holdfast_workers.agent.agent_config import AgentConfig, device_of
from holdfast_workers.agent.node_agent import NodeAgent
from holdfast_workers.agent.reforming import Reform
from holdfast_workers.ipc.environment import CODE_FOLDER
from holdfast_workers.ipc.listening import RANGE_VARIABLE, InvalidPortRange, PortRange
from holdfast_workers.memory.node_folder import memory_base
from holdfast_workers.memory.peer_tls import TLS_VARIABLE, TlsUnusable, peer_tls
from holdfast_workers.node_cache.cached_file import (
    InvalidCacheLimit,
    NoCacheFolder,
    cache_folder,
    cache_limit_bytes,
)
from holdfast_workers.protocol import codec
from holdfast_workers.protocol.commands import Hello, Request
from holdfast_workers.protocol.process_identity import ProcessIdentity
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.protocol.run_plan import RunPlan
from holdfast_workers.protocol.signals import Signal

_log = structlog.get_logger()

MEMORY_FLOOR_VARIABLE = "HOLDFAST_MEMORY_FLOOR_GB_PER_S"
"""Environment variable of a node: the minimum memory copy rate of a fit node."""
LOGS_VARIABLE = "HOLDFAST_NODE_LOGS"
"""Environment variable of a node: `json` makes its agents log in JSON lines."""
DEVICE_VARIABLE = "HOLDFAST_WORKER_DEVICE"
"""Environment variable of a node, for tests: the device of workers that have GPUs, such as cpu."""
START_AGAIN_S = 0.5
"""Pause before an agent that cannot start ends, for Ray to start it again."""
DOMAIN_LABELS = ("holdfast.io/domain", "topology.kubernetes.io/zone")
"""Ray node labels that name a node's failure domain; the first that is set counts."""
FAST_DOMAIN_LABELS = ("holdfast.io/fast-domain",)
"""Ray node labels that name the nodes among which bytes travel fastest."""


@dataclass(frozen=True)
class AgentSeat:
    """The arguments of an agent at its creation; it reads the rest from its node.

    A seat is the agent's place in the job, one per bundle of the placement group.
    """

    plan: RunPlan
    seat: str
    secret: bytes = field(repr=False)
    storage: StorageOptions
    installation: str = ""
    domains: DomainsSpec = field(default_factory=DomainsSpec)


class AgentActor:
    """Runs a `NodeAgent`. Its calls carry documents of `protocol/codec.py`.

    Its constructor must not raise: Ray never restarts such an actor, and the seat would be lost.
    """

    def __init__(self, document: bytes) -> None:
        """`document`: its `AgentSeat`."""
        seat = codec.decode(document, AgentSeat)
        context = ray.get_runtime_context()
        self._supervisor_name = actor_names.supervisor(seat.plan.job_id)
        self._namespace = actor_names.namespace(seat.installation)
        self._supervisor: Any = None
        node_id = context.get_node_id()
        config = _config(seat, node_id)
        log_setup.configure(timestamps=True, json_fields=config.log_fields)
        self._agent = NodeAgent(
            config,
            self._signal_supervisor,
            _node_killer(),
            has_ended=self._supervisor_has_ended,
        )
        threading.Thread(target=self._start, name="agent-start", daemon=True).start()
        self._metrics = RankMetrics(seat.plan.job_id, self._agent.figures)
        self._metrics.start()

    def execute(self, document: bytes) -> bytes:
        """Carry out the `Request` of a document; returns the document of its answer."""
        request = codec.decode(document, Request)
        if isinstance(request.command, Hello):
            self._find_supervisor()  # the caller may be a new supervisor
        return codec.encode(self._agent.answer(request))

    def release(self) -> None:
        self._metrics.stop()
        self._agent.release()

    def _start(self) -> None:
        try:
            self._agent.start()
        except Exception:  # reported to the supervisor as the agent's failure
            _log.exception("the agent cannot start")

    def _find_supervisor(self) -> None:
        try:
            require_control_service()
        except ControlServiceAway:
            if self._supervisor is None:
                raise  # the supervisor sends `hello` again
            return  # Ray starts no other supervisor meanwhile
        with contextlib.suppress(ValueError):  # between two incarnations; the next sends `hello`
            self._supervisor = ray.get_actor(self._supervisor_name, self._namespace)

    def _supervisor_has_ended(self, process: ProcessIdentity) -> bool:
        return self._supervisor is not None and has_ended(self._supervisor, process)

    def _signal_supervisor(self, signal_: Signal) -> None:
        """Send the signal with best effort, never blocking: a new supervisor queries the full state
        anyway."""
        if self._supervisor is None:
            return
        try:
            self._supervisor.signal.remote(codec.encode(signal_))
        except Exception:  # an error of Ray must not end the agent's threads
            _log.exception("cannot send a signal to the supervisor", kind=str(signal_.kind))


def _node_killer() -> Callable[[], None] | None:
    """A function that kills this process and its raylet, which are a node of an embedded cluster.

    None on other clusters: Holdfast must not kill nodes that it did not start.
    """
    if CLUSTER_MARK not in os.environ:
        return None
    raylet, ours = os.getppid(), os.getpid()

    def kill_node() -> None:
        os.kill(raylet, signal.SIGKILL)
        os.kill(ours, signal.SIGKILL)

    return kill_node


def _config(seat: AgentSeat, node_id: str) -> AgentConfig:
    node = hashlib.sha256(node_id.encode()).hexdigest()[:12]
    base, host = memory_base(os.environ), ray.util.get_node_ip_address()
    memory = base / actor_names.memory_folder(seat.installation, seat.plan.job_id)
    interface, labels = _interface_of(host), ray.get_runtime_context().get_node_labels()
    floor, problem = _memory_floor(os.environ.get(MEMORY_FLOOR_VARIABLE, "0"))
    ports, ports_problem = _port_range(os.environ.get(RANGE_VARIABLE, ""))
    tls_dir, tls_problem = _tls_folder(os.environ.get(TLS_VARIABLE, ""))
    cache, cache_problem = _cache_folder(os.environ)
    device = os.environ.get(DEVICE_VARIABLE) or device_of(seat.plan.resources.gpus_per_worker)
    reform, unknown_reform = _reform(os.environ.get(reforming.VARIABLE, ""), device)
    return AgentConfig(
        plan=seat.plan,
        agent=seat.seat,
        node_id=node_id,
        host=host,
        secret=seat.secret,
        memory_root=str(memory / f"{seat.seat}-{node}"),
        memory_base=str(base),
        tls_dir=tls_dir,
        ports=ports,
        problem="; ".join(
            filter(None, (problem, ports_problem, tls_problem, cache_problem, unknown_reform))
        ),
        cache_dir=cache,
        code=code_folder(),
        storage=seat.storage,
        memory_floor_gb_per_s=floor,
        domain=domain_of(labels, seat.domains.failure, DOMAIN_LABELS),
        fast_domain=domain_of(labels, seat.domains.fast, FAST_DOMAIN_LABELS),
        worker_device=os.environ.get(DEVICE_VARIABLE, ""),
        reform=reform,
        json_logs=os.environ.get(LOGS_VARIABLE, "") == "json",
        users_env=_ray_variables(seat, host),
        env={
            **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
            **reforming.communicator_variables(reform, device),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OMP_DYNAMIC": "FALSE",  # the number of threads is the spec's, never the machine's
        },
    )


def _ray_variables(seat: AgentSeat, host: str) -> dict[str, str]:
    """The variables by which the ranks reach Ray, if this job's may."""
    if not uses_ray(seat.plan.spec):
        return {}
    address = ray.get_runtime_context().gcs_address
    return variables_for_ranks(NodesCluster(address, host, code_folder()), os.environ)


def domain_of(
    labels: Mapping[str, str], named: str | None = None, usual: Sequence[str] = DOMAIN_LABELS
) -> str:
    """The domain that a node's labels name: that of the label that the job names, else of the
    first usual one that is set; "" if there is none."""
    keys = (named,) if named else usual
    return next((labels[key] for key in keys if labels.get(key)), "")


def _memory_floor(setting: str) -> tuple[float, str]:
    """The value of the setting, and what is wrong with it."""
    try:
        return float(setting), ""
    except ValueError:
        return 0.0, f"{MEMORY_FLOOR_VARIABLE}={setting!r} is not a number"


def _port_range(setting: str) -> tuple[str, str]:
    """The setting if it is a range of ports, and what is wrong with it."""
    try:
        PortRange.parse(setting)
    except InvalidPortRange as error:
        return "", f"{RANGE_VARIABLE}: {error}"
    return setting, ""


def _tls_folder(setting: str) -> tuple[str, str]:
    """The setting, and what is wrong with the certificates there."""
    try:
        if (tls := peer_tls(setting)) is not None:
            tls.check()
    except TlsUnusable as error:
        return setting, str(error)
    return setting, ""


def _cache_folder(environ: Mapping[str, str]) -> tuple[str, str]:
    """The folder of this node's caches, and why there is none."""
    try:
        cache_limit_bytes(environ)
        return str(cache_folder(environ)), ""
    except (InvalidCacheLimit, NoCacheFolder) as error:
        return "", str(error)


def _reform(setting: str, device: str) -> tuple[Reform, str]:
    """The value of the setting, and what is wrong with it."""
    try:
        return reforming.reform_of(setting, device), ""
    except ValueError as error:
        return Reform.FORK, str(error)


def _interface_of(host: str) -> str:
    """The network interface with this address, to which alone gloo binds; "": no interface has it,
    and the agent's own attempt to listen on it says so."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return str(name)
    return ""


def code_folder() -> str:
    """The folder of the job's code package; "": there is none."""
    try:
        folder = Path.cwd() / CODE_FOLDER
    except FileNotFoundError:
        # Nodes that share a host share Ray's folder of the package, and one may unpack it again
        # under this process. An exception would cost the seat for ever; a new process has it.
        _log.warning("the working folder was replaced: the agent starts again")
        time.sleep(START_AGAIN_S)
        os._exit(1)
    return str(folder) if folder.is_dir() else ""
