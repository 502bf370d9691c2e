"""The kernel's counters distinguish kills for lack of memory from other kills."""

from __future__ import annotations

from pathlib import Path

from holdfast_workers.agent.oom_kills import MemoryShortage


def machine(root: Path, *, kills: int, available_kib: int = 8 << 20, group: str = "job") -> None:
    """A machine of 16 GiB whose kernel has killed `kills` processes for lack of memory."""
    for folder in ("proc/self", f"sys/fs/cgroup/{group}"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(f"0::/{group}\n" if group else "4:memory:/x\n")
    (root / "proc/vmstat").write_text(f"nr_free_pages 12\noom_kill {kills}\n")
    meminfo = f"MemTotal: {16 << 20} kB\nMemAvailable: {available_kib} kB\n"
    (root / "proc/meminfo").write_text(meminfo)


def group_counts(root: Path, kills: int, group: str = "job") -> None:
    folder = root / "sys/fs/cgroup" / group
    (folder / "memory.events").write_text(f"low 0\noom 3\noom_kill {kills}\n")
    (folder / "memory.current").write_text(f"{900 << 20}\n")
    (folder / "memory.max").write_text(f"{1 << 30}\n")


def test_a_kill_counted_by_the_control_group_is_attributed_to_memory_once(tmp_path: Path) -> None:
    machine(tmp_path, kills=0)
    group_counts(tmp_path, 2)
    shortage = MemoryShortage(tmp_path)
    assert shortage.explains_kill() == "", "no kill was counted"
    group_counts(tmp_path, 3)
    reason = shortage.explains_kill()
    assert "memory.events of its control group" in reason
    assert "8.59 GB of 17.2 GB available" in reason
    assert "944 MB of 1.07 GB used in its control group" in reason
    assert shortage.explains_kill() == ""


def test_the_count_of_the_machine_is_used_only_without_a_control_group(tmp_path: Path) -> None:
    machine(tmp_path, kills=1)
    group_counts(tmp_path, 0)
    shortage = MemoryShortage(tmp_path)
    machine(tmp_path, kills=2)
    assert shortage.explains_kill() == ""
    bare = tmp_path / "bare"
    machine(bare, kills=1, group="")
    shortage = MemoryShortage(bare)
    machine(bare, kills=2, group="")
    assert "oom_kill of the machine" in shortage.explains_kill()


def test_a_kill_while_almost_no_memory_is_available_is_attributed_to_memory(tmp_path: Path) -> None:
    machine(tmp_path, kills=0, available_kib=1 << 10)
    assert "while memory was short" in MemoryShortage(tmp_path).explains_kill()


def test_no_kill_is_explained_without_evidence_from_the_kernel(tmp_path: Path) -> None:
    assert MemoryShortage(tmp_path).explains_kill() == ""
