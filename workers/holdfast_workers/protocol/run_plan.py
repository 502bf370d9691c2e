"""What all nodes of a job and the processes on them know of it: it travels once to each agent, and
from there to its zygotes. It has no secrets: users' code may read it."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast_workers.protocol.node_needs import NodeNeeds
from holdfast_workers.spec import RankResources, TimeoutsSpec, TrainingSpec

ZYGOTE_START_S = 180.0
"""Least time for the start of a zygote."""
LOAD_S = 3600.0
"""The limit of a rank's load from a bucket, of all of its bytes, unless the spec has one."""


@dataclass(frozen=True)
class RunPlan:
    """Sections of the job's spec as they are, and facts that all its nodes share."""

    job_id: str
    spec: TrainingSpec
    remote_root: str
    """URI of the folder of the job's remote checkpoints."""
    resources: RankResources = field(default_factory=RankResources)
    timeouts: TimeoutsSpec = field(default_factory=TimeoutsSpec)
    env: dict[str, str] = field(default_factory=dict)
    """The job's own variables: for processes with users' code."""
    packages: tuple[str, ...] = ()
    """The exact requirements of the job's own Python packages."""
    needs: NodeNeeds = field(default_factory=NodeNeeds)
    """What the job needs of a node."""
    heartbeat_s: float = 0.25

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh of the first attempt. Every order to form an attempt names its own."""
        return self.spec.parallel.mesh

    @property
    def zygote_start_timeout_s(self) -> float:
        return max(ZYGOTE_START_S, self.timeouts.start_s)

    @property
    def form_timeout_s(self) -> float:
        """The limit of a step of an attempt's formation; the steps come one after another."""
        return self.timeouts.form_s / 2

    @property
    def load_timeout_s(self) -> float:
        return LOAD_S if self.timeouts.load_s is None else self.timeouts.load_s

    @property
    def load_bound_s(self) -> float:
        """How long a rank that loads its state may show no sign of life; 0: as learned."""
        return self.timeouts.load_s or 0.0
