"""The cache of a node stays below its limit, and keeps what living processes use."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_workers.node_cache import use_locks
from holdfast_workers.node_cache.cached_file import (
    LIMIT_VARIABLE,
    InvalidCacheLimit,
    cache_limit_bytes,
    cached_file,
    make_room,
)

KB = 1000
USER = """
import os, sys
from pathlib import Path
from holdfast_workers.node_cache.cached_file import cached_file

for key in sys.argv[3:]:
    found = cached_file(Path(sys.argv[1]), "tokens", key, [key.encode() * 1000])
    assert found.path.read_bytes() == key.encode() * 1000, "removed before it could be read"
if sys.argv[2] == "fork" and os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, str(2.5 * KB / 1e9))


def user(cache: Path, *keys: str, how: str = "stay") -> subprocess.Popen[str]:
    """A process that uses these files until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", USER, str(cache), how, *keys],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def use(cache: Path, *keys: str) -> None:
    with user(cache, *keys) as process:
        process.communicate()
    assert process.returncode == 0


def kept(cache: Path) -> set[str]:
    return {path.read_text()[:1] for path in cache.glob("tokens-*.bin")}


def test_the_files_of_the_earliest_use_go_first(tmp_path: Path) -> None:
    use(tmp_path, "a", "b")
    use(tmp_path, "a")  # later than b
    use(tmp_path, "c")
    assert kept(tmp_path) == {"a", "c"}
    assert len([*tmp_path.glob("source-*.json")]) == 2
    use(tmp_path, "b")
    assert kept(tmp_path) == {"b", "c"}, "it is built again"


@pytest.mark.seconds
@pytest.mark.parametrize("how", ["stay", "fork"])
def test_a_file_in_use_stays_until_its_last_process_has_ended(tmp_path: Path, how: str) -> None:
    with user(tmp_path, "a", how=how) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        pid = int(process.stdout.readline())
        for key in "bcd":
            use(tmp_path, key)
        assert kept(tmp_path) == {"a", "d"}
        process.stdin.close()
        process.wait(DEADLINE_S)
        eventually(lambda: pid == process.pid or not Path(f"/proc/{pid}").exists())
        use(tmp_path, "e")
    assert kept(tmp_path) == {"d", "e"}


def test_processes_that_use_and_remove_files_at_once_each_find_theirs(tmp_path: Path) -> None:
    rng = random.Random(7)
    running = [user(tmp_path, *rng.choices("abcdefgh", k=30)) for _ in range(4)]
    for process in running:
        process.communicate()
    assert [process.returncode for process in running] == [0] * 4
    use(tmp_path, "i")
    assert len(kept(tmp_path)) <= 2
    assert not [*tmp_path.glob("*.part")]


def test_a_file_system_that_refuses_the_lock_loses_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does on a file that is open for reading."""
    lock = fcntl.flock

    def of_nfs(file: Any, operation: int) -> None:
        if operation & fcntl.LOCK_NB:
            raise OSError(errno.EBADF, "Bad file descriptor")
        lock(file, operation)

    use(tmp_path, "a", "b")
    monkeypatch.setattr(fcntl, "flock", of_nfs)
    cached_file(tmp_path, "tokens", "c", [b"c" * KB])
    assert kept(tmp_path) == {"a", "b", "c"}


def test_a_limit_that_is_no_size_is_named() -> None:
    assert cache_limit_bytes({}) == 100 * 10**9
    assert cache_limit_bytes({LIMIT_VARIABLE: "0"}) == 0
    for setting in ("many", "-1", "nan", "inf"):
        with pytest.raises(InvalidCacheLimit, match=LIMIT_VARIABLE):
            cache_limit_bytes({LIMIT_VARIABLE: setting})


def test_what_is_kept_for_later_goes_last_and_what_comes_counts(tmp_path: Path) -> None:
    paths = [tmp_path / f"shard-{n}.bin" for n in range(4)]
    for use, path in enumerate(paths):
        path.write_bytes(bytes(10))
        os.utime(path, (use, use))
    kept = [use_locks.opened(path) for path in paths[:2]]
    for descriptor in kept:
        use_locks.keep_for_later(descriptor)
    coming = use_locks.lock_unfinished(tmp_path / "shard-9.part")
    assert coming is not None
    os.truncate(coming, 5)
    (tmp_path / "shard-8.part").write_bytes(bytes(100))  # of a process that was killed

    def left() -> list[int]:
        return [use for use, path in enumerate(paths) if path.exists()]

    assert make_room(tmp_path, 45, or_kept=True) == 0
    assert left() == [0, 1, 2, 3]
    assert make_room(tmp_path, 40, or_kept=True) == 0
    assert left() == [0, 1, 3]
    assert make_room(tmp_path, 15, or_kept=True) == 10
    assert left() == [0, 1]
    assert make_room(tmp_path, 15) == 0
    assert left() == [1]
    for descriptor in kept:
        os.close(descriptor)
    assert make_room(tmp_path, 0, or_kept=True) == 5
    assert [path.name for path in tmp_path.glob("shard-*")] == ["shard-9.part"]
    os.close(coming)
    assert make_room(tmp_path, 0) == 0


def test_several_processes_make_room_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "tokens-1.bin").write_bytes(bytes(10))
    with (tmp_path / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert make_room(tmp_path, 5) == 0


def test_room_is_there_or_it_is_said_how_much_is_missing(tmp_path: Path) -> None:
    held, free = tmp_path / "tokens-1.bin", tmp_path / "tokens-2.bin"
    held.write_bytes(bytes(10))
    free.write_bytes(bytes(10))
    with use_locks.held(held):
        with (tmp_path / "build.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # as a process that builds a file
            assert make_room(tmp_path, 17) == 3
        assert free.exists()
        assert make_room(tmp_path, 20) == 0
        assert free.exists()
        assert make_room(tmp_path, 7) == 3
        assert not free.exists()
    assert held.exists()
    assert make_room(tmp_path, 7) == 0
    assert not held.exists()
