"""A node's part in the remote tier: savers that write shards, finalizers that publish.

Owns the frozen copies that workers hand over for saving. Tries each until it is durable, superseded
by a newer copy, or given up (`agent/save_backlog.py`): a remote tier that does not answer costs
training nothing. A saver that hangs is killed at its deadline, and its shard counts as refused. A
copy that a worker made but did not hand over, because it died, is removed at the next fence.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.save_backlog import QueuedCopy, SaveBacklog
from holdfast_workers.agent.signal_sender import SignalSender
from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc import linux_processes
from holdfast_workers.ipc.children import Child, ChildProcesses, ZygoteFailed
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.ipc.linux_processes import ProcessEnd
from holdfast_workers.memory import frozen_copies
from holdfast_workers.memory.segment import Commit, Segment
from holdfast_workers.protocol.answers import PublishedCheckpoint
from holdfast_workers.protocol.commands import FinalizeCheckpoint
from holdfast_workers.protocol.processes import FinalizerJob, FrozenCopy, StorageRefusal
from holdfast_workers.protocol.signals import (
    FailedShard,
    ShardDelayed,
    ShardFailed,
    ShardRecord,
    ShardSaved,
    SignalDetail,
)

KEPT_SHARDS = 256
_log = structlog.get_logger()


class RemoteTierRefused(WorkersError):
    """The remote tier refuses a checkpoint for now; it may accept it later."""


@dataclass
class _Saver:
    child: Child
    limit_s: float
    deadline: float
    outcome: ShardRecord | StorageRefusal | None = None
    killed: bool = False


class RemoteSaves:
    """Thread-safe. A thread of its own starts the savers that are due, and kills those that are
    late."""

    def __init__(
        self,
        config: AgentConfig,
        root: Path,
        child_processes: ChildProcesses,
        signals: SignalSender,
    ) -> None:
        self._config = config
        self._root = root
        self._child_processes = child_processes
        self._signals = signals
        self._io: NodeIO | None = None
        self._changed = threading.Condition()
        self._backlog = SaveBacklog()
        self._copies: dict[str, QueuedCopy] = {}
        self._savers: dict[str, _Saver] = {}  # by the path of their copies
        self._shards: list[ShardRecord] = []
        self._failed: list[FailedShard] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="remote-saves", daemon=True)

    def start(self, io: NodeIO) -> None:
        self._io = io
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    @property
    def shards(self) -> tuple[ShardRecord, ...]:
        """Durable shards that are not known to be in a manifest."""
        with self._changed:
            return tuple(self._shards)

    @property
    def failed_shards(self) -> tuple[FailedShard, ...]:
        """The shards given up last."""
        with self._changed:
            return tuple(self._failed)

    @property
    def saving(self) -> tuple[tuple[int, int, int], ...]:
        """(rank, attempt, step) of the copies that are being saved or wait to be saved."""
        with self._changed:
            return tuple(sorted(copy.shard for copy in self._copies.values()))

    def take_over(self, frozen: FrozenCopy) -> None:
        """Take ownership of a copy that a worker made, and queue it."""
        copy = QueuedCopy(frozen)
        with self._changed:
            self._copies[frozen.path] = copy
        self._queue(copy)

    def save_held(self, rank: int, segment: Segment, commit: Commit) -> None:
        """Freeze and save a commit of this node's memory, on behalf of a lost node.

        Does nothing if that shard is being saved or is durable. Raises Overwritten if a newer state
        overwrites the commit meanwhile, and SegmentSpaceError.
        """
        path = frozen_copies.copy_path(self._root, rank, commit.step, commit.attempt)
        copy = QueuedCopy(FrozenCopy(str(path), rank, commit.attempt, commit.step))
        with self._changed:
            durable = ((shard.rank, shard.attempt, shard.step) for shard in self._shards)
            if copy.frozen.path in self._copies or copy.shard in durable:
                return
            self._copies[copy.frozen.path] = copy  # from now on no fence removes it
        try:
            frozen_copies.freeze(path, segment, commit)
        except BaseException:
            self._remove(copy)
            raise
        self._queue(copy)

    def on_message(self, frozen: FrozenCopy, outcome: ShardRecord | StorageRefusal) -> None:
        """Handle a saver's message: its shard is durable, or the storage refused it."""
        with self._changed:
            self._savers[frozen.path].outcome = outcome
            if isinstance(outcome, ShardRecord):
                self._shards = [*self._shards, outcome][-KEPT_SHARDS:]
        if isinstance(outcome, ShardRecord):
            self._signals.send(ShardSaved(outcome), outcome.attempt, outcome.rank)

    def on_exit(self, frozen: FrozenCopy, end: ProcessEnd) -> None:
        """Handle the end of a saver's process."""
        with self._changed:
            saver = self._savers.pop(frozen.path)
            outcome = saver.outcome
            copy = self._copies[frozen.path]
            if isinstance(outcome, ShardRecord):
                self._backlog.saved(copy)
        match outcome:
            case ShardRecord():
                self._remove(copy)
            case StorageRefusal(message=message):
                self._refused(copy, message, late=saver.killed)  # reported when it was killed
            case None:
                self._crashed(copy, f"the saver ended by {end}")
        with self._changed:
            self._changed.notify_all()

    def finalize(self, command: FinalizeCheckpoint, io: NodeIO) -> PublishedCheckpoint:
        """Publish a checkpoint; returns its folder and size.

        Raises RemoteTierRefused, ZygoteFailed, TimeoutError, or ChildProcessError with the
        finalizer's log.
        """
        name = f"finalizer-{command.step}"
        child = self._child_processes.fork(name, FinalizerJob(command))
        answer: PublishedCheckpoint | StorageRefusal = io.await_answer(
            child, self._config.plan.timeouts.publish_s
        )
        if isinstance(answer, StorageRefusal):
            raise RemoteTierRefused(answer.message)
        done = (command.step, command.attempt)
        with self._changed:
            self._shards = [s for s in self._shards if (s.step, s.attempt) != done]
        return answer

    def fence(self, attempt: int) -> None:
        """Call when no worker of an older attempt is left: removes the copies that they did not
        hand over. Copies that they did hand over are still saved; the supervisor decides whether
        they are published."""
        with self._changed:
            taken = set(self._copies)
        for path in self._root.glob(frozen_copies.PATTERN):
            if str(path) not in taken and frozen_copies.attempt_of(path) < attempt:
                path.unlink(missing_ok=True)
        self._remove_unfinished()

    def remove_leftovers(self) -> None:
        """Remove files that processes of an earlier incarnation of this agent left."""
        for path in self._root.glob(frozen_copies.PATTERN):
            path.unlink(missing_ok=True)
        self._remove_unfinished()

    def _queue(self, copy: QueuedCopy) -> None:
        with self._changed:
            superseded = self._backlog.add(copy)
            self._changed.notify_all()
        if superseded is not None:
            self._give_up(superseded, "superseded by a newer step", superseded=True)

    def _run(self) -> None:
        while True:
            with self._changed:
                due = self._backlog.start_due(time.monotonic())
                if not due and not self._closing:
                    until = self._next_due()
                    self._changed.wait(None if until is None else until - time.monotonic())
                if self._closing:
                    return
                late = self._end_late(time.monotonic())
            for copy, why in late:
                self._send_signal(ShardDelayed(copy.frozen.step, why), copy)
            for copy in due:
                self._save(copy)

    def _next_due(self) -> float | None:
        times = [saver.deadline for saver in self._savers.values() if not saver.killed]
        if (start_at := self._backlog.next_due()) is not None:
            times.append(start_at)
        return min(times, default=None)

    def _end_late(self, now: float) -> list[tuple[QueuedCopy, str]]:
        """Kill the savers that are late; returns their copies. One that waits for a dead mount ends
        only when that answers, and its copy is retried only then."""
        late = []
        for path, saver in self._savers.items():
            if saver.deadline <= now and not saver.killed:
                why = f"not saved within {saver.limit_s:.0f} s: does the storage hang?"
                saver.outcome = saver.outcome or StorageRefusal(why)
                saver.killed = True
                saver.child.kill()
                late.append((self._copies[path], why))
        return late

    def _save(self, copy: QueuedCopy) -> None:
        """Fork the saver of a shard; signals report how it ends."""
        assert self._io is not None
        frozen = copy.frozen
        try:
            nbytes = Path(frozen.path).stat().st_size
            child = self._child_processes.fork(f"saver-{frozen.rank}", frozen)
        except (ZygoteFailed, OSError) as error:
            _log.exception("cannot start a saver", rank=frozen.rank, step=frozen.step)
            self._crashed(copy, str(error))
            return
        slowest = self._config.slowest_save_bytes_per_s
        limit_s = self._config.plan.timeouts.save_s + nbytes / slowest
        with self._changed:
            self._savers[frozen.path] = _Saver(child, limit_s, time.monotonic() + limit_s)
        self._io.watch(child)

    def _refused(self, copy: QueuedCopy, why: str, *, late: bool) -> None:
        with self._changed:
            given_up = self._backlog.refused(copy, time.monotonic(), random.random())
        if copy.refusals == 1 and not late:
            self._send_signal(ShardDelayed(copy.frozen.step, why), copy)
        if given_up is not None:
            self._give_up(copy, f"superseded by a newer step: {why}", superseded=True)

    def _crashed(self, copy: QueuedCopy, why: str) -> None:
        with self._changed:
            given_up = self._backlog.crashed(copy, time.monotonic())
        if given_up is not None:
            self._give_up(copy, why)

    def _give_up(self, copy: QueuedCopy, why: str, *, superseded: bool = False) -> None:
        self._remove(copy)
        rank, attempt, step = copy.shard
        failed = FailedShard(step, why, superseded, rank=rank, attempt=attempt)
        with self._changed:
            self._failed = [*self._failed, failed][-KEPT_SHARDS:]
        self._send_signal(ShardFailed(step, why, superseded), copy)

    def _send_signal(self, detail: SignalDetail, copy: QueuedCopy) -> None:
        self._signals.send(detail, copy.frozen.attempt, copy.rank)

    def _remove(self, copy: QueuedCopy) -> None:
        Path(copy.frozen.path).unlink(missing_ok=True)
        with self._changed:
            self._copies.pop(copy.frozen.path, None)

    def _remove_unfinished(self) -> None:
        """Remove segments whose creator died before it gave them their name."""
        for path in (*self._root.glob(".*.seg.*.new"), *self._root.glob("*/.*.seg.*.new")):
            creator = int(path.suffixes[-2].removeprefix("."))
            if not linux_processes.is_alive(creator):
                path.unlink(missing_ok=True)
