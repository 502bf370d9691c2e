"""The configuration of the recovery core: fixed for the life of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast_service.placement.mesh_throughput import ALWAYS_GROW
from holdfast_service.placement.restore_points import InitialCheckpoint, RemoteCheckpoint
from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.policy.checkpoint_intervals import AutoTier
from holdfast_workers.state.replicas import ReplicaEquality


@dataclass(frozen=True)
class ScheduledShape:
    """The shape of a job's world from the step after `after_step` on."""

    after_step: int
    shape: WorldShape


@dataclass(frozen=True)
class RecoveryConfig:
    """Sizes, budgets and deadlines. All times are in seconds. Every wait of the core has its limit
    here."""

    shapes: tuple[WorldShape, ...]
    """The shapes that a world of the job may have, best first. One shape: the job cannot change
    its size."""
    standby_nodes: int
    steps: int
    schedule: tuple[ScheduledShape, ...] = ()
    """The shapes of the world by step, in order, from step 0 on. Empty: the shape follows the
    nodes."""
    intervals: tuple[int, int] = (1, 100)
    """Initial steps between two saves to memory, and between two saves to the remote tier."""
    auto: frozenset[AutoTier] = frozenset()
    """Tiers whose interval follows measured costs."""
    overhead_target: float = 0.01
    memory_copies: int = 1
    """Number of partners that keep each rank's memory checkpoints."""
    free_after_s: float = 5.0
    """How long new partners must have served before the copies of former partners are freed."""
    avoid_link_s: float = 30.0
    """How long a link over which replication failed is used only if there is no other link."""
    max_failures: int = 20
    max_preemptions: int = 100
    max_without_progress: int = 5
    """Consecutive attempts that may end without a step beyond the newest step before them."""
    window_s: float = 3600.0
    wait_for_replacement_s: float = 60.0
    start_timeout_s: float = 120.0
    standby_wait_s: float = 3.0
    """How long a start waits for standby nodes after enough training nodes are ready."""
    assemble_wait_s: float = 30.0
    """How long a start waits for the nodes of the best mesh while a smaller one has room."""
    grow_after_s: float = 10.0
    """How long a better mesh must have had room before the world grows to it; doubles with each
    resize within the window."""
    prepare_timeout_s: float = 30.0
    """How long agents may prepare processes for a planned change of the mesh."""
    leave_timeout_s: float = 120.0
    """How long ranks may take to leave for it; then the step under way is given up."""
    grow_min_gain: float = ALWAYS_GROW
    """Least gain in throughput for which the world grows; -1: whenever there is room."""
    micro_batches: int = 0
    """Micro-batches of a step; 0: not known, and throughput is modelled by the number of ranks."""
    meshes_are_listed: bool = False
    """Whether the user listed the meshes in their order."""
    build: str = ""
    """The build of Holdfast that the supervisor runs."""
    runs_program: bool = False
    """Whether the ranks run a program of the user: it has its own loop and its own last step, and
    its own checkpoints besides those in memory. `steps` then means nothing."""
    program_progress_s: float = 600.0
    """An attempt of a program that reports no steps counts as progress if it ran this long."""
    replica_equality: ReplicaEquality = ReplicaEquality.NOTHING
    """What ranks that differ only in `dp_replicate` hold alike."""
    repeatable: bool = True
    """Whether a step that is computed again has the same bits (`train.deterministic: strict`)."""
    requeue: bool = False
    """Whether a job with too few nodes is given back to the queue instead of failing."""
    requeue_save_s: float = 60.0
    """How long the save before that may take."""
    gather_s: float = 0.005
    communication_wait_s: float = 1.0
    """How long communication errors of survivors wait for the death that caused them."""
    fence_timeout_s: float = 10.0
    form_timeout_s: float = 120.0
    load_timeout_s: float = 0.0
    """Added to it where ranks load their state from the remote tier."""
    first_step_timeout_s: float = 900.0
    finish_timeout_s: float = 300.0
    last_tidy_s: float = 30.0
    """How long the end of a job waits for the report of retention."""
    lease_s: float = 10.0
    """How long ranks may continue to step after their agent has seen the supervisor end. Longer
    than a supervisor restart, so that a restart costs no step. 0: no leases."""
    lease_margin_s: float = 2.0
    """Waiting time added to such a lease, for clock differences and for leases that a supervisor
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
    stall_limit_s: float = 600.0
    """How long a running world may go without a step, unless a phase declares a longer limit."""
    replace_stragglers: bool = True
    """Whether a rank that is slower than its peers moves to a better node, if there is one."""
    straggler_patience_s: float = 60.0
    """How long the rank must have been slow before it moves."""
    finalize_attempts: int = 3
    finalize_pause_s: float = 1.0
    """Pause after the remote tier refused a manifest for the first time; doubles each time."""
    finalize_longest_pause_s: float = 15.0
    remotes: tuple[RemoteCheckpoint, ...] = ()
    initial: InitialCheckpoint | None = None
    skipped: tuple[tuple[int, int], ...] = ()
    """Data windows, half-open, that the ledger already contains."""

    @property
    def lapse_s(self) -> float | None:
        """How long after a former supervisor's end the ranks of an unreachable agent are known to
        have stopped stepping; None: never known."""
        return self.lease_s + 2 * self.lease_margin_s if self.lease_s else None

    @property
    def best_shape(self) -> WorldShape:
        return self.shapes[0]

    def scheduled(self, step: int) -> WorldShape | None:
        """The shape that the world must have for the step after `step`; None: any."""
        due = [entry.shape for entry in self.schedule if entry.after_step <= step]
        return due[-1] if due else None

    def next_change(self, step: int) -> int | None:
        """The step after `step` after which the ranks leave, because the schedule names another
        shape then."""
        now = self.scheduled(step)
        coming = (e for e in self.schedule if e.after_step > step and e.shape != now)
        return next((entry.after_step for entry in coming), None)

    def shape_with(self, mesh: Mapping[str, int]) -> WorldShape:
        """The shape with this mesh; the best one if there is none."""
        found = (shape for shape in self.shapes if shape.mesh == mesh)  # a database may sort keys
        return next(found, self.best_shape)
