"""What the recovery core is told once, for the life of a job."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_service.placement.restore_points import Beginning, RemoteCheckpoint
from holdfast_service.policy.checkpoint_intervals import AutoTier


@dataclass(frozen=True)
class RecoveryConfig:
    """Sizes, budgets and deadlines. All times in seconds; every wait of the core has one here."""

    mesh: dict[str, int]
    world_size: int
    workers_per_node: int
    standby_nodes: int
    steps: int
    intervals: tuple[int, int] = (1, 100)
    """Steps between two saves to memory, and to the remote tier, to begin with."""
    auto: frozenset[AutoTier] = frozenset()
    """Of which tiers that is to change with what is measured."""
    overhead_target: float = 0.01
    memory_copies: int = 1
    """Partners that are to keep each rank's memory checkpoints."""
    free_after_s: float = 5.0
    """How long new partners must have been serving before copies of former ones are freed."""
    avoid_link_s: float = 30.0
    """How long a link over which replication failed is taken only where there is no other."""
    max_failures: int = 20
    max_preemptions: int = 100
    max_without_progress: int = 5
    """Attempts in a row that may end without a step beyond the newest one before them."""
    window_s: float = 3600.0
    wait_for_replacement_s: float = 60.0
    start_timeout_s: float = 120.0
    standby_wait_s: float = 3.0
    """How long a start waits for standbys once there are enough training nodes."""
    gather_s: float = 0.005
    communication_wait_s: float = 1.0
    """How long errors of survivors wait for the death that caused them."""
    fence_timeout_s: float = 10.0
    form_timeout_s: float = 120.0
    first_step_timeout_s: float = 900.0
    finish_timeout_s: float = 300.0
    last_tidy_s: float = 30.0
    """How long the end of a job waits for retention to tell what it removed."""
    lease_s: float = 10.0
    """How long ranks may step on whose agent has seen their supervisor end. Longer than its restart
    takes, which is to cost no step. 0: no leases."""
    lease_margin_s: float = 2.0
    """Waited past the end of such a lease, for clocks that differ and for what a supervisor grants
    until it finds its successor."""
    adopt_timeout_s: float = 10.0
    """How long a restarted supervisor waits for every agent's report before it forms anew."""
    inspect_timeout_s: float = 1.5
    """How long agents may take to tell what they see of their ranks."""
    inspect_pause_s: float = 0.25
    """Between two looks that are to agree."""
    inspect_again_s: float = 5.0
    """Until ranks that merely wait are looked at again; doubles."""
    inspect_longest_pause_s: float = 60.0
    check_timeout_s: float = 60.0
    """How long the check of a node that is back in use may take. Its call fails before that."""
    check_pause_s: float = 2.0
    """After a check that did not get through."""
    recheck_wait_s: float = 2.0
    """How long the outcome of a repeated step is waited for when the next step is known."""
    stall_limit_s: float = 600.0
    """How long a running world may make no step, unless a phase may take longer."""
    replace_stragglers: bool = True
    """Whether a rank leaves a node on which it is slower than its peers, if there is a better."""
    straggler_patience_s: float = 60.0
    """How long it must have been."""
    finalize_attempts: int = 3
    finalize_pause_s: float = 1.0
    """After the remote tier has refused a manifest for the first time; doubles."""
    finalize_longest_pause_s: float = 15.0
    remotes: tuple[RemoteCheckpoint, ...] = ()
    beginning: Beginning | None = None
    skipped: tuple[tuple[int, int], ...] = ()
    """Windows of data, half-open, that stand in the ledger already."""

    @property
    def lapse_s(self) -> float | None:
        """How long after a former supervisor's end the ranks of an agent that was not heard since
        are known to step no more; None: never."""
        return self.lease_s + 2 * self.lease_margin_s if self.lease_s else None

    @property
    def nodes(self) -> int:
        """Training nodes: as many as it takes to seat the world."""
        return -(-self.world_size // self.workers_per_node)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that always sit together on one agent, as blocks of consecutive ranks."""
        per_node = self.workers_per_node
        return tuple(
            tuple(range(start, min(start + per_node, self.world_size)))
            for start in range(0, self.world_size, per_node)
        )
