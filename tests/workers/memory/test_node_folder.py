"""Folders of shared memory: private, of one agent at a time, and freed once their node is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.waiting import eventually

from holdfast_workers.memory import node_folder
from holdfast_workers.memory.node_folder import FolderUnusable, NodeFolder, find_orphans

AGENT = """
import sys, time
from pathlib import Path
from holdfast_workers.memory.node_folder import NodeFolder
folder = Path(sys.argv[1])
NodeFolder(folder, folder.parent.parent, int(sys.argv[2])).take()
(folder / "own-0.seg").write_bytes(bytes(100_000))
print("taken", flush=True)
time.sleep(600)
"""
WAIT_S = 60.0


class Machine:
    """A machine whose nodes and agents are real processes."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.processes: list[subprocess.Popen[str]] = []

    def start_node(self) -> subprocess.Popen[str]:
        return self._start(["sleep", "600"])

    def start_agent(self, name: str, node: subprocess.Popen[str]) -> subprocess.Popen[str]:
        agent = self._start([sys.executable, "-c", AGENT, str(self.base / name), str(node.pid)])
        assert agent.stdout is not None and agent.stdout.readline() == "taken\n"
        return agent

    def end(self, process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)

    def folders(self) -> list[str]:
        return sorted(str(path.relative_to(self.base)) for path in self.base.glob("*/*"))

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        self.processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return self.processes[-1]


@pytest.fixture
def machine(shm: Path) -> Iterator[Machine]:
    made = Machine(shm / "holdfast-0")
    yield made
    for process in made.processes:
        process.kill()
        process.wait(WAIT_S)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def newcomer(machine: Machine) -> NodeFolder:
    """The folder of an agent of a new node on the same machine."""
    folder = NodeFolder(machine.base / "job" / "n1-new", machine.base, os.getppid())
    folder.take()
    return folder


def test_the_folder_of_a_former_node_is_freed(machine: Machine, newcomer: NodeFolder) -> None:
    node = machine.start_node()
    agents = [machine.start_agent(name, node) for name in ("job/n0-a", "ended/n0-a")]
    for agent in agents:
        machine.end(agent)
    machine.end(node)
    assert sum(orphan.nbytes() for orphan in find_orphans(machine.base)) >= 200_000
    assert len(newcomer.free_orphans()) == 2
    assert machine.folders() == ["job/n1-new"]
    assert [path.name for path in machine.base.iterdir()] == ["job"]


def test_a_folder_is_kept_while_its_node_lives_and_between_two_of_its_agents(
    machine: Machine, newcomer: NodeFolder
) -> None:
    node = machine.start_node()
    machine.end(machine.start_agent("job/n0-a", node))
    for _ in range(3):
        assert newcomer.free_orphans() == []
    machine.start_agent("job/n0-a", node)
    machine.end(node)
    for _ in range(3):  # an agent may outlive its node by a moment
        assert newcomer.free_orphans() == []
    assert machine.folders() == ["job/n0-a", "job/n1-new"]


def test_an_owner_that_cannot_be_seen_has_the_time_between_two_searches_to_come_back(
    machine: Machine, newcomer: NodeFolder
) -> None:
    folder = machine.base / "job" / "n0-a"
    folder.mkdir()
    owner = folder / node_folder.OWNER_FILE
    owner.write_text("pid:[1] 12 345")
    assert newcomer.free_orphans() == []
    os.utime(owner, ns=(1, 1))  # another incarnation took it, and ended
    assert newcomer.free_orphans() == []
    assert newcomer.free_orphans() == [folder]


def test_folders_of_others_are_left_alone(machine: Machine, newcomer: NodeFolder) -> None:
    unmarked = machine.base / "job" / "n0-a"
    unmarked.mkdir()
    (unmarked / "own-0.seg").write_bytes(b"1")
    strange = machine.base / "job" / "n2-a"
    strange.mkdir()
    (strange / node_folder.OWNER_FILE).write_text("?")
    (machine.base / "job" / "n3-a").symlink_to(strange)
    for _ in range(3):
        assert newcomer.free_orphans() == []
    assert machine.folders() == ["job/n0-a", "job/n1-new", "job/n2-a", "job/n3-a"]


def test_a_folder_has_one_agent_at_a_time(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_folder, "LOCK_S", 0.2)
    node = machine.start_node()
    agent = machine.start_agent("job/n0-a", node)
    folder = NodeFolder(machine.base / "job" / "n0-a", machine.base, node.pid)
    with pytest.raises(FolderUnusable, match="another process uses"):
        folder.take()
    machine.end(agent)
    folder.take()
    folder.remove()
    eventually(lambda: machine.folders() == [], WAIT_S)


def test_the_base_is_private_and_not_of_another_user(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = shm / "holdfast-0"
    base.mkdir(mode=0o755)
    folder = NodeFolder(base / "job" / "n0", base, os.getpid())
    folder.take()
    folder.remove()
    assert base.stat().st_mode & 0o777 == 0o700
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(FolderUnusable, match="not a folder of this user"):
        folder.take()
