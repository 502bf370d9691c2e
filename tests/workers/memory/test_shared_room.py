"""Agents of one job that share a file system in memory never count the same free space twice."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.agent.node_room import check
from holdfast_workers.memory.node_folder import NodeFolder
from holdfast_workers.memory.shared_room import RoomReservation, promised
from holdfast_workers.protocol.node_needs import NodeNeeds

MIB = 1 << 20
AGENT = """
import os, sys, threading
from pathlib import Path
from holdfast_workers.agent.node_room import check
from holdfast_workers.memory.node_folder import NodeFolder
from holdfast_workers.protocol.node_needs import NodeNeeds

folder = NodeFolder(Path(sys.argv[1]), None, os.getppid())
folder.take()
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "leave":
        folder.remove()
        break
    found = check(Path(sys.argv[1]), NodeNeeds(int(sys.argv[2]), nodes=int(sys.argv[3])))
    print(found[0].what if found else "fits", flush=True)
"""


class AgentProcess:
    def __init__(self, folder: Path, needed: int, nodes: int) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(folder), str(needed), str(nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.answer() == "ready"

    def send(self, order: str = "check") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@given(
    st.integers(0, 100),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 60), st.floats(0.0, 1.0)), max_size=6),
)
def test_the_agents_that_fit_fit_together_in_worlds_of_every_choice_of_them(
    size: int, nodes: int, arrivals: list[tuple[int, float]]
) -> None:
    """They arrive one by one; each soon holds a share of its need."""
    inside: list[RoomReservation] = []
    for needed, share in arrivals:
        free = size - sum(each.held for each in inside)
        if free - promised(inside, nodes) >= needed:
            inside.append(RoomReservation(needed, int(needed * share)))
    for world in combinations(inside, min(nodes, len(inside))):
        assert sum(each.needed for each in world) <= size
    assert promised(inside, 1) == 0, "a job of one node shares nothing"


def test_of_agents_that_look_at_once_so_many_fit_as_the_memory_holds(
    small_file_system: Path,
) -> None:
    agents = [AgentProcess(small_file_system / "job" / f"n{i}", 3 * MIB, 4) for i in range(4)]
    try:
        for agent in agents:
            agent.send()
        answers = {agent.folder.name: agent.answer() for agent in agents}
        inside = [agent for agent in agents if answers[agent.folder.name] == "fits"]
        assert len(inside) == 2, answers
        refused = [answer for answer in answers.values() if answer != "fits"]
        assert all("for nodes of the job that share it" in answer for answer in refused)

        (inside[0].folder / "own-0.seg").write_bytes(bytes(3 * MIB))
        outside = next(agent for agent in agents if agent not in inside)
        for agent, expected in ((inside[0], True), (inside[1], True), (outside, False)):
            agent.send()
            assert (agent.answer() == "fits") is expected, "what is held is not counted twice"

        inside[1].send("leave")
        assert inside[1].answer() == ""
        outside.send()
        assert outside.answer() == "fits", "another has left its room"
    finally:
        for agent in agents:
            agent.end()


def test_a_standby_beside_a_job_of_two_nodes_fits_where_two_nodes_fit(
    small_file_system: Path,
) -> None:
    needs = NodeNeeds(4 * MIB - 64 * 1024, nodes=2)
    with ExitStack() as taken:
        for name in ("n0", "n1", "n2"):
            path = small_file_system / "job" / name
            folder = NodeFolder(path, None, os.getpid())
            folder.take()
            taken.callback(folder.remove)
            assert check(path, needs) == (), name


def test_a_reservation_ends_with_the_node_and_outlives_its_agent(small_file_system: Path) -> None:
    node = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    needs, job = NodeNeeds(5 * MIB, nodes=2), small_file_system / "job"
    program = (
        "import sys; from pathlib import Path\n"
        "from holdfast_workers.memory.node_folder import NodeFolder\n"
        "NodeFolder(Path(sys.argv[1]), None, int(sys.argv[2])).take()"
    )
    second = NodeFolder(job / "n1", None, os.getpid())
    try:
        command = [sys.executable, "-c", program, str(job / "n0"), str(node.pid)]
        subprocess.run(command, check=True)
        assert check(job / "n0", needs) == ()
        second.take()
        (finding,) = check(job / "n1", needs)
        assert finding.kind == "shm"
    finally:
        node.kill()
        node.communicate()
        now = check(job / "n1", needs)
        second.remove()
    assert now == ()
