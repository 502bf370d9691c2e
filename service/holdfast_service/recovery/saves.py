"""The remote tier's books: which ranks' shards of which step are durable, and which checkpoints
are finished.

Promises: a checkpoint is finalized only from shards of one attempt and one step, all ranks; what
an attempt left incomplete dies with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast_service.registry import Line, RemoteCheckpoint


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


class RemoteSaves:
    def __init__(self, world_size: int, remotes: Iterable[RemoteCheckpoint]) -> None:
        self._world_size = world_size
        self._shards: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
        self._finished: set[tuple[int, int]] = set()
        self.pending: dict[tuple[int, int], Pending] = {}
        self.remotes: dict[str, RemoteCheckpoint] = {one.uri: one for one in remotes}
        self.bad_uris: set[str] = set()
        self.announced: set[str] = set()
        """Checkpoints that an event has told of."""

    def add(self, attempt: int, step: int, rank: int, record: dict[str, Any]) -> None:
        """One rank's shard is durable."""
        key = (attempt, step)
        if key in self._finished or key in self.pending or not 0 <= rank < self._world_size:
            return
        shards = self._shards.setdefault(key, {})
        shards[rank] = record
        if len(shards) == self._world_size:
            records = tuple(shards[rank] for rank in sorted(shards))
            self.pending[key] = Pending(attempt, step, records)
            del self._shards[key]

    def drop_incomplete(self) -> None:
        """The attempt has ended: what is not complete will never be."""
        self._shards.clear()

    def drop(self, attempt: int, step: int) -> None:
        """This one cannot be completed."""
        self._shards.pop((attempt, step), None)
        self.pending.pop((attempt, step), None)

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

    def has_final(self, steps: int, line: Line) -> bool:
        """Whether the state after the last step is durable, as part of history."""
        return any(
            one.step == steps and one.uri not in self.bad_uris and line.holds(one.attempt, one.step)
            for one in self.remotes.values()
        )
