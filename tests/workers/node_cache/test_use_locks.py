"""A file or folder that a process uses is not removed; the use ends with the last process."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import eventually

from holdfast_workers.node_cache import use_locks

USER = """
import os, pathlib, sys
from holdfast_workers.node_cache import use_locks
use_locks.hold(pathlib.Path(sys.argv[1]))
if os.fork():
    os._exit(0)
print("used", flush=True)
sys.stdin.read()
"""
WAIT_S = 60.0


def folder_in(parent: Path) -> Path:
    (parent / "folder" / "below").mkdir(parents=True)
    return parent / "folder"


def test_a_folder_is_in_use_until_the_forks_of_its_user_have_ended(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    command = [sys.executable, "-c", USER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdin is not None and user.stdout is not None
        assert user.stdout.readline() == b"used\n"
        assert user.wait(WAIT_S) == 0
        use_locks.remove_unless_used(folder)
        assert (folder / "below").exists()
        user.stdin.close()

        def is_removed() -> bool:
            use_locks.remove_unless_used(folder)
            return not folder.exists()

        eventually(is_removed, WAIT_S, "the folder stays in use after its last user")


def test_a_folder_is_in_use_until_the_end_of_the_block(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    with use_locks.held(folder), use_locks.held(folder):
        use_locks.remove_unless_used(folder)
        assert folder.exists()
    use_locks.remove_unless_used(folder)
    assert not folder.exists()


def test_a_file_that_is_free_is_locked_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("w") as first:
        assert use_locks.is_free(first)
        with path.open("r") as second:
            assert not use_locks.is_free(second)
    with path.open("r") as second:
        assert use_locks.is_free(second)


def test_a_file_that_is_removed_while_it_is_opened_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / "file", fcntl.flock
    path.touch()

    def removed_before(file: Any, operation: int) -> None:
        monkeypatch.undo()
        assert use_locks.unlink_unless_used(path)
        path.touch()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    with pytest.raises(FileNotFoundError, match="was removed"):
        use_locks.opened(path)
    assert use_locks.unlink_unless_used(path), "nothing uses the new one"


def test_a_file_that_is_kept_for_later_goes_only_for_what_is_used_now(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    descriptors = [use_locks.opened(path) for _ in range(2)]
    use_locks.keep_for_later(descriptors[0])
    assert not use_locks.unlink_unless_used(path), "the other one uses it"
    use_locks.keep_for_later(descriptors[1])
    os.close(descriptors[0])
    assert not use_locks.unlink_unless_used(path, or_kept=True)
    assert use_locks.unlink_unless_used(path)
    path.touch()
    assert use_locks.unlink_unless_used(path, or_kept=True), "nobody keeps the new one"
    os.close(descriptors[1])


def test_where_files_cannot_be_kept_they_stay_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems have no locks of open file descriptions."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    path = tmp_path / "file"
    path.touch()
    descriptor = use_locks.opened(path)
    use_locks.keep_for_later(descriptor)
    assert not use_locks.unlink_unless_used(path)
    os.close(descriptor)
    assert use_locks.unlink_unless_used(path, or_kept=True)
