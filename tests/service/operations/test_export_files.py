"""The room that exports take on the server's disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoint.saved_worlds import save_world

from holdfast_service.errors import StorageUnavailable
from holdfast_service.operations.export_files import SHARE, ExportFiles, is_beside
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.storage import Storage

MESH = {"dp_shard": 2, "tp": 2}


@dataclass(frozen=True)
class Disk:
    f_bavail: int
    f_frsize: int = 1


@pytest.fixture
def checkpoint(tmp_path: Path) -> Storage:
    root = LocalStorage(tmp_path / "checkpoints")
    return root.below(save_world(root, 7, 1, MESH).folder)


@pytest.fixture
def files(tmp_path: Path) -> ExportFiles:
    return ExportFiles(tmp_path / "exports")


def export(files: ExportFiles, checkpoint: Storage, token: str) -> int:
    ignored: Any = {"on_total": lambda _: None, "on_read": lambda _: None}
    return files.write(checkpoint, token, open_beside=None, **ignored).nbytes


def test_a_new_export_takes_the_place_of_the_oldest_finished_ones(
    files: ExportFiles, checkpoint: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "exports"
    for number, token in enumerate(("b", "a", "c")):
        export(files, checkpoint, token)
        os.utime(folder / f"{token}.safetensors", ns=(number, number))
    nbytes, on_disk = ((folder / "a.safetensors").stat() for _ in range(2))
    room = SHARE * 3 * nbytes.st_size - 3 * on_disk.st_blocks * 512  # for three, as there are
    monkeypatch.setattr(os, "statvfs", lambda _: Disk(room))
    export(files, checkpoint, "d")
    assert files.tokens() == {"a", "c", "d"}, "the oldest has gone"


def test_an_export_without_room_is_refused_and_takes_nothing(
    files: ExportFiles, checkpoint: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(files, checkpoint, "a")
    status = (tmp_path / "exports/a.safetensors").stat()
    room = SHARE * (status.st_size - 1) - status.st_blocks * 512
    monkeypatch.setattr(os, "statvfs", lambda _: Disk(room))
    with pytest.raises(StorageUnavailable, match=r"needs \d+ bytes; .* may take \d+ ") as refused:
        export(files, checkpoint, "b")
    assert files.tokens() == {"a"}
    assert str(tmp_path) not in str(refused.value)


SET = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("remote", "uri", "is_read"),
    [
        (None, f"/data/tokens/{SET}", True),
        (None, f"/data/weights/{SET}", True),
        (None, f"/data/tokens/{SET}/deeper", False),
        (None, f"/data/tokens/../secrets/{SET}", False),
        (None, f"/data/secrets/{SET}", False),
        (None, f"/other/tokens/{SET}", False),
        (None, f"/tokens/{SET}", False),
        ("s3://bucket/runs/", f"s3://bucket/runs/weights/{SET}", True),
        ("s3://bucket/runs", f"s3://bucket/weights/{SET}", False),
        ("s3://bucket/runs", f"s3://other/runs/weights/{SET}", False),
        ("s3://bucket/runs", f"/data/weights/{SET}", False),
        ("s3://bucket/runs", f"s3://bucket/runs/weights/{SET}\n", False),
    ],
)
def test_an_export_reads_only_sets_in_the_store_of_its_job(
    remote: str | None, uri: str, is_read: bool
) -> None:
    spec = {"checkpoint": {"remote": {"uri": remote}}}
    assert is_beside(uri, spec, Path("/data")) is is_read
