"""All a node agent needs to know, immutable for its life."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any


@dataclass(frozen=True)
class AgentConfig:
    """Times in seconds."""

    job_id: str
    agent: str
    node_id: str
    host: str
    training: dict[str, Any]
    mesh: dict[str, int]
    capacity: int
    """Ranks this node can run."""
    secret: bytes = field(repr=False)
    memory_root: str
    """Folder in shared memory, this node's alone."""
    cache_dir: str
    remote_root: str
    gpus_per_worker: float = 0
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
    heartbeat_s: float = 0.25
    env: dict[str, str] = field(default_factory=dict)

    @property
    def mesh_tag(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.mesh.items())

    @property
    def of_zygote(self) -> dict[str, Any]:
        """What the node's zygote is told, as JSON."""
        names = ("training", "cache_dir", "replication_patience_s", "replication_share", "env")
        return {name: getattr(self, name) for name in names}

    @property
    def world_size(self) -> int:
        return prod(self.mesh.values())
