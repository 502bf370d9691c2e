"""The memory that limits leave free: from files of both versions of cgroups, and a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from holdfast_workers.byte_sizes import size_of
from holdfast_workers.memory.memory_room import MemoryRoom, smallest_room

GIB = 1 << 30
V1 = Path("/sys/fs/cgroup/memory")
LIMIT = 400 << 20

CREATES_TWO_SLOTS = """
import sys
from pathlib import Path
from tests.support.memory.memory_states import layout_of
from holdfast_workers.memory.segment import Segment, SegmentSpaceError
Path(sys.argv[2], "cgroup.procs").write_text("0")
try:
    Segment.create(Path(sys.argv[1]), layout_of((200 << 20,)))
except SegmentSpaceError as error:
    print(error)
"""


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def mount(kind: str, options: str, point: str, within: str = "/") -> str:
    return f"30 23 0:26 {within} {point} rw,nosuid shared:9 - {kind} none {options}\n"


def test_without_any_file_no_limit_is_known(tmp_path: Path) -> None:
    assert smallest_room(tmp_path) is None


def test_the_machine_is_the_limit_where_no_group_has_one(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    2048 kB\n",
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": mount("cgroup2", "rw", "/sys/fs/cgroup"),
            "sys/fs/cgroup/job/memory.max": "max\n",
            "sys/fs/cgroup/job/memory.current": "5\n",
        },
    )
    assert smallest_room(root) == MemoryRoom("the machine's memory", 2 << 20)


def test_the_smallest_room_of_all_groups_above_counts_and_file_cache_is_free(
    tmp_path: Path,
) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": f"MemAvailable: {64 * GIB // 1024} kB\n",
            "proc/self/cgroup": "0::/outer/inner\n",
            "proc/self/mountinfo": mount("cgroup2", "rw", "/sys/fs/cgroup"),
            "sys/fs/cgroup/outer/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/outer/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/outer/memory.stat": f"anon 1\ninactive_file {GIB}\nshmem 7\n",
            "sys/fs/cgroup/outer/inner/memory.max": f"{16 * GIB}\n",
            "sys/fs/cgroup/outer/inner/memory.current": f"{3 * GIB}\n",
        },
    )
    room = smallest_room(root)
    assert room is not None
    assert room.free_bytes == 2 * GIB
    assert room.limit.endswith("/sys/fs/cgroup/outer")


def test_a_container_sees_its_own_group_as_the_root_of_version_1(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/docker/ab\n4:memory:/docker/ab\n0::/\n",
            "proc/self/mountinfo": mount("cgroup", "rw,cpu", "/sys/fs/cgroup/cpu", "/docker/ab")
            + mount("cgroup", "rw,memory", "/sys/fs/cgroup/memory", "/docker/ab"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": "cache 5\ntotal_inactive_file 0\n",
        },
    )
    room = smallest_room(root)
    assert room is not None
    assert room.free_bytes == 0


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A real memory cgroup with a limit, which the file system must let us make."""
    group = (
        next(
            (
                V1 / line.split(":", 2)[2].lstrip("/")
                for line in Path("/proc/self/cgroup").read_text().splitlines()
                if line.split(":")[1] == "memory"
            ),
            V1,
        )
        / f"holdfast-test-{os.getpid()}"
    )
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group
    group.rmdir()


@pytest.mark.seconds
def test_a_checkpoint_beyond_a_containers_limit_is_refused_and_no_process_is_killed(
    limited_group: Path, shm: Path
) -> None:
    path = shm / "own-0.seg"
    done = subprocess.run(
        [sys.executable, "-c", CREATES_TWO_SLOTS, str(path), str(limited_group)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"the memory limit of {size_of(LIMIT)}" in done.stdout
    assert list(shm.iterdir()) == []
