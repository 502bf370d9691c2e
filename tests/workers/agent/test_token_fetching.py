"""The fetching process knows which window the ranks of its node read, and the nodes beside it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.nodes.agent_config import agent_config

from holdfast_workers.agent import token_fetching
from holdfast_workers.agent.token_fetching import TokenFetching
from holdfast_workers.ipc import control_channel
from holdfast_workers.ipc.children import Child, ZygoteFailed
from holdfast_workers.protocol.messages import Partner
from holdfast_workers.protocol.processes import FetcherJob, FetchOrder

NODES = (Partner("n0", "127.0.0.1", 1), Partner("n1", "127.0.0.2", 2))


class Forks:
    """Stands for the zygote, and for the I/O thread: the fetching process is the test."""

    def __init__(self) -> None:
        self.failing = 0
        self.jobs: list[FetcherJob] = []
        self.children: list[Child] = []
        self.ends: list[socket.socket] = []

    def fork(self, name: str, job: FetcherJob) -> Child:
        if self.failing:
            self.failing -= 1
            raise ZygoteFailed("it could not fork")
        ours, theirs = control_channel.pair()
        log, _ = os.pipe()
        theirs.setblocking(False)
        self.jobs.append(job)
        self.ends.append(theirs)
        self.children.append(Child(job, name, 0, os.pidfd_open(os.getpid()), ours, log))
        return self.children[-1]

    def watch(self, child: Child) -> None: ...

    def received(self) -> list[FetchOrder]:
        """What the newest process has been sent since the last call."""
        orders = []
        try:
            while True:
                orders.append(control_channel.receive(self.ends[-1], FetchOrder))
        except BlockingIOError:
            return orders

    def close(self) -> None:
        for child in self.children:
            child.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forks]:
    monkeypatch.setattr(token_fetching, "AGAIN_S", 0.0)
    made = Forks()
    yield made
    made.close()


def fetching(root: Path, forks: Forks) -> TokenFetching:
    return TokenFetching(
        agent_config(root, tls_dir="certificates"), cast(Any, forks), threading.Event()
    )


def test_the_process_learns_each_change_once(tmp_path: Path, forks: Forks) -> None:
    own = fetching(tmp_path, forks)
    own.fork(cast(Any, forks))
    cache, secret = str(tmp_path / "cache"), b"s" * 32
    assert forks.jobs == [FetcherJob(cache, FetchOrder(), "n0", secret, "certificates")]
    assert "ssss" not in repr(forks.jobs)
    for window in (0, 0, 1, 1, 5, 3):  # a restore leads back
        own.read_from(window)
    assert forks.received() == [FetchOrder(window) for window in (0, 1, 5, 3)]
    for caches in (NODES, NODES, NODES[:1]):
        own.fetch_from(caches)
    assert forks.received() == [FetchOrder(3, NODES), FetchOrder(3, NODES[:1])]


def test_the_next_process_is_forked_with_what_the_last_one_knew(
    tmp_path: Path, forks: Forks
) -> None:
    own = fetching(tmp_path, forks)
    own.read_from(7)
    own.fetch_from(NODES)
    forks.failing = 2
    own.fork(cast(Any, forks))
    forks.ends[-1].close()  # it is killed
    own.read_from(8)
    own.fork(cast(Any, forks))
    assert [job.order for job in forks.jobs] == [FetchOrder(7, NODES), FetchOrder(8, NODES)]
    assert forks.received() == []
    own.read_from(9)
    assert forks.received() == [FetchOrder(9, NODES)]


def test_a_message_without_room_is_sent_later(tmp_path: Path, forks: Forks) -> None:
    own = fetching(tmp_path, forks)
    own.fork(cast(Any, forks))
    sent = 0
    while own._known.window in (None, sent - 1):
        own.read_from(sent)
        sent += 1
    assert forks.received()[-1] == FetchOrder(sent - 2)
    own.read_from(sent - 1)
    assert forks.received() == [FetchOrder(sent - 1)]
