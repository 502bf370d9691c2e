"""The queue of frozen copies that a node has yet to save to the remote tier, with retries. Pure.

For each rank at most one copy is being saved and one waits. While an attempt runs, no rank makes a
copy while another waits (`training/remote_save_schedule.py`), except of the last step. That copy,
or the first copy of a new attempt, replaces the waiting copy. A save that the storage refused is
retried without end, with growing pauses; a save whose process died is retried a few times.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_workers.protocol.processes import FrozenCopy

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
CRASHES = 3
"""The number of savers that may end without a message before the copy is given up."""


@dataclass
class QueuedCopy:
    """A frozen copy, and how its saving went so far."""

    frozen: FrozenCopy
    refusals: int = 0
    """How often the storage refused it."""
    crashes: int = 0
    due_at: float = 0.0

    @property
    def rank(self) -> int:
        return self.frozen.rank

    @property
    def shard(self) -> tuple[int, int, int]:
        """The shard that this is a copy of: (rank, attempt, step)."""
        return (self.frozen.rank, self.frozen.attempt, self.frozen.step)


class SaveBacklog:
    """Times are seconds of one clock. A caller that gets a copy back owns its file again."""

    def __init__(self) -> None:
        self._running: dict[int, QueuedCopy] = {}
        self._waiting: dict[int, QueuedCopy] = {}

    @property
    def paths(self) -> set[str]:
        return {copy.frozen.path for copy in (*self._running.values(), *self._waiting.values())}

    def add(self, copy: QueuedCopy) -> QueuedCopy | None:
        """Queue a copy. Returns the superseded copy: of two that wait, the older."""
        waiting = self._waiting.get(copy.rank)
        if waiting is not None and waiting.shard > copy.shard:
            return copy
        self._waiting[copy.rank] = copy
        return waiting

    def start_due(self, now: float) -> list[QueuedCopy]:
        """Mark the copies that are due as running, and return them."""
        due = [
            copy
            for rank, copy in self._waiting.items()
            if copy.due_at <= now and rank not in self._running
        ]
        for copy in due:
            self._running[copy.rank] = self._waiting.pop(copy.rank)
        return due

    def next_due(self) -> float | None:
        """When `start_due` will next return a copy, unless a save ends or a copy is added
        earlier."""
        return min(
            (copy.due_at for rank, copy in self._waiting.items() if rank not in self._running),
            default=None,
        )

    def saved(self, copy: QueuedCopy) -> None:
        self._running.pop(copy.rank, None)

    def refused(self, copy: QueuedCopy, now: float, jitter: float) -> QueuedCopy | None:
        """Record that the storage refused a copy; `jitter` is from 0 to 1. Returns the copy if it
        is given up because a newer copy waits."""
        copy.refusals += 1
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(copy.refusals - 1, 10))
        return self._requeue(copy, now + pause_s * (0.5 + jitter / 2))

    def crashed(self, copy: QueuedCopy, now: float) -> QueuedCopy | None:
        """Record that a copy's saver ended without a message. Returns the copy if it is given
        up."""
        copy.crashes += 1
        if copy.crashes >= CRASHES:
            self._running.pop(copy.rank, None)
            return copy
        return self._requeue(copy, now)

    def _requeue(self, copy: QueuedCopy, due_at: float) -> QueuedCopy | None:
        self._running.pop(copy.rank, None)
        if copy.rank in self._waiting:
            # The newer copy must wait at least as long as this copy would have.
            self._waiting[copy.rank].due_at = max(self._waiting[copy.rank].due_at, due_at)
            return copy
        copy.due_at = due_at
        self._waiting[copy.rank] = copy
        return None
