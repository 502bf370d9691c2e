"""The rendezvous store of programs: a new one, on another port, for each attempt."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest

from holdfast_workers.agent.rendezvous import Rendezvous
from holdfast_workers.child_programs import store_host
from holdfast_workers.ipc import control_channel
from holdfast_workers.protocol.processes import AskStorePort, StoreJob, StorePort

HOST = "127.0.0.1"


@contextmanager
def store() -> Iterator[socket.socket]:
    """The agent's end of a real store's control socket."""
    ours, theirs = control_channel.pair()
    ours.settimeout(60)
    pid = os.fork()
    if pid == 0:
        ours.close()
        os._exit(store_host.run(theirs, StoreJob(HOST)))
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        os.waitpid(pid, 0)


def accepts(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((HOST, port)) == 0


def test_each_attempt_gets_another_store_and_the_former_is_closed() -> None:
    with store() as end:
        ports = [control_channel.receive(end, StorePort)]
        for attempt in (1, 3):
            control_channel.send(end, AskStorePort(attempt))
            ports.append(control_channel.receive(end, StorePort))
        assert [answer.attempt for answer in ports] == [0, 1, 3]
        assert [accepts(answer.port) for answer in ports] == [False, False, True]
        for again in (3, 0):  # asked again, or only whether it answers
            control_channel.send(end, AskStorePort(again))
            assert control_channel.receive(end, StorePort) == ports[-1]


@pytest.mark.parametrize("attempt", [0, 4])
def test_an_answer_given_before_the_question_counts_only_without_an_attempt(attempt: int) -> None:
    rendezvous = Rendezvous(Mock(), StoreJob(HOST), threading.Event(), on_lost=lambda _: None)

    def answer() -> None:
        time.sleep(0.05)
        rendezvous.record_port(1111)  # of a store that has just started
        if attempt:
            time.sleep(0.3)
            rendezvous.record_port(2222, attempt)

    threading.Thread(target=answer).start()
    assert rendezvous.wait_answer(60.0, attempt)
    assert rendezvous.port == (2222 if attempt else 1111)


def test_the_port_of_a_store_that_an_attempt_does_not_keep_is_not_passed_on() -> None:
    """A node that is fenced while it starts has no store yet; the first one answers later."""
    with store() as end:
        child = Mock()
        child.send.side_effect = lambda question: control_channel.send(end, question)
        rendezvous = Rendezvous(
            Mock(fork=lambda *_: child), StoreJob(HOST), threading.Event(), on_lost=lambda _: None
        )
        rendezvous.ask(3)
        rendezvous.fork(Mock())
        ports = []
        for _ in range(2):
            answer = control_channel.receive(end, StorePort)
            rendezvous.record_port(answer.port, answer.attempt)
            ports.append(rendezvous.port)
        assert ports == [0, answer.port] and answer.attempt == 3
        rendezvous.ask(3)  # once more: it is the same store
        assert control_channel.receive(end, StorePort) == answer
