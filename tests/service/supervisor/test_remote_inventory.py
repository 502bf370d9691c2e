"""Asking the remote tier what it holds: what comes of a question that is not answered."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from holdfast_service.supervisor.remote_inventory import InventoryResult, RemoteInventory
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import StorageDenied

WAIT_S = 20.0


def test_why_there_is_no_answer_is_told_until_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: LocalStorage) -> dict[str, int]:
        raise StorageDenied(self.uri, "access denied")

    found: queue.SimpleQueue[object] = queue.SimpleQueue()
    problems: queue.SimpleQueue[str] = queue.SimpleQueue()
    listing = RemoteInventory(open_storage(str(tmp_path)), found.put, problems.put)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(LocalStorage, "objects", denied)
            assert listing.first(WAIT_S) == InventoryResult()
            assert (listing.answered, "access denied" in listing.problem) == (False, True)
            listing.refresh()
            assert "access denied" in problems.get(timeout=WAIT_S)
        listing.refresh()
        assert found.get(timeout=WAIT_S) == InventoryResult()
        assert listing.answered
    finally:
        listing.close()


def test_a_damaged_manifest_is_told_with_its_step_and_what_is_wrong(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000030.attempt-2"
    folder.mkdir()
    (folder / "manifest.json").write_text("{ torn")
    listing = RemoteInventory(open_storage(str(tmp_path)), lambda _: None, lambda _: None)
    try:
        found = listing.first(WAIT_S)
        assert found.checkpoints == ()
        (damaged,) = found.damaged
        assert (damaged.step, damaged.uri) == (30, str(folder)) and damaged.why
    finally:
        listing.close()
