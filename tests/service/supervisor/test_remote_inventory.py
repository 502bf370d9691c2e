"""Listing the remote tier, also when the listing fails."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from holdfast_service.supervisor.remote_inventory import InventoryResult, RemoteInventory
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import StorageDenied

WAIT_S = 60.0


def test_listing_problems_are_reported_until_the_first_success(
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


def test_a_damaged_manifest_is_reported_with_its_step_and_reason(tmp_path: Path) -> None:
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
