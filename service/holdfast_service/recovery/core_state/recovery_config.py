"""The configuration of the recovery core: fixed for the life of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.supervisor_protocol import JobPlan
from holdfast_service.placement.restore_points import RemoteCheckpoint
from holdfast_service.placement.world_shape import WorldShape
from holdfast_workers.state.replicas import ReplicaEquality, replica_equality

NO_LAST_STEP = 2**53
"""A program decides itself which step is its last."""


@dataclass(frozen=True)
class RecoveryConfig:
    """The job's plan, and the limits of all waits of the core that no spec sets, in seconds."""

    plan: JobPlan
    build: str = ""
    """The build of Holdfast that the supervisor runs."""
    remotes: tuple[RemoteCheckpoint, ...] = ()
    free_after_s: float = 5.0
    """How long new partners must have served before the copies of former partners are freed."""
    avoid_link_s: float = 30.0
    """How long a link over which replication failed is used only if there is no other link."""
    standby_wait_s: float = 3.0
    """How long a start waits for standby nodes after enough training nodes are ready."""
    prepare_timeout_s: float = 30.0
    """How long agents may prepare processes for a planned change of the mesh."""
    leave_s: float = 120.0
    """How long ranks may take to leave for it; then the step under way is given up. A program has
    its own time."""
    program_progress_s: float = 600.0
    """An attempt of a program that reports no steps counts as progress if it ran this long, and as
    started, although the program reported steps in another attempt."""
    requeue_save_s: float = 60.0
    """How long the save before a job goes back to the queue may take."""
    gather_s: float = 0.005
    communication_wait_s: float = 1.0
    """How long communication errors of survivors wait for the death that caused them."""
    fence_timeout_s: float = 10.0
    last_tidy_s: float = 30.0
    """How long the end of a job waits for the report of retention."""
    lease_margin_s: float = 2.0
    """Waiting time added to a lease, for clock differences and for leases that a supervisor
    grants until it detects its successor."""
    adopt_timeout_s: float = 10.0
    """How long a restarted supervisor waits for all agents' reports before it forms a new
    attempt."""
    inspect_timeout_s: float = 1.5
    """How long agents may take to answer an inspection."""
    inspect_pause_s: float = 0.25
    """Pause between two inspections that must agree."""
    inspect_again_s: float = 5.0
    """Pause before ranks that only wait are inspected again; doubles each time."""
    inspect_longest_pause_s: float = 60.0
    check_timeout_s: float = 60.0
    """How long the check of a node that returns to use may take. The call itself fails earlier."""
    check_pause_s: float = 2.0
    """Pause after a node check that failed to reach the agent."""
    recheck_wait_s: float = 2.0
    """How long the core waits for the outcome of a repeated step after the next step is known."""
    finalize_attempts: int = 3
    finalize_pause_s: float = 1.0
    """Pause after the remote tier refused a manifest for the first time; doubles each time."""
    finalize_longest_pause_s: float = 15.0

    @property
    def spec(self) -> JobSpec:
        return self.plan.spec

    @cached_property
    def shapes(self) -> tuple[WorldShape, ...]:
        """The shapes that a world of the job may have, best first. One shape: the job cannot
        change its size."""
        return self.spec.shapes

    @cached_property
    def schedule(self) -> tuple[tuple[int, WorldShape], ...]:
        """(step, shape of the world after it), in order, from step 0 on. Empty: the shape follows
        the nodes."""
        return self.spec.schedule

    @cached_property
    def runs_program(self) -> bool:
        """Whether the ranks run a program of the user: it has its own loop and its own last step,
        and its own checkpoints besides those in memory."""
        return self.spec.brings_program

    @property
    def steps(self) -> int:
        return NO_LAST_STEP if self.runs_program else self.spec.train.last_step

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of a step; 0: not known, and throughput is modelled by the number of
        ranks."""
        return self.spec.mesh_limits.micro_batches

    @property
    def meshes_are_listed(self) -> bool:
        """Whether the user listed the meshes in their order."""
        return bool(self.spec.resources.nodes and self.spec.resources.nodes.preferred)

    @cached_property
    def replica_equality(self) -> ReplicaEquality:
        return replica_equality(self.spec)

    @property
    def repeatable(self) -> bool:
        """Whether a step that is computed again has the same bits."""
        return self.spec.train.deterministic == "strict"

    @property
    def requeues(self) -> bool:
        """Whether a job with too few nodes is given back to the queue instead of failing."""
        return self.spec.recovery.on_shortage == "queue"

    @property
    def start_timeout_s(self) -> float:
        return self.spec.timeouts.start_s + self._install_s

    @property
    def wait_for_replacement_s(self) -> float:
        return self.spec.recovery.wait_for_replacement_s + self._install_s

    @property
    def _install_s(self) -> float:
        return self.spec.timeouts.install_s if self.spec.runtime_env.pip else 0.0

    @property
    def leave_timeout_s(self) -> float:
        return self.spec.program.leave_s if self.runs_program else self.leave_s

    @property
    def lapse_s(self) -> float | None:
        """How long after a former supervisor's end the ranks of an unreachable agent are known to
        have stopped stepping; None: never known."""
        lease_s = self.spec.recovery.lease_s
        return lease_s + 2 * self.lease_margin_s if lease_s else None

    @property
    def best_shape(self) -> WorldShape:
        return self.shapes[0]

    def scheduled(self, step: int) -> WorldShape | None:
        """The shape that the world must have for the step after `step`; None: any."""
        due = [shape for after_step, shape in self.schedule if after_step <= step]
        return due[-1] if due else None

    def next_change(self, step: int) -> int | None:
        """The step after `step` after which the ranks leave, because the schedule names another
        shape then."""
        now = self.scheduled(step)
        coming = (at for at, shape in self.schedule if at > step and shape != now)
        return next(coming, None)

    def shape_with(self, mesh: Mapping[str, int]) -> WorldShape:
        """The shape with this mesh; the best one if there is none."""
        found = (shape for shape in self.shapes if shape.mesh == mesh)  # a database may sort keys
        return next(found, self.best_shape)
