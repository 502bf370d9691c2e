"""What the recovery core is told once, for the life of a job."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_service.registry import RemoteCheckpoint


@dataclass(frozen=True)
class RecoveryConfig:
    """Sizes, budgets and deadlines. All times in seconds; every wait of the core has one here."""

    mesh: dict[str, int]
    world_size: int
    workers_per_node: int
    standby_nodes: int
    steps: int
    memory_every_steps: int = 1
    max_failures: int = 20
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
    adopt_timeout_s: float = 10.0
    """How long a restarted supervisor waits for every agent's report before it forms anew."""
    finalize_attempts: int = 3
    remotes: tuple[RemoteCheckpoint, ...] = ()

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
