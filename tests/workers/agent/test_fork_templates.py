"""Workers forked from a process that has built for their rank, on a real zygote."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.nodes.agent_config import agent_config
from tests.support.nodes.supervised import small_training
from tests.support.waiting import eventually

from holdfast_workers.agent.fork_templates import Place, Templates
from holdfast_workers.ipc import linux_processes
from holdfast_workers.ipc.children import Brood, Child
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.progress import beacon

pytestmark = pytest.mark.chaos
MESH = {"dp_shard": 2, "tp": 2}
PLACE = Place.of({"mesh": MESH, "rank": 1})
WAIT_S = 30.0


class Node:
    """A zygote, its templates, and the thread that sees them end."""

    def __init__(self, root: Path, **training: Any) -> None:
        spec = small_training(**training).model_dump(mode="json")
        config = agent_config(root, training=spec, mesh=MESH)
        self.root = root
        self.brood = Brood(config.of_zygote, WAIT_S, WAIT_S)
        self.templates = Templates(self.brood, "n0.life", WAIT_S, WAIT_S)
        self.gone: list[Child] = []
        self.said: dict[str, threading.Event] = {}
        self.io = NodeIO(self)
        self.templates.attach(self.io)

    def start(self) -> None:
        linux_processes.become_subreaper()
        self.io.start()
        self.brood.start()

    def stop(self) -> None:
        self.templates.stop(WAIT_S)
        for child in forked("hf-worker"):
            child.kill()
        eventually(lambda: not names(), WAIT_S, "all forks to be gone")
        self.io.stop()
        self.brood.stop()

    def worker(self, name: str) -> Child:
        """One forked for the place, once it has said that it is there."""
        path = beacon.path_of(self.root, name)
        beacon.create(path)
        self.said[name] = threading.Event()
        request = {"env": {}, "beacon": str(path), "expected": PLACE.expected()}
        child = self.templates.fork(name, request)
        self.io.watch(child)
        assert self.said[name].wait(WAIT_S)
        return child

    def worker_said(self, name: str, message: dict[str, Any]) -> None:
        self.said[name].set()

    def child_said(self, child: Child, message: dict[str, Any]) -> None: ...
    def child_logged(self, child: Child, text: str) -> None: ...
    def zygote_exited(self) -> None: ...

    def child_exited(self, child: Child, detail: dict[str, int | str]) -> None:
        if child.kind == "template":
            self.templates.exited(child)
        self.gone.append(child)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    there = Node(tmp_path)
    there.start()
    yield there
    there.stop()


def forked(name: str) -> list[psutil.Process]:
    """Living children of that name; one may end while they are looked at."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == name:
                found.append(child)
    return found


def names() -> list[str]:
    """Of the processes that were forked, not of the zygote."""
    return [name for name in ("hf-template", "hf-worker") for _ in forked(name)]


def test_a_worker_comes_from_its_template_which_may_die(node: Node) -> None:
    node.templates.ensure([PLACE])
    node.templates.ensure([PLACE])
    assert names() == ["hf-template"]
    (template,) = forked("hf-template")
    first = node.worker("w1")
    assert os.getsid(first.pid) == first.pid
    assert psutil.Process(first.pid).ppid() == os.getpid()
    template.kill()
    eventually(lambda: bool(node.gone), WAIT_S, "the template's end to be seen")
    assert psutil.Process(first.pid).is_running()
    node.worker("w2")
    assert names() == ["hf-worker", "hf-worker"]
    node.templates.ensure([PLACE])
    assert names() == ["hf-template", "hf-worker", "hf-worker"]


def test_a_template_that_stops_answering_is_passed_over(node: Node) -> None:
    node.templates = Templates(node.brood, "n0.life", WAIT_S, 0.5)
    node.templates.attach(node.io)
    node.templates.ensure([PLACE])
    (template,) = forked("hf-template")
    template.suspend()
    node.worker("w1")
    eventually(lambda: names() == ["hf-worker"], WAIT_S, "the silent template to be ended")


def test_a_template_for_a_place_that_is_left_is_ended(node: Node) -> None:
    other = Place.of({"mesh": MESH, "rank": 0})
    node.templates.ensure([PLACE, other])
    node.templates.keep({other})
    eventually(lambda: names() == ["hf-template"], WAIT_S, "one template to be left")
    node.templates.ensure([PLACE, other])
    assert names() == ["hf-template", "hf-template"]


def test_where_nothing_can_be_made_ready_there_is_no_template(tmp_path: Path) -> None:
    compiled = small_training().model.model_copy(update={"compile": True})
    node = Node(tmp_path, model=compiled)
    node.start()
    try:
        node.templates.ensure([PLACE])
        eventually(lambda: not names(), WAIT_S, "the unfit template to be gone")
        node.templates.ensure([PLACE])
        assert names() == []
    finally:
        node.stop()
