"""The record of saves to the remote tier: durable shards by step, and finished checkpoints.

Invariants: a checkpoint is finalized only from the shards of all ranks of a single attempt and
step; a checkpoint that any rank has abandoned is abandoned for all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast_service.placement.restore_points import HistoryLine, RemoteCheckpoint


@dataclass
class PendingManifest:
    """A checkpoint whose shards are all durable and whose manifest is not yet known to be."""

    attempt: int
    step: int
    records: tuple[dict[str, Any], ...]
    agent: str | None = None
    """The agent ordered to write the manifest; None: not yet assigned, or the agent was lost."""
    failures: int = 0
    last: str = ""
    """The agent that failed last; another agent is preferred."""
    refusals: int = 0
    not_before: float = 0.0
    """When to retry after the remote tier refused the manifest."""


class SaveLedger:
    """Durable shards, pending manifests and finished checkpoints of a job."""

    def __init__(self, world_size: int, remotes: Iterable[RemoteCheckpoint]) -> None:
        self._world_size = world_size
        self._shards: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
        self._finished: set[tuple[int, int]] = set()
        self._given_up: set[tuple[int, int]] = set()
        self.pending: dict[tuple[int, int], PendingManifest] = {}
        self.remotes: dict[str, RemoteCheckpoint] = {
            checkpoint.uri: checkpoint for checkpoint in remotes
        }
        self.tidying: int | None = None
        """The step of the last order to tidy the remote tier, until its result is reported."""
        self.known = True
        """Whether `remotes` is the present content of the remote tier; False until it answers."""
        self.problem = ""
        """Why the remote tier has not answered, if known."""
        self.bad_uris: set[str] = set()
        self.announced: set[str] = set()
        """URIs of checkpoints for which an event was emitted."""
        self.requested_shards: set[tuple[str, str, int, int, int]] = set()
        """Orders to save a lost rank's shard: agent, incarnation, rank, attempt, step."""

    def record_shard(self, attempt: int, step: int, rank: int, record: dict[str, Any]) -> None:
        """Record that a rank's shard is durable."""
        key = (attempt, step)
        if self._is_settled(key) or not 0 <= rank < self._world_size:
            return
        shards = self._shards.setdefault(key, {})
        shards[rank] = record
        if len(shards) == self._world_size:
            records = tuple(shards[rank] for rank in sorted(shards))
            self.pending[key] = PendingManifest(attempt, step, records)
            del self._shards[key]

    def incomplete(self, saving: Iterable[tuple[int, int, int]]) -> dict[tuple[int, int], set[int]]:
        """(attempt, step) of unfinished checkpoints → the ranks whose shards are durable or, as
        listed in `saving`, still being saved."""
        covered = {key: set(shards) for key, shards in self._shards.items()}
        for rank, *key in saving:
            if not self._is_settled((key[0], key[1])):
                covered.setdefault((key[0], key[1]), set()).add(rank)
        return covered

    def keep_only(self, line: HistoryLine) -> None:
        """Forget shards that are not part of `line`: their checkpoints will not be completed."""
        for key in [key for key in self._shards if not line.contains(*key, formed_too=True)]:
            del self._shards[key]

    def abandon(self, attempt: int, step: int) -> bool:
        """Record that a checkpoint cannot be completed. False if that was already known."""
        key = (attempt, step)
        if key in self._finished or key in self._given_up:
            return False
        self._given_up.add(key)
        self._shards.pop(key, None)
        self.pending.pop(key, None)
        return True

    def unfinished(self) -> tuple[tuple[int, int], ...]:
        """(step, attempt) of checkpoints that may still be published."""
        return tuple((step, attempt) for attempt, step in (*self._shards, *self.pending))

    def next_retry_at(self) -> float | None:
        """When to retry the next manifest that the remote tier refused."""
        refused = [pending.not_before for pending in self.pending.values() if pending.agent is None]
        return min(refused, default=None)

    def record_finished(self, checkpoint: RemoteCheckpoint) -> None:
        """Record that the checkpoint is durable, regardless of its writer."""
        key = (checkpoint.attempt, checkpoint.step)
        self._finished.add(key)
        self.pending.pop(key, None)
        self._shards.pop(key, None)
        self.remotes[checkpoint.uri] = checkpoint

    def release_agent(self, agent: str) -> None:
        """The agent is lost: unassign the manifests that it was ordered to write."""
        for pending in self.pending.values():
            if pending.agent == agent:
                pending.agent, pending.last = None, agent

    def newest(self, line: HistoryLine) -> RemoteCheckpoint | None:
        """The newest finished checkpoint of the present line."""
        candidates = [
            checkpoint
            for checkpoint in self.remotes.values()
            if checkpoint.uri not in self.bad_uris
            and line.contains(checkpoint.attempt, checkpoint.step)
        ]
        return max(
            candidates, key=lambda checkpoint: (checkpoint.step, checkpoint.attempt), default=None
        )

    def has_final(self, steps: int, line: HistoryLine) -> bool:
        """Whether the state after the last step is durable, as part of the present line."""
        return any(
            checkpoint.step == steps
            and checkpoint.uri not in self.bad_uris
            and line.contains(checkpoint.attempt, checkpoint.step)
            for checkpoint in self.remotes.values()
        )

    def _is_settled(self, key: tuple[int, int]) -> bool:
        return key in self._finished | self._given_up | self.pending.keys()
