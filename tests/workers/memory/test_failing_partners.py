"""Partners that die, hang or become unreachable during pushes."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.memory.data_nodes import QUICK, Node
from tests.support.memory.shm import AgentProcess, write
from tests.support.waiting import eventually

from holdfast_workers.memory import wire
from holdfast_workers.protocol.messages import Partner, Place


def test_an_outage_is_reported_once_despite_many_retries(
    node: Callable[..., Node],
) -> None:
    here = node("a")
    write(here.worker(0), 1, 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        port = listener.getsockname()[1]
        here.replicator.set_partners(0, (Partner("b", "127.0.0.1", port),))
        here.replicator.offer(0, 1, 1)
        for _try in range(4):
            listener.accept()[0].close()
        assert len(here.lost) == 1
        here.replicator.set_partners(0, ())


def test_a_partner_that_dies_is_reported_once_and_another_takes_over(
    node: Callable[..., Node], agent: Callable[[str], AgentProcess]
) -> None:
    here, spare = node("a"), node("c")
    dying = agent("b")
    segment = here.worker(0)
    here.replicator.set_partners(0, (Partner("b", "127.0.0.1", dying.port),))
    write(segment, 1, 1)
    here.replicator.offer(0, 1, 1)
    eventually(lambda: here.replicated == [(0, 1, 1)])
    dying.end()
    write(segment, 1, 2)
    here.replicator.offer(0, 1, 2)
    eventually(lambda: here.lost)
    write(segment, 1, 3)
    here.replicator.offer(0, 1, 3)
    here.replicator.set_partners(0, (spare.partner,))
    here.replicator.offer(0, 1, 3)
    eventually(lambda: (0, 1, 3) in here.replicated)
    assert [(rank, name) for rank, name, _why in here.lost] == [(0, "b")]
    assert spare.holds(Place.REPLICA) == [(0, 1, 3)]


@pytest.mark.seconds
def test_a_stopped_partner_is_reported_and_does_not_block_offers(
    node: Callable[..., Node],
    agent: Callable[[str], AgentProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, stopped = node("a", timeouts=QUICK), agent("b")
    segment = here.worker(0, 8_000_000)
    connecting: set[int] = set()
    connect = wire.connect

    def recorded(*given: Any, **options: Any) -> socket.socket:
        connecting.add(threading.get_ident())
        return connect(*given, **options)

    monkeypatch.setattr(wire, "connect", recorded)
    here.replicator.set_partners(0, (Partner("b", "127.0.0.1", stopped.port),))
    os.kill(stopped.process.pid, signal.SIGSTOP)
    write(segment, 1, 1)
    here.replicator.offer(0, 1, 1)
    eventually(lambda: here.lost)
    assert connecting and threading.get_ident() not in connecting
    os.kill(stopped.process.pid, signal.SIGCONT)
    eventually(lambda: here.replicated == [(0, 1, 1)])  # retried automatically


def test_closing_during_a_push_ends_every_thread(
    node: Callable[..., Node], agent: Callable[[str], AgentProcess]
) -> None:
    here, stopped = node("a"), agent("b")
    write(here.worker(0, 8_000_000), 1, 1)
    here.replicator.set_partners(0, (Partner("b", "127.0.0.1", stopped.port),))
    here.replicator.offer(0, 1, 1)
    eventually(lambda: here.replicated)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    write(here.worker(0, 8_000_000), 1, 2)
    here.replicator.offer(0, 1, 2)
    pushing = here.replicator._senders
    eventually(lambda: [commit.step for commit in pushing.get(0, ())] == [2])
    here.replicator.close(timeout_s=600.0)
    os.kill(stopped.process.pid, signal.SIGCONT)
