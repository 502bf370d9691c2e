"""Workers forked from a process that has built the model of their rank, with a real zygote."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.nodes.agent_config import agent_config
from tests.support.nodes.supervised import small_training
from tests.support.waiting import eventually

from holdfast_workers.agent.fork_templates import ForkTemplates
from holdfast_workers.ipc import linux_processes
from holdfast_workers.ipc.children import Child, ChildProcesses
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.ipc.line_budget import LeftOut
from holdfast_workers.ipc.linux_processes import ProcessEnd
from holdfast_workers.progress import beacon
from holdfast_workers.protocol.processes import RankPlace, TemplateJob, WorkerJob

pytestmark = pytest.mark.chaos
MESH = {"dp_shard": 2, "tp": 2}
PLACE = RankPlace.of(MESH, 1)
WAIT_S = 60.0


class Node:
    """A zygote, its templates, and the I/O thread that reports their ends."""

    def __init__(self, root: Path, **training: Any) -> None:
        spec = small_training(**training).model_dump(mode="json")
        config = agent_config(root, training=spec, mesh=MESH)
        self.root = root
        self.child_processes = ChildProcesses(config.zygote_config, WAIT_S, WAIT_S)
        self.templates = ForkTemplates(self.child_processes, "n0.life", WAIT_S, WAIT_S)
        self.gone: list[Child] = []
        self.io = NodeIO(self)
        self.templates.attach(self.io)

    def start(self) -> None:
        linux_processes.become_subreaper()
        self.io.start()
        self.child_processes.start()

    def stop(self) -> None:
        self.templates.stop(WAIT_S)
        for child in forked("hf-worker"):
            child.kill()
        eventually(lambda: not names(), WAIT_S, "all forks to be gone")
        self.io.stop()
        self.child_processes.stop()

    def worker(self, name: str) -> Child:
        """Fork a worker for the place, and wait until it has become one."""
        path = beacon.path_of(self.root, name)
        beacon.create(path)
        child = self.templates.fork(name, WorkerJob(str(path), place=PLACE))
        self.io.watch(child)
        eventually(lambda: psutil.Process(child.pid).name() == "hf-worker", WAIT_S)
        return child

    def on_worker_message(self, name: str, message: object) -> None: ...
    def on_child_message(self, child: Child, message: object) -> None: ...
    def on_child_log(self, child: Child, text: str | LeftOut) -> None: ...
    def on_zygote_exit(self) -> None: ...

    def on_child_exit(self, child: Child, end: ProcessEnd) -> None:
        if isinstance(child.job, TemplateJob):
            self.templates.on_exit(child)
        self.gone.append(child)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    there = Node(tmp_path)
    there.start()
    yield there
    there.stop()


def forked(name: str) -> list[psutil.Process]:
    """Living children of that name. A child may end while they are listed."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == name:
                found.append(child)
    return found


def names() -> list[str]:
    """The names of the forked processes, without the zygote."""
    return [name for name in ("hf-template", "hf-worker") for _ in forked(name)]


@pytest.mark.cell("P6", "template")
def test_a_worker_is_forked_from_its_template_and_from_the_zygote_after_the_template_dies(
    node: Node,
) -> None:
    node.templates.ensure([PLACE])
    node.templates.ensure([PLACE])
    assert names() == ["hf-template"]
    (template,) = forked("hf-template")
    zygote = psutil.Process(node.child_processes.pid)
    assert (zygote.num_threads(), template.num_threads()) == (1, 1)
    first = node.worker("w1")
    assert os.getsid(first.pid) == first.pid
    assert psutil.Process(first.pid).ppid() == os.getpid()
    template.kill()
    eventually(lambda: bool(node.gone), WAIT_S, "the template's end to be reported")
    assert psutil.Process(first.pid).is_running()
    node.worker("w2")
    assert names() == ["hf-worker", "hf-worker"]
    node.templates.ensure([PLACE])
    assert names() == ["hf-template", "hf-worker", "hf-worker"]


def test_a_template_that_stops_answering_is_killed_and_not_used(node: Node) -> None:
    node.templates = ForkTemplates(node.child_processes, "n0.life", WAIT_S, 0.5)
    node.templates.attach(node.io)
    node.templates.ensure([PLACE])
    (template,) = forked("hf-template")
    template.suspend()
    node.worker("w1")
    eventually(lambda: names() == ["hf-worker"], WAIT_S, "the silent template to be killed")


def test_a_template_of_a_place_that_is_no_longer_used_is_given_up(node: Node) -> None:
    other = RankPlace.of(MESH, 0)
    node.templates.ensure([PLACE, other])
    for template in node.templates.keep({other}):
        template.kill()
    eventually(lambda: names() == ["hf-template"], WAIT_S, "one template to be left")
    node.templates.ensure([PLACE, other])
    assert names() == ["hf-template", "hf-template"]


COMPILED = small_training().model.model_copy(update={"compile": True})


@pytest.mark.parametrize(
    "training",
    [
        pytest.param({"model": COMPILED}, id="nothing can be prepared"),
        pytest.param(
            {"recipe": "tests.support.ranks.recipes:StartsThreadAhead"}, id="it has a thread"
        ),
    ],
)
def test_an_unfit_template_is_not_kept(tmp_path: Path, training: dict[str, Any]) -> None:
    node = Node(tmp_path, **training)
    node.start()
    try:
        node.templates.ensure([PLACE])
        eventually(lambda: not names(), WAIT_S, "the unfit template to be gone")
        node.templates.ensure([PLACE])
        assert names() == []
    finally:
        node.stop()
