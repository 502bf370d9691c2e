"""The configuration of a node agent, immutable for its life, and the parts of it that its zygote
and workers get."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast_workers.agent.reforming import Reform
from holdfast_workers.checkpoint.storage import local_folder
from holdfast_workers.fault_injection.failing_storage import FAULT_FILE
from holdfast_workers.packages.folders import packages_folder
from holdfast_workers.protocol.messages import FormOrder, JoinOrder, Seat
from holdfast_workers.protocol.processes import StorageOptions, StorageZygoteConfig, ZygoteConfig
from holdfast_workers.protocol.run_plan import RunPlan


@dataclass(frozen=True)
class AgentConfig:
    """Times in seconds."""

    plan: RunPlan
    agent: str
    node_id: str
    host: str
    secret: bytes = field(repr=False)
    memory_root: str
    """A folder in shared memory that no other node uses."""
    cache_dir: str
    storage: StorageOptions = field(default_factory=StorageOptions)
    code: str = ""
    """The folder of the job's code package; "": there is none."""
    memory_base: str = ""
    """The private folder of all jobs of this user, two levels above `memory_root`; "": none."""
    tls_dir: str = ""
    """The folder of this node's certificates for connections between nodes; "": no TLS."""
    ports: str = ""
    """The range of ports of this node on which its processes listen; "": any."""
    problem: str = ""
    """Why the settings of this node are unusable; the agent reports it and runs nothing."""
    spares: int = 2
    """The number of this node's ranks for which a spare worker is kept that has built the model
    ahead. None where ranks have devices: a spare worker would need a device of its own."""
    domain: str = ""
    """The failure domain of the node."""
    fast_domain: str = ""
    """The nodes with the same name are connected fastest; "": those of the failure domain."""
    reform: Reform = Reform.IN_PLACE
    """`in_place`: survivors keep their processes; `fork`: every rank is forked anew."""
    abort_grace_s: float = 1.5
    """How long a worker that computes may take to end; a sleeping one gets `asleep_limit_s`."""
    asleep_limit_s: float = 0.2
    replication_patience_s: float = 2.0
    """The longest time for which training waits for partners' copies without a break."""
    replication_share: float = 0.01
    """The share of its time for which training may wait for them in the long run."""
    fork_timeout_s: float = 10.0
    slowest_save_bytes_per_s: float = 1e7
    """The saver of a shard has so much more time for its bytes."""
    tidy_timeout_s: float = 3600.0
    """The limit of retention, which may read the whole newest checkpoint. Nothing waits for it."""
    preflight_timeout_s: float = 30.0
    """The limit of the check of the node before it is used."""
    memory_floor_gb_per_s: float = 0.0
    """A node with a slower memory copy is unfit. 0: the speed is only measured."""
    health_interval_s: float = 5.0
    """Between two readings of the health probes."""
    watch_period_s: float = 0.25
    """The longest time between two readings of the ranks' beacons."""
    inspect_timeout_s: float = 1.0
    """The limit of collecting the stacks of all ranks."""
    worker_device: str = ""
    """The device of workers with devices, for tests; "": the first that they see."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables that all processes of this node need."""
    users_env: dict[str, str] = field(default_factory=dict)
    """Variables of this node for processes with users' code, beside the job's own."""
    json_logs: bool = False
    """Log in lines of JSON, events and output included; see `node_log`."""

    @property
    def zygote_config(self) -> ZygoteConfig:
        """The configuration of the node's zygote, which runs users' code: without credentials."""
        packages = self.plan.packages
        return ZygoteConfig(
            plan=self.plan,
            device=self.device,
            cache_dir=self.cache_dir,
            code=self.code,
            packages=str(packages_folder(packages, self.cache_dir)) if packages else "",
            storage=StorageOptions(),
            storage_fault_file=self._storage_fault_file,
            replication_patience_s=self.replication_patience_s,
            replication_share=self.replication_share,
            env={**self.plan.env, **self.users_env, **self.env},
        )

    @property
    def storage_zygote_config(self) -> StorageZygoteConfig:
        """The configuration of the zygote without users' code. Contains the credentials of the
        job's bucket."""
        return StorageZygoteConfig(
            plan=self.plan,
            storage=self.storage,
            storage_fault_file=self._storage_fault_file,
            env=self.env,
        )

    @property
    def saves_to_bucket(self) -> bool:
        return local_folder(self.plan.remote_root) is None

    @property
    def reads_token_sets(self) -> bool:
        return bool(self.plan.spec.data.prepared) and not self.plan.spec.has_own_model

    @property
    def _storage_fault_file(self) -> str:
        return str(Path(self.memory_root) / FAULT_FILE)

    @property
    def log_fields(self) -> dict[str, str] | None:
        """The fields of each of this agent's lines of JSON; None: it logs in text."""
        fields = {"job": self.plan.job_id, "agent": self.agent, "node": self.node_id}
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

    @property
    def capacity(self) -> int:
        """The number of ranks that this node can run."""
        return self.plan.resources.workers_per_node

    @property
    def gpus_per_worker(self) -> float:
        return self.plan.resources.gpus_per_worker

    @property
    def brings_program(self) -> bool:
        """Whether the job brings a program, as in the training spec."""
        return self.plan.spec.brings_program


def device_of(gpus_per_worker: float) -> str:
    """The device of a worker, as the worker itself names it."""
    return "cuda:0" if gpus_per_worker else "cpu"


def join_order(order: FormOrder, seat: Seat, segment: Path) -> JoinOrder:
    """The order for one worker. `segment`: path of its rank's own segment."""
    ranks = sorted(other.rank for other in order.seats)
    return JoinOrder(
        form=replace(order, seats=(), caches=()),
        seat=replace(seat, restore=replace(seat.restore, origins=())),
        segment_path=str(segment),
        local_rank=ranks.index(seat.rank),
        local_world_size=len(ranks),
    )
