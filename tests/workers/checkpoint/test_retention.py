from __future__ import annotations

from typing import Any, cast

import pytest
from tests.support.checkpoint.saved_worlds import save_shards, save_world

from holdfast_workers.checkpoint.manifest import (
    QUARANTINED,
    BadCheckpoint,
    checkpoint_folder,
    list_checkpoints,
)
from holdfast_workers.checkpoint.marks import mark_needed, pin
from holdfast_workers.checkpoint.publish import finalize
from holdfast_workers.checkpoint.retention import quarantine, retain
from holdfast_workers.checkpoint.storage import Storage, write_small
from holdfast_workers.spec import KeepBestSpec, RemoteTierSpec

ONE = {"dp_shard": 1, "tp": 1}


def _steps(root: Storage) -> list[int]:
    return [manifest.step for manifest in list_checkpoints(root)]


def test_every_kth_best_and_marked_checkpoints_are_kept(root: Storage) -> None:
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5, 5: 2.6, 6: 2.7}
    for step, loss in losses.items():
        save_world(root, step, 1, ONE, metrics={"loss": loss})
    pin(root.below(checkpoint_folder(1, 1)))
    mark_needed(root.below(checkpoint_folder(5, 1)), "another-job")
    rules = RemoteTierSpec(keep=1, keep_every=4, keep_best=KeepBestSpec())
    removed = retain(root, rules, current_attempt=1)
    assert list(removed) == [checkpoint_folder(3, 1)]
    assert _steps(root) == [6, 5, 4, 2, 1]
    assert retain(root, rules, current_attempt=1) == {}
    assert checkpoint_folder(3, 1) not in root.folders()


def test_the_newest_checkpoint_that_verifies_is_kept_beyond_the_rule(root: Storage) -> None:
    for step in range(1, 6):
        checkpoint = root.below(save_world(root, step, 1, ONE).folder)
        if step > 2:
            write_small(checkpoint, "__0_0.distcp", b"spoiled")
    retain(root, RemoteTierSpec(keep=2), current_attempt=1)
    assert _steps(root) == [5, 4, 2]


def test_incomplete_folders_are_removed_unless_still_being_written(root: Storage) -> None:
    old, unpublished, current, later = ((2, 1), (3, 1), (4, 2), (9, 3))
    for age in (old, unpublished, current, later):
        save_shards(root.below(checkpoint_folder(*age)), ONE)

    def removed() -> dict[str, str]:
        return retain(root, RemoteTierSpec(), current_attempt=2, unfinished={unpublished})

    assert removed() == {}  # no complete checkpoint: no removal
    save_world(root, 5, 2, ONE)
    assert removed() == {checkpoint_folder(*old): "attempt 1 left it incomplete"}
    kept = {checkpoint_folder(*age) for age in (unpublished, current, later)}
    assert kept <= set(root.folders())


class _Removed:
    """A storage in which a removal proceeds just before the manifest appears."""

    def __init__(self, checkpoint: Storage, harm: str) -> None:
        self._storage, self._harm = checkpoint, harm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def put_new(self, name: str, content: bytes) -> None:
        if self._harm.endswith(".mark"):
            self._storage.put_new(self._harm, b"")
        else:
            self._storage.delete(self._harm)
        self._storage.put_new(name, content)


@pytest.mark.parametrize("harm", ["removing.mark", "__0_0.distcp"])
def test_a_checkpoint_being_removed_is_not_published(root: Storage, harm: str) -> None:
    checkpoint = root.below(checkpoint_folder(7, 1))
    records = save_shards(checkpoint, ONE)
    with pytest.raises(BadCheckpoint, match=harm):
        finalize(cast(Storage, _Removed(checkpoint, harm)), records, ONE, {})
    assert list_checkpoints(root) == []


def test_a_quarantined_checkpoint_is_neither_listed_nor_removed(root: Storage) -> None:
    save_world(root, 1, 1, ONE)
    checkpoint = root.below(save_world(root, 2, 1, ONE).folder)
    quarantine(checkpoint, "flipped byte in __0_0.distcp")
    quarantine(checkpoint, "again")
    assert _steps(root) == [1]
    assert b"flipped" in checkpoint.read(QUARANTINED)
    assert retain(root, RemoteTierSpec(keep=1), current_attempt=1) == {}
    assert checkpoint_folder(2, 1) in root.folders()
