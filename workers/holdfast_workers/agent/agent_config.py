"""The configuration of a node agent, immutable for its life, and the parts of it that its zygote
and workers get."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from holdfast_workers.agent.reforming import Reform
from holdfast_workers.checkpoint.storage import local_folder
from holdfast_workers.fault_injection.failing_storage import FAULT_FILE
from holdfast_workers.packages.folders import packages_folder
from holdfast_workers.protocol.messages import FormOrder, JoinOrder, Seat
from holdfast_workers.protocol.node_needs import NodeNeeds
from holdfast_workers.protocol.processes import StorageOptions, StorageZygoteConfig, ZygoteConfig
from holdfast_workers.spec import TrainingSpec


@dataclass(frozen=True)
class AgentConfig:
    """Times in seconds."""

    job_id: str
    agent: str
    node_id: str
    host: str
    training: dict[str, Any]
    mesh: dict[str, int]
    """The mesh of the first attempt. Every order to form an attempt names its own."""
    capacity: int
    """The number of ranks that this node can run."""
    secret: bytes = field(repr=False)
    memory_root: str
    """A folder in shared memory that no other node uses."""
    cache_dir: str
    remote_root: str
    """URI of the folder of the job's remote checkpoints."""
    storage: StorageOptions = field(default_factory=StorageOptions)
    code: str = ""
    """The folder of the job's code package; "": there is none."""
    packages: tuple[str, ...] = ()
    """The exact requirements of the job's own Python packages."""
    install_timeout_s: float = 600.0
    """For installing them."""
    memory_base: str = ""
    """The private folder of all jobs of this user, two levels above `memory_root`; "": none."""
    tls_dir: str = ""
    """The folder of this node's certificates for connections between nodes; "": no TLS."""
    ports: str = ""
    """The range of ports of this node on which its processes listen; "": any."""
    problem: str = ""
    """Why the settings of this node are unusable; the agent reports it and runs nothing."""
    gpus_per_worker: float = 0
    spares: int = 2
    """The number of this node's ranks for which a spare worker is kept that has built the model
    ahead. None where ranks have devices: a spare worker would need a device of its own."""
    threads: int = 1
    """With which torch computes in each worker."""
    domain: str = ""
    """The failure domain of the node."""
    fast_domain: str = ""
    """The nodes with the same name are connected fastest; "": those of the failure domain."""
    reform: Reform = Reform.IN_PLACE
    """`in_place`: survivors keep their processes; `fork`: every rank is forked anew."""
    abort_grace_s: float = 1.5
    """For a worker that computes; a sleeping worker gets `asleep_limit_s`."""
    asleep_limit_s: float = 0.2
    replication_patience_s: float = 2.0
    """The longest time for which training waits for partners' copies without a break."""
    replication_share: float = 0.01
    """The share of its time for which training may wait for them in the long run."""
    zygote_start_timeout_s: float = 180.0
    fork_timeout_s: float = 10.0
    form_timeout_s: float = 60.0
    finalize_timeout_s: float = 110.0
    save_timeout_s: float = 120.0
    """For the saver of a shard, plus the time that its bytes take at `slowest_save_bytes_per_s`."""
    slowest_save_bytes_per_s: float = 1e7
    load_timeout_s: float = 3600.0
    """For a rank's load from a bucket, all of its bytes."""
    load_bound_s: float = 0.0
    """How long a rank that loads its state may show no sign of life; 0: as learned."""
    tidy_timeout_s: float = 3600.0
    """For retention, which may read the whole newest checkpoint. Nothing waits for it."""
    heartbeat_s: float = 0.25
    preflight_timeout_s: float = 30.0
    """For the check of the node before it is used."""
    memory_floor_gb_per_s: float = 0.0
    """A node with a slower memory copy is unfit. 0: the speed is only measured."""
    health_interval_s: float = 5.0
    """Between two readings of the health probes."""
    watch_period_s: float = 0.25
    """The longest time between two readings of the ranks' beacons."""
    inspect_timeout_s: float = 1.0
    """For collecting the stacks of all ranks."""
    needs: NodeNeeds = field(default_factory=NodeNeeds)
    """What the job needs of this node."""
    worker_device: str = ""
    """The device of workers with devices, for tests; "": the first that they see."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables that all processes of this node need."""
    job_env: dict[str, str] = field(default_factory=dict)
    """The job's own variables: for processes with users' code."""
    json_logs: bool = False
    """Log in lines of JSON, events and output included; see `node_log`."""

    @property
    def zygote_config(self) -> ZygoteConfig:
        """The configuration of the node's zygote, which runs users' code: without credentials."""
        return ZygoteConfig(
            job_id=self.job_id,
            training=self.training,
            mesh=self.mesh,
            device=self.device,
            cache_dir=self.cache_dir,
            code=self.code,
            packages=str(packages_folder(self.packages, self.cache_dir)) if self.packages else "",
            remote_root=self.remote_root,
            storage=StorageOptions(),
            storage_fault_file=self._storage_fault_file,
            replication_patience_s=self.replication_patience_s,
            replication_share=self.replication_share,
            load_timeout_s=self.load_timeout_s,
            load_bound_s=self.load_bound_s,
            env={**self.job_env, **self.env},
            threads=self.threads,
        )

    @property
    def storage_zygote_config(self) -> StorageZygoteConfig:
        """The configuration of the zygote without users' code. Contains the credentials of the
        job's bucket."""
        return StorageZygoteConfig(
            job_id=self.job_id,
            training=self.training,
            mesh=self.mesh,
            remote_root=self.remote_root,
            storage=self.storage,
            storage_fault_file=self._storage_fault_file,
            env=self.env,
        )

    @property
    def saves_to_bucket(self) -> bool:
        return local_folder(self.remote_root) is None

    @property
    def _storage_fault_file(self) -> str:
        return str(Path(self.memory_root) / FAULT_FILE)

    @property
    def log_fields(self) -> dict[str, str] | None:
        """The fields of each of this agent's lines of JSON; None: it logs in text."""
        fields = {"job": self.job_id, "agent": self.agent, "node": self.node_id}
        return fields if self.json_logs else None

    @property
    def ranks_with_spares(self) -> int:
        return 0 if self.gpus_per_worker else self.spares

    @property
    def device(self) -> str:
        """The device of a worker, as the worker itself names it."""
        if self.gpus_per_worker and self.worker_device:
            return self.worker_device
        return device_of(self.gpus_per_worker)

    @cached_property
    def brings_program(self) -> bool:
        """As in the training spec."""
        return TrainingSpec.model_validate(self.training).brings_program

    @property
    def world_size(self) -> int:
        return prod(self.mesh.values())


def device_of(gpus_per_worker: float) -> str:
    """The device of a worker, as the worker itself names it."""
    return "cuda:0" if gpus_per_worker else "cpu"


def join_order(order: FormOrder, seat: Seat, config: AgentConfig, segment: Path) -> JoinOrder:
    """The order for one worker. `segment`: path of its rank's own segment."""
    ranks = sorted(other.rank for other in order.seats)
    return JoinOrder(
        form=replace(order, seats=()),
        seat=replace(seat, restore=replace(seat.restore, origins=())),
        segment_path=str(segment),
        timeout_s=config.form_timeout_s,
        local_rank=ranks.index(seat.rank),
        local_world_size=len(ranks),
    )
