"""What a user's own torch program imports: memory checkpoints for three lines.

    tier = holdfast.torch.tier()
    dcp.save(state, storage_writer=tier.at(step))
    if (step := tier.newest()) is not None:
        dcp.load(state, storage_reader=tier.at(step))

Imports torch, and nothing of the service.
"""

from __future__ import annotations

from pathlib import Path

from holdfast_workers.program_memory.memory_tier import REPLICATION_WAIT_S, TIMEOUT_S, MemoryTier

__all__ = ["MemoryTier", "tier"]


def tier(
    *,
    timeout_s: float = TIMEOUT_S,
    replication_wait_s: float = REPLICATION_WAIT_S,
    fallback: str | Path | None = None,
) -> MemoryTier:
    """The memory tier of this process. Outside of Holdfast it keeps nothing, or what is saved at
    its `at` in the folder `fallback`. Raises LauncherGone.

    `timeout_s` bounds the arrival of a state and every exchange between ranks; a save waits
    `replication_wait_s` for the partners' copies of the last one, and is skipped if they are late.
    """
    return MemoryTier(timeout_s=timeout_s, replication_wait_s=replication_wait_s, fallback=fallback)
