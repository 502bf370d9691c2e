"""The records of a node's remote saves, without processes: the copies that it keeps and removes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.memory.shm import content, layout_of, write

from holdfast_workers.agent.remote_saves import RemoteSaves
from holdfast_workers.memory import frozen_copies
from holdfast_workers.memory.segment import Overwritten, Segment
from holdfast_workers.protocol.signals import FailedShard, ShardFailed, SignalDetail

NBYTES = 50_000


@pytest.fixture
def replica(tmp_path: Path) -> Segment:
    return Segment.create(tmp_path / "replica-3.seg", layout_of(NBYTES))


@pytest.fixture
def saves(tmp_path: Path) -> RemoteSaves:
    """Not started: it forks no process."""
    return RemoteSaves(cast(Any, None), tmp_path, cast(Any, None), cast(Any, None))


def test_a_held_commit_is_frozen_once_and_no_fence_removes_it(
    saves: RemoteSaves, replica: Segment, tmp_path: Path
) -> None:
    commit = write(replica, 1, 20)
    for _ in range(2):
        saves.save_held(3, replica, commit)
    write(replica, 2, 21)
    write(replica, 2, 22)  # takes its slot
    saves.fence(3)
    assert saves.saving == ((3, 1, 20),)
    (path,) = tmp_path.glob(frozen_copies.PATTERN)
    with Segment.open(path) as frozen:
        (found,) = frozen.commits()
        assert frozen.verify(found)
        assert bytes(frozen.payload(found)) == content(NBYTES, 1, 20)


def test_a_commit_that_is_overwritten_or_damaged_leaves_no_copy(
    saves: RemoteSaves, replica: Segment, tmp_path: Path
) -> None:
    gone = write(replica, 1, 20)
    write(replica, 1, 21)
    damaged = write(replica, 1, 22)
    with replica.begin(21) as slot:
        slot[:10] = bytes(10)
    damaged = replica.commit(attempt=1, step=23, digest=damaged.digest)
    for commit in (gone, damaged):
        with pytest.raises(Overwritten):
            saves.save_held(3, replica, commit)
    assert saves.saving == ()
    assert not list(tmp_path.glob(frozen_copies.PATTERN))


def test_a_shard_that_was_given_up_is_listed_for_polls(tmp_path: Path, replica: Segment) -> None:
    """Its signal may be lost; the list is what a poll returns."""
    sent: list[SignalDetail] = []
    signals = SimpleNamespace(send=lambda detail, *_: sent.append(detail))
    saves = RemoteSaves(cast(Any, None), tmp_path, cast(Any, None), cast(Any, signals))
    saves.save_held(3, replica, write(replica, 1, 20))
    assert not saves.failed_shards
    saves.save_held(3, replica, write(replica, 1, 21))
    assert saves.failed_shards == (
        FailedShard(20, "superseded by a newer step", superseded=True, rank=3, attempt=1),
    )
    assert sent == [ShardFailed(20, "superseded by a newer step", superseded=True)]
