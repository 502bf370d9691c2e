"""The record of saved states: durable shards by step, finished checkpoints, and bad copies; and the
save intervals, with the measurements from which they are chosen.

Invariants: a checkpoint is finalized only from the shards of all ranks of a single attempt and
step; a checkpoint that any rank has abandoned is abandoned for all ranks; a copy that is known to
be bad is never restored again. `recovery/upkeep/save_intervals.py` decides the intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast_service.placement.restore_points import BadCopy, HistoryLine, RemoteCheckpoint
from holdfast_service.policy.checkpoint_intervals import (
    AutoTier,
    IntervalChoice,
    SaveCosts,
    needed_remote_tier,
)
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.worlds import Worlds
from holdfast_workers.protocol.messages import StepRow
from holdfast_workers.protocol.signals import ShardRecord

CheckpointKey = tuple[int, int]
"""(attempt, step)"""
ShardOrder = tuple[str, str, int, int, int]
"""Agent, incarnation, rank, attempt, step."""


@dataclass(frozen=True)
class PendingManifest:
    """A checkpoint whose shards are all durable and whose manifest is not yet known to be."""

    attempt: int
    step: int
    agent: str | None = None
    """The agent ordered to write the manifest; None: not yet assigned, or the agent was lost."""
    failures: int = 0
    last: str = ""
    """The agent that failed last; another agent is preferred."""
    refusals: int = 0
    not_before: float = 0.0
    """When to retry after the remote tier refused the manifest."""


class SaveLedger:
    """Durable shards, pending manifests, finished checkpoints and bad copies of a job."""

    def __init__(self, remotes: Iterable[RemoteCheckpoint]) -> None:
        self._shards: dict[CheckpointKey, set[int]] = {}
        """The ranks whose shards are durable."""
        self._finished: set[CheckpointKey] = set()
        self._given_up: set[CheckpointKey] = set()
        self._requested_shards: set[ShardOrder] = set()
        self.pending: dict[CheckpointKey, PendingManifest] = {}
        self.remotes: dict[str, RemoteCheckpoint] = {
            checkpoint.uri: checkpoint for checkpoint in remotes
        }
        self.tidying: int | None = None
        """The step of the last order to tidy the remote tier, until its result is reported."""
        self.known = True
        """Whether `remotes` is the present content of the remote tier; False until it answers."""
        self.problem = ""
        """Why the remote tier has not answered, if known."""
        self.bad_uris: frozenset[str] = frozenset()
        self.announced: frozenset[str] = frozenset()
        """URIs of checkpoints for which an event was emitted."""
        self.bad_copies: frozenset[BadCopy] = frozenset()
        """Copies in memory that are never restored again."""
        self.doubted_copies: frozenset[BadCopy] = frozenset()
        """Copies that are restored only if there is no other state."""

    def record_shards(
        self, shards: Iterable[ShardRecord], line: HistoryLine, worlds: Worlds
    ) -> None:
        """Record that shards of ranks are durable. A shard of an ended attempt counts while its
        step is on the present `line`: a save continues after its worker has died."""
        for shard in shards:
            key = (shard.attempt, shard.step)
            world_size = worlds.shape_of(shard.attempt).world_size
            if self._is_settled(key) or not 0 <= shard.rank < world_size:
                continue
            if not line.contains(*key, formed_too=True):
                continue
            ranks = self._shards.setdefault(key, set())
            ranks.add(shard.rank)
            if len(ranks) == world_size:
                self.pending[key] = PendingManifest(*key)
                del self._shards[key]

    def incomplete(self, saving: Iterable[tuple[int, int, int]]) -> dict[CheckpointKey, set[int]]:
        """(attempt, step) of unfinished checkpoints → the ranks whose shards are durable or, as
        listed in `saving`, still being saved."""
        covered = {key: set(shards) for key, shards in self._shards.items()}
        for rank, *key in saving:
            if not self._is_settled((key[0], key[1])):
                covered.setdefault((key[0], key[1]), set()).add(rank)
        return covered

    def request_shard(self, order: ShardOrder) -> bool:
        """Record the order to save a lost rank's shard. False if it was given before."""
        is_news = order not in self._requested_shards
        self._requested_shards.add(order)
        return is_news

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

    def has_given_up(self, attempt: int, step: int) -> bool:
        """Whether the checkpoint was abandoned."""
        return (attempt, step) in self._given_up

    def unfinished(self) -> tuple[tuple[int, int], ...]:
        """(step, attempt) of checkpoints that may still be published."""
        return tuple((step, attempt) for attempt, step in (*self._shards, *self.pending))

    def next_retry_at(self) -> float | None:
        """When to retry the next manifest that the remote tier refused."""
        refused = [pending.not_before for pending in self.pending.values() if pending.agent is None]
        return min(refused, default=None)

    def assign(self, attempt: int, step: int, agent: str) -> None:
        """The agent is ordered to write the manifest."""
        self._change_pending((attempt, step), agent=agent)

    def record_refusal(
        self, attempt: int, step: int, now: float, *, pause_s: float, longest_pause_s: float
    ) -> None:
        """The remote tier refused the manifest: retry after a pause that doubles each time."""
        pending = self._unassign((attempt, step))
        wait_s = min(pause_s * 2.0 ** min(pending.refusals, 10), longest_pause_s)
        self._change_pending(
            (attempt, step), refusals=pending.refusals + 1, not_before=now + wait_s
        )

    def record_failure(self, attempt: int, step: int, max_failures: int) -> bool:
        """The agent failed to write the manifest: another one tries. True if that was the last try,
        and the checkpoint is abandoned."""
        pending = self._unassign((attempt, step))
        self._change_pending((attempt, step), failures=pending.failures + 1)
        return pending.failures + 1 >= max_failures and self.abandon(attempt, step)

    def release_agent(self, agent: str) -> None:
        """The agent is lost: unassign the manifests that it was ordered to write."""
        for key, pending in list(self.pending.items()):
            if pending.agent == agent:
                self._unassign(key)

    def record_finished(self, checkpoint: RemoteCheckpoint) -> None:
        """Record that the checkpoint is durable, regardless of its writer."""
        key = (checkpoint.attempt, checkpoint.step)
        self._finished.add(key)
        self.pending.pop(key, None)
        self._shards.pop(key, None)
        self.remotes[checkpoint.uri] = checkpoint

    def record_listing(self, found: Iterable[RemoteCheckpoint]) -> None:
        """The remote tier answered: `found` is its present content."""
        self.known, self.problem = True, ""
        self.remotes = {checkpoint.uri: checkpoint for checkpoint in found}

    def record_unreachable(self, problem: str) -> None:
        """The remote tier does not answer and may hold any checkpoint."""
        self.known, self.problem = False, problem

    def record_deleted(self, uri: str) -> RemoteCheckpoint | None:
        """Retention has deleted the checkpoint; None if it was not known."""
        return self.remotes.pop(uri, None)

    def begin_tidying(self, step: int) -> None:
        """A cleanup is ordered after the checkpoint of `step`."""
        self.tidying = step

    def end_tidying(self, step: int) -> bool:
        """The result of the cleanup for `step` is known. False if a later one is under way."""
        is_last = self.tidying == step
        self.tidying = None if is_last else self.tidying
        return is_last

    def announce(self, uri: str) -> None:
        """An event is emitted for the finished checkpoint."""
        self.announced |= {uri}

    def mark_bad(self, uri: str) -> bool:
        """Never restore this checkpoint again. False if it is known to be bad."""
        is_news = uri not in self.bad_uris
        self.bad_uris |= {uri}
        return is_news

    def mark_bad_copy(self, copy: BadCopy) -> bool:
        """Never restore this copy again. False if it is known to be bad."""
        is_news = copy not in self.bad_copies
        self.bad_copies |= {copy}
        return is_news

    def doubt_copies(self, copies: Iterable[BadCopy]) -> None:
        """Restore these copies only if there is no other state."""
        self.doubted_copies |= frozenset(copies)

    def newest(self, line: HistoryLine) -> RemoteCheckpoint | None:
        """The newest finished checkpoint of the present line."""
        return max(
            self._usable(line),
            key=lambda checkpoint: (checkpoint.step, checkpoint.attempt),
            default=None,
        )

    def has_final(self, steps: int, line: HistoryLine) -> bool:
        """Whether the state after the last step is durable, as part of the present line."""
        return any(checkpoint.step == steps for checkpoint in self._usable(line))

    def restore(self, facts: Facts) -> None:
        """Restore bad and announced checkpoints from the journal."""
        self.bad_copies = facts.bad
        self.bad_uris |= facts.bad_uris
        self.announced |= facts.saved

    def _usable(self, line: HistoryLine) -> list[RemoteCheckpoint]:
        return [
            checkpoint
            for checkpoint in self.remotes.values()
            if checkpoint.uri not in self.bad_uris
            and line.contains(checkpoint.attempt, checkpoint.step)
        ]

    def _is_settled(self, key: CheckpointKey) -> bool:
        return key in self._finished | self._given_up | self.pending.keys()

    def _unassign(self, key: CheckpointKey) -> PendingManifest:
        """The ordered agent will not write the manifest; another agent is preferred."""
        pending = self.pending[key]
        self._change_pending(key, agent=None, last=pending.agent or "")
        return pending

    def _change_pending(self, key: CheckpointKey, **changes: Any) -> None:
        self.pending[key] = replace(self.pending[key], **changes)


