"""The arguments and the environment of `ray start` for one machine. Pure.

Every port that another machine connects to is fixed, so that firewall rules can name it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast_service.embedded_cluster.processes import CLUSTER_MARK, NODE_MARK
from holdfast_service.embedded_cluster.ray_settings import (
    CLUSTER_SETTINGS,
    HEAD_MAY_BE_AWAY,
    OBJECT_STORE_BYTES,
    node_health,
    token_variables,
)
from holdfast_service.host_cluster.endpoint import LARGEST_PORT, Endpoint
from holdfast_service.host_cluster.errors import HostClusterError
from holdfast_workers.ipc.listening import RANGE_VARIABLE
from holdfast_workers.memory.node_folder import BASE_VARIABLE
from holdfast_workers.memory.peer_tls import TLS_VARIABLE

GCS_PORT = 6379
STORAGE_NAMESPACE = "holdfast"
"""Namespace under which a head keeps its state in Redis."""

_REDIS_TLS = (
    *("RAY_REDIS_CA_CERT", "RAY_REDIS_CA_PATH", "RAY_REDIS_SERVER_NAME"),
    *("RAY_REDIS_CLIENT_CERT", "RAY_REDIS_CLIENT_KEY"),
)
"""Ray's settings of the connection to Redis where its address begins with rediss://."""
_LABEL_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"(?:[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_LABEL_NAME}")
_LABEL_VALUE = re.compile(_LABEL_NAME)
_RESOURCE = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,99}")
_RAYS_LABELS = "ray.io/"
_RAYS_RESOURCES = frozenset({"CPU", "GPU", "memory", "object_store_memory"})


@dataclass(frozen=True)
class Ports:
    """Ports on which a machine is connected to; `workers`, `agents`: the first and the last; for
    agents None: any free port."""

    gcs: int = GCS_PORT
    node_manager: int = 6380
    object_manager: int = 6381
    workers: tuple[int, int] = (10002, 19999)
    agents: tuple[int, int] | None = None


@dataclass(frozen=True)
class NodeOptions:
    """What a user chose for this machine.

    `head`: the head's address; None: this machine is the head. `cpus`, `gpus`: None: all.
    `redis`: HOST:PORT of a Redis that keeps the head's state; rediss://HOST:PORT: with TLS.
    `tls_dir`: the folder with its certificates; None: no TLS between nodes.
    """

    name: str
    address: str
    head: Endpoint | None = None
    ports: Ports = Ports()
    cpus: int | None = None
    gpus: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    redis: str | None = None
    redis_password: str = field(default="", repr=False)
    tls_dir: Path | None = None
    health_period_s: float = 1.0
    health_failures: int = 5

    @property
    def gcs(self) -> Endpoint:
        return self.head or Endpoint(self.address, self.ports.gcs)


@dataclass(frozen=True)
class NodePlaces:
    """The folders of this node's files, and its mark. Both folders have the mark in their names."""

    mark: str
    temp_dir: Path
    shm_root: Path
    token: Path

    @property
    def ray(self) -> Path:
        """Ray's folder. Ray lets all users write in it, so it lies in a private one."""
        return self.temp_dir / "ray"

    @property
    def made(self) -> tuple[Path, ...]:
        """Folders that must exist, readable by their owner only, before Ray starts."""
        return (self.temp_dir, self.temp_dir / "tmp", self.shm_root)


def arguments(options: NodeOptions, places: NodePlaces, *, block: bool) -> list[str]:
    """Arguments of `ray start`. Ray gives the password of Redis to its own processes on the head in
    the same way, where every user of that machine can list it."""
    ports = options.ports
    named = {
        "node-ip-address": options.address,
        "node-name": options.name,
        "temp-dir": places.ray,
        "object-store-memory": OBJECT_STORE_BYTES,
        "node-manager-port": ports.node_manager,
        "object-manager-port": ports.object_manager,
        "min-worker-port": ports.workers[0],
        "max-worker-port": ports.workers[1],
        "dashboard-agent-listen-port": 0,
        "include-log-monitor": "false",
    }
    if options.head is None:
        named |= {"port": ports.gcs, "include-dashboard": "false"}
        if options.redis_password:
            named["redis-password"] = options.redis_password
    else:
        named["address"] = options.head
    if options.cpus is not None:
        named["num-cpus"] = options.cpus
    if options.gpus is not None:
        named["num-gpus"] = options.gpus
    if options.resources:
        named["resources"] = json.dumps(dict(options.resources))
    if options.labels:
        named["labels"] = ",".join(f"{key}={value}" for key, value in options.labels.items())
    flags = [*(["--head", "--no-monitor"] if options.head is None else []), "--disable-usage-stats"]
    return [*flags, *(["--block"] if block else []), *(f"--{k}={v}" for k, v in named.items())]


