"""Concurrent writers of one name in one process, as in the control plane."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.storage import ObjectExists

CALLS = 300


def test_threads_that_create_the_same_object_do_not_interfere(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)

    def create(number: int) -> None:
        with contextlib.suppress(ObjectExists):
            storage.put_new(f"mark-{number // 8}", b"")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(create, range(CALLS)))
    assert len(storage.objects()) == -(-CALLS // 8)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
