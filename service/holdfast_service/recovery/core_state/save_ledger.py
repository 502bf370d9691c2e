"""The remote tier's books: which ranks' shards of which step are durable, and which checkpoints
are finished.

Promises: a checkpoint is finalized only from shards of one attempt and one step, all ranks; what
one rank has given up is given up for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast_service.placement.restore_points import Line, RemoteCheckpoint


@dataclass
class Pending:
    """All shards are durable; the manifest is not known to be."""

    attempt: int
    step: int
    records: tuple[dict[str, Any], ...]
    agent: str | None = None
    """Who was told to write it; None: nobody yet, or it was lost since."""
    failures: int = 0
    last: str = ""
    """The agent that failed last, to try another one."""
    refusals: int = 0
    not_before: float = 0.0
    """The remote tier did not take it: when to try again."""


class RemoteSaves:
    def __init__(self, world_size: int, remotes: Iterable[RemoteCheckpoint]) -> None:
        self._world_size = world_size
        self._shards: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
        self._finished: set[tuple[int, int]] = set()
        self._given_up: set[tuple[int, int]] = set()
        self.pending: dict[tuple[int, int], Pending] = {}
        self.remotes: dict[str, RemoteCheckpoint] = {one.uri: one for one in remotes}
        self.tidying: int | None = None
        """The step of the last order to tidy the remote tier, until it is carried out."""
        self.known = True
        """Whether `remotes` is what the remote tier holds; it may not have answered yet."""
        self.problem = ""
        """Why it has not, as far as that is known."""
        self.bad_uris: set[str] = set()
        self.announced: set[str] = set()
        """Checkpoints that an event has told of."""
        self.asked: set[tuple[str, str, int, int, int]] = set()
        """Whom we told to save a lost rank's shard: agent, its life, rank, attempt, step."""

    def add(self, attempt: int, step: int, rank: int, record: dict[str, Any]) -> None:
        """One rank's shard is durable."""
        key = (attempt, step)
        if self._is_settled(key) or not 0 <= rank < self._world_size:
            return
        shards = self._shards.setdefault(key, {})
        shards[rank] = record
        if len(shards) == self._world_size:
            records = tuple(shards[rank] for rank in sorted(shards))
            self.pending[key] = Pending(attempt, step, records)
            del self._shards[key]

    def incomplete(self, saving: Iterable[tuple[int, int, int]]) -> dict[tuple[int, int], set[int]]:
        """(attempt, step) of what is being saved → the ranks whose shards are durable or, as
        `saving` says, still on their way."""
        found = {key: set(shards) for key, shards in self._shards.items()}
        for rank, *key in saving:
            if not self._is_settled((key[0], key[1])):
                found.setdefault((key[0], key[1]), set()).add(rank)
        return found

    def keep_only(self, line: Line) -> None:
        """History has changed: what is no part of it any more will not be completed."""
        for key in [key for key in self._shards if not line.holds(*key, formed_too=True)]:
            del self._shards[key]

    def drop(self, attempt: int, step: int) -> bool:
        """This one cannot be completed. False if that was known."""
        key = (attempt, step)
        if key in self._finished or key in self._given_up:
            return False
        self._given_up.add(key)
        self._shards.pop(key, None)
        self.pending.pop(key, None)
        return True

    def unfinished(self) -> tuple[tuple[int, int], ...]:
        """Step and attempt of what may be published yet."""
        return tuple((step, attempt) for attempt, step in (*self._shards, *self.pending))

    def next_try(self) -> float | None:
        """When the next one that the remote tier refused is to be tried again."""
        refused = [one.not_before for one in self.pending.values() if one.agent is None]
        return min(refused, default=None)

    def finished(self, checkpoint: RemoteCheckpoint) -> None:
        """The checkpoint is durable, whoever wrote its manifest."""
        key = (checkpoint.attempt, checkpoint.step)
        self._finished.add(key)
        self.pending.pop(key, None)
        self._shards.pop(key, None)
        self.remotes[checkpoint.uri] = checkpoint

    def release(self, agent: str) -> None:
        """The agent is lost: what it was to finalize, somebody else must."""
        for one in self.pending.values():
            if one.agent == agent:
                one.agent, one.last = None, agent

    def newest(self, line: Line) -> RemoteCheckpoint | None:
        """The newest finished checkpoint of the present history."""
        found = [
            one
            for one in self.remotes.values()
            if one.uri not in self.bad_uris and line.holds(one.attempt, one.step)
        ]
        return max(found, key=lambda one: (one.step, one.attempt), default=None)

    def has_final(self, steps: int, line: Line) -> bool:
        """Whether the state after the last step is durable, as part of history."""
        return any(
            one.step == steps and one.uri not in self.bad_uris and line.holds(one.attempt, one.step)
            for one in self.remotes.values()
        )

    def _is_settled(self, key: tuple[int, int]) -> bool:
        return key in self._finished | self._given_up | self.pending.keys()
