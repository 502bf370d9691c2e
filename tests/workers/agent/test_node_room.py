"""The room of a node that a job needs: what is measured, and what is too little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.agent.node_room import NodeRoom, TaskRoom, measure, shortages
from holdfast_workers.memory.memory_room import MemoryRoom
from holdfast_workers.protocol.findings import Level
from holdfast_workers.protocol.node_needs import NodeNeeds

MIB = 1 << 20
AMOUNTS = st.integers(0, 2**40)
KNOWN = st.none() | AMOUNTS


@given(AMOUNTS, AMOUNTS, AMOUNTS, KNOWN, KNOWN, KNOWN)
def test_a_node_is_too_small_exactly_for_what_is_known_to_be_too_little(
    shm: int, ram: int, tasks: int, shm_free: int | None, memory: int | None, free: int | None
) -> None:
    room = NodeRoom(
        shm_free,
        None if memory is None else MemoryRoom("the machine", memory),
        None if free is None else TaskRoom("a limit", free),
    )
    found = shortages(NodeNeeds(shm, ram, tasks), room, "/dev/shm/job")
    pairs = {"shm": (shm, shm_free), "memory": (ram, memory), "tasks": (tasks, free)}
    expected = {
        kind: (needed, there)
        for kind, (needed, there) in pairs.items()
        if there is not None and there < needed
    }
    assert {finding.kind: (finding.needed, finding.there) for finding in found} == expected
    assert all((finding.probe, finding.level) == ("room", Level.UNFIT) for finding in found)


def test_a_reason_has_both_figures() -> None:
    room = NodeRoom(8 * MIB, MemoryRoom("the machine's memory", 10**9), TaskRoom("pids.max", 3))
    found = shortages(NodeNeeds(22_200_000, 2 * 10**9, 26), room, "/dev/shm/job/n1")
    assert [finding.what for finding in found] == [
        "/dev/shm/job/n1 has 8.39 MB free for checkpoints in memory, the job needs at least "
        "22.2 MB",
        "the machine's memory leaves 1 GB free, the job needs at least 2 GB",
        "pids.max leaves 3 processes and threads, the job needs at least 26",
    ]
    assert shortages(NodeNeeds(), NodeRoom(0, MemoryRoom("m", 0), TaskRoom("t", 0)), "f") == ()


def test_what_the_job_itself_has_in_memory_counts_as_free(small_file_system: Path) -> None:
    folder = small_file_system / "job" / "n0"
    assert measure(folder).shm_free == 8 * MIB, "it does not exist yet"
    folder.mkdir(parents=True)
    (folder / "own-0.seg").write_bytes(bytes(3 * MIB))
    (small_file_system / "of-another-job").write_bytes(bytes(MIB))
    assert measure(folder).shm_free == 7 * MIB
    assert measure(small_file_system / "third").shm_free == 4 * MIB


def test_memory_and_processes_are_not_measured_while_ranks_run(tmp_path: Path) -> None:
    room = measure(tmp_path, runs_ranks=True)
    assert room.shm_free is not None
    assert (room.memory, room.tasks) == (None, None)


def test_the_smallest_limit_of_processes_of_all_groups_above_counts(tmp_path: Path) -> None:
    groups = tmp_path / "sys/fs/cgroup"
    for name, limit, used in (("a/b", "max", 7), ("a", "100", 60), ("", "50", 5)):
        (groups / name).mkdir(parents=True, exist_ok=True)
        (groups / name / "pids.max").write_text(f"{limit}\n")
        (groups / name / "pids.current").write_text(f"{used}\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    (tmp_path / "proc/self/mountinfo").write_text(
        "30 23 0:26 / /sys/fs/cgroup rw shared:9 - cgroup2 none rw\n"
    )
    tasks = measure(tmp_path, tmp_path).tasks
    assert tasks == TaskRoom(f"the limit of 100 tasks in {groups / 'a'}", 40)


def test_a_real_limit_of_processes_is_found(tmp_path: Path) -> None:
    group = Path("/sys/fs/cgroup/pids/holdfast-test-room")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("this process may not make a cgroup (version 1) of its own")
    try:
        (group / "pids.max").write_text("30")
        program = (
            "import sys; from pathlib import Path\n"
            "from holdfast_workers.agent.node_room import measure\n"
            "Path(sys.argv[1], 'cgroup.procs').write_text('0')\n"
            "print(measure(Path('/x')).tasks)"
        )
        ran = subprocess.run(
            [sys.executable, "-c", program, str(group)], capture_output=True, text=True, check=True
        )
        assert "the limit of 30 tasks" in ran.stdout and "free=29" in ran.stdout, ran.stdout
    finally:
        group.rmdir()
