"""The facts of a node are read from the machine, and from control groups of either version."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast_workers import build
from holdfast_workers.health import node_facts
from holdfast_workers.health.node_facts import clock_offset_s, connect_problem, measure


def test_this_machine_is_measured(tmp_path: Path) -> None:
    facts = measure(tmp_path / "memory", tmp_path / "cache")
    assert facts.build == build.LOADED
    assert facts.cpus == len(os.sched_getaffinity(0))
    assert {name for name, _ in facts.packages} >= {"ray", "torch"}
    assert facts.memory_total and facts.shared_free and facts.cache_free and facts.open_files
    assert (facts.memory_problem, facts.cache_problem) == ("", "")
    assert not [*tmp_path.iterdir()]  # nothing is left


def test_an_unusable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    facts = measure(tmp_path / "file" / "memory", tmp_path / "file")
    assert "file/memory" in facts.memory_problem
    assert "file" in facts.cache_problem


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_folder_of_another_user_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    os.chown(tmp_path / "memory", 12345, 12345)
    assert "not a folder of user 0" in measure(tmp_path / "memory", tmp_path).memory_problem


def test_the_least_room_for_tasks_counts(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n3:pids:/old\n")
    (tmp_path / "proc/self/mountinfo").write_text(
        "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
        "31 23 0:27 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
    )
    for group, limit, current in (("a/b", "max", 9), ("a", "500", 100), ("pids/old", "300", 50)):
        folder = tmp_path / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pids.max").write_text(f"{limit}\n")
        (folder / "pids.current").write_text(f"{current}\n")
    facts = measure(tmp_path, tmp_path, root=tmp_path)
    assert (facts.tasks_limit, facts.tasks) == (300, 50)


def test_a_connection_is_tried_and_its_failure_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert connect_problem(listener.getsockname(), 60.0) == ""
        port = listener.getsockname()[1]
    assert "refused" in connect_problem(("127.0.0.1", port), 60.0)


def test_the_quickest_answer_tells_the_offset_of_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now, delays = 1000.0, iter((0.3, 0.0, 0.2))
    clock = SimpleNamespace(time=lambda: now, monotonic=lambda: now)
    monkeypatch.setattr(node_facts, "time", clock)

    def ask() -> float:
        nonlocal now
        now += next(delays) / 2
        there = now + 40.0
        now += 0.01
        return there

    offset, error = clock_offset_s(ask, rounds=3)
    assert offset == pytest.approx(39.995)
    assert error == pytest.approx(0.005)
