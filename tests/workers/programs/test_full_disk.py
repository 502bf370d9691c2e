"""A disk that is full when a program fails is told as a fact."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast_workers.programs import full_disk


def with_free(blocks: int, flags: int = 0) -> os.statvfs_result:
    """A file system of 1 GB with so many free blocks of 4 KiB."""
    return os.statvfs_result((4096, 4096, 244140, blocks, blocks, 100, 100, 100, flags, 255))


def test_a_full_disk_of_a_folder_in_the_arguments_is_named(tmp_path: Path) -> None:
    arguments = ("train.py", f"--folder={tmp_path}/new/run", "3e-4")
    assert f"{tmp_path}/new/run" in full_disk.places_of(arguments)
    told = full_disk.describe([f"{tmp_path}/new/run"], lambda _: with_free(1))
    assert told == f"; on the node the disk of {tmp_path} is full: 4.1 kB of 1 GB are free"


def test_several_folders_of_a_full_disk_are_one_fact(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert (
        full_disk.describe([str(tmp_path), str(tmp_path / "a")], lambda _: with_free(0)).count(
            "is full"
        )
        == 1
    )


def test_a_disk_with_room_and_one_that_cannot_be_read_are_not_mentioned(tmp_path: Path) -> None:
    def unreadable(_: Path) -> os.statvfs_result:
        raise OSError(5, "Input/output error")

    assert full_disk.describe([str(tmp_path)], lambda _: with_free(244140)) == ""
    assert full_disk.describe([str(tmp_path)], unreadable) == ""


def test_an_image_that_nobody_writes_to_is_not_full(tmp_path: Path) -> None:
    read_only = with_free(0, os.ST_RDONLY | os.ST_NODEV)
    assert full_disk.describe([str(tmp_path)], lambda _: read_only) == ""
