"""All a node agent needs to know, immutable for its life; and what of it a worker is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from holdfast_workers.checkpoint.storage import StorageOptions
from holdfast_workers.fault_injection.failing_storage import FAULT_FILE
from holdfast_workers.protocol.messages import FormOrder, Seat


@dataclass(frozen=True)
class AgentConfig:
    """Times in seconds."""

    job_id: str
    agent: str
    node_id: str
    host: str
    training: dict[str, Any]
    mesh: dict[str, int]
    """Of the first attempt. Every order to form names its own."""
    capacity: int
    """Ranks this node can run."""
    secret: bytes = field(repr=False)
    memory_root: str
    """Folder in shared memory, this node's alone."""
    cache_dir: str
    remote_root: str
    """URI of the storage under which the job's remote checkpoints lie."""
    storage: StorageOptions = field(default_factory=StorageOptions)
    gpus_per_worker: float = 0
    spares: int = 2
    """For so many of the node's ranks, a worker that has built ahead for it stands beside it; not
    where ranks have devices, of which it would need one."""
    domain: str = ""
    reform: str = "in_place"
    """`in_place`: survivors keep their processes; `fork`: every rank is forked anew."""
    abort_grace_s: float = 1.5
    """For a worker that computes; one that sleeps gets `asleep_limit_s`."""
    asleep_limit_s: float = 0.2
    replication_patience_s: float = 2.0
    """How long training waits for partners' copies at most, in a row."""
    replication_share: float = 0.01
    """What share of its time it may wait for them in the long run."""
    zygote_start_timeout_s: float = 180.0
    fork_timeout_s: float = 10.0
    form_timeout_s: float = 60.0
    finalize_timeout_s: float = 110.0
    save_timeout_s: float = 120.0
    """For the saver of a shard, and as much more as its bytes take at the slowest."""
    slowest_save_bytes_per_s: float = 1e7
    tidy_timeout_s: float = 3600.0
    """For retention, which may read the newest checkpoint through. Nobody waits for it."""
    heartbeat_s: float = 0.25
    preflight_timeout_s: float = 30.0
    """For the check of the node before it is used."""
    memory_floor_gb_per_s: float = 0.0
    """A node whose memory is copied more slowly is unfit. 0: it is only measured."""
    health_interval_s: float = 5.0
    """Between two looks of the health probes."""
    watch_period_s: float = 0.05
    """Between two looks at the beacons of the ranks."""
    inspect_timeout_s: float = 1.0
    """For the stacks of all ranks, once they are asked for."""
    env: dict[str, str] = field(default_factory=dict)
    json_logs: bool = False
    """What happens here is written as lines of JSON too; see `json_log`."""

    @property
    def of_zygote(self) -> dict[str, Any]:
        """What the node's zygote is told, as JSON."""
        names = ("training", "cache_dir", "replication_patience_s", "replication_share", "env")
        remote = {
            "uri": self.remote_root,
            "options": self.storage.as_document(),
            "fault_file": str(Path(self.memory_root) / FAULT_FILE),
        }
        told = {name: getattr(self, name) for name in names}
        return {**told, "remote": remote, "device": self.device}

    @property
    def ranks_with_spares(self) -> int:
        return 0 if self.gpus_per_worker else self.spares

    @property
    def device(self) -> str:
        """That of a worker, as the worker calls it."""
        return "cuda:0" if self.gpus_per_worker else "cpu"

    @property
    def world_size(self) -> int:
        return prod(self.mesh.values())


def join_fields(order: FormOrder, seat: Seat, config: AgentConfig) -> dict[str, Any]:
    """What a worker is told of its seat, beside where its segments lie; JSON."""
    return {
        "world_size": order.world_size,
        "mesh": order.mesh,
        "store_host": order.store_host,
        "store_port": order.store_port,
        "restore": asdict(replace(seat.restore, origins=())),  # those are the agent's affair
        "has_partner": bool(seat.partners),
        "intervals": order.intervals,
        "leased": order.leased,
        "skipped": order.skipped,
        "recheck": order.recheck,
        "reporter": seat.rank == min(each.rank for each in order.seats),
        "timeout_s": config.form_timeout_s,
        "device": config.device,
    }
