"""Folders for their owner alone, whatever the umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_workers.node_cache.cached_file import cached_file
from holdfast_workers.private_files import make_private_folder


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_each_folder_that_is_made_is_private(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "a" / "b")
    assert [_mode(tmp_path / name) for name in ("a", "a/b")] == [0o700, 0o700]


def test_a_folder_that_exists_stays_as_it_is(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o770)
    make_private_folder(shared / "own")
    assert [_mode(shared), _mode(shared / "own")] == [0o770, 0o700]


def test_a_cache_is_private(tmp_path: Path) -> None:
    cached_file(tmp_path / "cache", "tokens", "key", [b"content"])
    assert _mode(tmp_path / "cache") == 0o700


def _mode(folder: Path) -> int:
    return folder.stat().st_mode & 0o7777