@dataclass
class SaveIntervals:
    """Steps between two saves, per tier, with their costs and the number of restores."""

    steps: Mapping[AutoTier, int]
    measured: frozenset[AutoTier] = frozenset()
    """Tiers whose interval already follows measured costs."""
    costs: SaveCosts = field(default_factory=SaveCosts)
    restores: int = 0
    """Number of incidents that restored a saved state."""
    remote_restores: int = 0
    """Number of those incidents that needed the remote tier."""

    def add_rows(self, rows: Iterable[StepRow]) -> None:
        """Measure the cost of saves in these steps."""
        self.costs.add_rows(rows)

    def measure_again(self) -> None:
        """Forget the measured costs."""
        self.costs = SaveCosts()

    def apply(self, choice: IntervalChoice) -> int:
        """Change the interval of a tier; returns the interval before."""
        before = self.steps[choice.tier]
        self.measured |= {choice.tier}
        self.steps = {**self.steps, choice.tier: choice.every_steps}
        return before

    def count_restore(self, tiers: Iterable[str]) -> None:
        """Count an incident whose recovery restored state from these tiers."""
        self.restores += 1
        self.remote_restores += needed_remote_tier(tiers)

    def restore(self, facts: Facts) -> None:
        """Restore the intervals from the journal."""
        self.steps = {**self.steps, **facts.intervals}
        self.measured |= set(facts.intervals)
        self.restores, self.remote_restores = facts.restores, facts.remote_restores
