"""Which frozen copies a node still owes to the remote tier, and when to try them. Pure.

Of each rank at most one copy is being saved and one waits. A newer copy takes the place of the
one that waits: when the remote tier answers again after a long time, every rank of the job saves
its newest copy, and these are all of one step. A save that the storage did not take is tried
again for ever, ever more rarely; one whose process died, a few times.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
CRASHES = 3
"""A saver that ends as often without a word is not started again for this copy."""


@dataclass
class Copy:
    """One rank's state at one step, frozen in the file at `path`."""

    path: str
    rank: int
    attempt: int
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the step, for the manifest."""
    refusals: int = 0
    """How often the storage did not take it."""
    crashes: int = 0
    due_at: float = 0.0

    @property
    def shard(self) -> tuple[int, int, int]:
        """Which part of which checkpoint it is a copy of: (rank, attempt, step)."""
        return (self.rank, self.attempt, self.step)


class Backlog:
    """Times are seconds of one clock. Whoever gets a copy back owns its file again."""

    def __init__(self) -> None:
        self._running: dict[int, Copy] = {}
        self._waiting: dict[int, Copy] = {}

    @property
    def paths(self) -> set[str]:
        return {copy.path for copy in (*self._running.values(), *self._waiting.values())}

    def add(self, copy: Copy) -> Copy | None:
        """One more copy to save; the one that is superseded: of two that wait, the older."""
        waiting = self._waiting.get(copy.rank)
        if waiting is not None and waiting.shard > copy.shard:
            return copy
        self._waiting[copy.rank] = copy
        return waiting

    def start_due(self, now: float) -> list[Copy]:
        """The copies whose saving is to begin now."""
        due = [
            copy
            for rank, copy in self._waiting.items()
            if copy.due_at <= now and rank not in self._running
        ]
        for copy in due:
            self._running[copy.rank] = self._waiting.pop(copy.rank)
        return due

    def next_due(self) -> float | None:
        """When `start_due` has something, unless a save ends or a copy comes before."""
        return min(
            (copy.due_at for rank, copy in self._waiting.items() if rank not in self._running),
            default=None,
        )

    def saved(self, copy: Copy) -> None:
        self._running.pop(copy.rank, None)

    def refused(self, copy: Copy, now: float, jitter: float) -> Copy | None:
        """The storage did not take it; `jitter` is from 0 to 1. Returns the copy if it is given
        up, because a newer one waits."""
        copy.refusals += 1
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(copy.refusals - 1, 10))
        return self._again(copy, now + pause_s * (0.5 + jitter / 2))

    def crashed(self, copy: Copy, now: float) -> Copy | None:
        """Its saver ended without a word. Returns the copy if it is given up."""
        copy.crashes += 1
        if copy.crashes >= CRASHES:
            self._running.pop(copy.rank, None)
            return copy
        return self._again(copy, now)

    def _again(self, copy: Copy, due_at: float) -> Copy | None:
        self._running.pop(copy.rank, None)
        if copy.rank in self._waiting:
            # What stands in for it need not wait longer than it would have.
            self._waiting[copy.rank].due_at = max(self._waiting[copy.rank].due_at, due_at)
            return copy
        copy.due_at = due_at
        self._waiting[copy.rank] = copy
        return None