def variables(options: NodeOptions, places: NodePlaces) -> dict[str, str]:
    """Set for `ray start` beside the machine's own; all processes of the node inherit them."""
    redis = {}
    if options.head is None and options.redis is not None:
        redis = {
            "RAY_REDIS_ADDRESS": options.redis,
            "RAY_external_storage_namespace": STORAGE_NAMESPACE,
        }
    agents = options.ports.agents
    return {
        **CLUSTER_SETTINGS,
        **node_health(options.health_period_s, options.health_failures),
        **token_variables(places.token),
        **redis,
        **({} if agents is None else {RANGE_VARIABLE: f"{agents[0]}-{agents[1]}"}),
        **({} if options.tls_dir is None else {TLS_VARIABLE: str(options.tls_dir)}),
        **HEAD_MAY_BE_AWAY,
        "RAY_USAGE_STATS_ENABLED": "0",
        "TMPDIR": f"{places.temp_dir}/tmp",
        BASE_VARIABLE: str(places.shm_root),
        CLUSTER_MARK: places.mark,
        NODE_MARK: options.name,
    }


def passed_on(options: NodeOptions, machine: Mapping[str, str]) -> dict[str, str]:
    """The machine's settings of Ray that the head's processes get."""
    names = _REDIS_TLS if options.head is None else ()
    return {name: machine[name] for name in names if name in machine}


def parse_labels(given: Iterable[str]) -> dict[str, str]:
    """`KEY=VALUE` words. Raises HostClusterError."""
    labels = {}
    for text in given:
        key, _, value = text.partition("=")
        if not (_LABEL_KEY.fullmatch(key) and _LABEL_VALUE.fullmatch(value)):
            raise HostClusterError(
                f"{text!r} is not a label: write KEY=VALUE with letters, digits and ._-, such as "
                "holdfast.io/domain=rack-1"
            )
        if key.startswith(_RAYS_LABELS):
            raise HostClusterError(f"the label {key} is set by Ray: choose another prefix")
        labels[key] = value
    return labels


def parse_resources(given: Iterable[str]) -> dict[str, float]:
    """`NAME=N` words. Raises HostClusterError."""
    resources = {}
    for text in given:
        name, _, amount = text.partition("=")
        if not _RESOURCE.fullmatch(name) or not re.fullmatch(r"\d{1,9}(?:\.\d{1,4})?", amount):
            raise HostClusterError(f"{text!r} is not a resource: write NAME=N, such as fast_disk=1")
        if name in _RAYS_RESOURCES:
            raise HostClusterError(
                f"{name} cannot be set by --resource: use --cpus or --gpus; Ray counts the rest"
            )
        resources[name] = float(amount)
    return resources


def parse_port_range(text: str) -> tuple[int, int]:
    """`FIRST-LAST`. Raises HostClusterError."""
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1024 <= first <= last <= LARGEST_PORT:
        raise HostClusterError(
            f"{text!r} is not a range of ports: write FIRST-LAST, between 1024 and {LARGEST_PORT}, "
            "such as 10002-19999"
        )
    return first, last


def check_ports(ports: Ports) -> None:
    """Raises HostClusterError if two purposes share a port."""
    single = [ports.gcs, ports.node_manager, ports.object_manager]
    ranges = [each for each in (ports.workers, ports.agents) if each is not None]
    shared = {port for port in single if single.count(port) > 1}
    shared |= {port for port in single for first, last in ranges if first <= port <= last}
    if ports.agents is not None:
        first, last = max(ports.workers[0], ports.agents[0]), min(ports.workers[1], ports.agents[1])
        shared |= {first} if first <= last else set()
    if shared:
        raise HostClusterError(
            f"port {min(shared)} has two purposes: --gcs-port, --node-manager-port and "
            "--object-manager-port must differ and lie outside --worker-ports and --agent-ports, "
            "and these two must not overlap"
        )
