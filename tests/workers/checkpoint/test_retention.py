from __future__ import annotations

from pathlib import Path

import pytest
from tests.workers.checkpoint.worlds import save_shards, save_world

from holdfast_workers.checkpoint.manifest import checkpoint_folder, list_checkpoints
from holdfast_workers.checkpoint.retention import quarantine, retain

ONE = {"dp_shard": 1, "tp": 1}


def _steps(root: Path) -> list[int]:
    return [manifest.step for manifest in list_checkpoints(root)]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_world(tmp_path, step, 1, ONE)
    removed = retain(tmp_path, 2, current_attempt=1)
    assert _steps(tmp_path) == [5, 4]
    assert removed == [checkpoint_folder(tmp_path, step, 1) for step in (3, 2, 1)]
    assert retain(tmp_path, 2, current_attempt=1) == []


def test_the_newest_that_verifies_is_kept_beyond_the_rule(tmp_path: Path) -> None:
    for step in range(1, 6):
        folder = save_world(tmp_path, step, 1, ONE).folder
        if step > 2:
            (folder / "__0_0.distcp").write_bytes(b"spoiled")
    retain(tmp_path, 2, current_attempt=1)
    assert _steps(tmp_path) == [5, 4, 2]


def test_leftovers_go_unless_they_may_still_be_written(tmp_path: Path) -> None:
    old = checkpoint_folder(tmp_path, 2, 1)
    current = checkpoint_folder(tmp_path, 3, 2)
    newer = checkpoint_folder(tmp_path, 9, 1)
    for folder in (old, current, newer):
        save_shards(folder, ONE)
    assert retain(tmp_path, 3, current_attempt=2) == []  # nothing complete: nothing is touched
    save_world(tmp_path, 5, 2, ONE)
    assert retain(tmp_path, 3, current_attempt=2) == [old]
    assert current.exists()
    assert newer.exists()


def test_a_quarantined_checkpoint_is_not_listed_and_the_next_one_is(tmp_path: Path) -> None:
    save_world(tmp_path, 1, 1, ONE)
    bad = save_world(tmp_path, 2, 1, ONE)
    target = quarantine(bad.folder, "flipped byte in __0_0.distcp")
    assert _steps(tmp_path) == [1]
    assert "flipped" in (target / "why-bad.txt").read_text()
    again = quarantine(save_world(tmp_path, 2, 1, ONE).folder, "again")
    assert again != target
    assert retain(tmp_path, 1, current_attempt=1) == []


def test_keep_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep"):
        retain(tmp_path, 0, current_attempt=1)
