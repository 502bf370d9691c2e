"""A node agent in a process of its own, without Ray; `LocalAgents` starts it.

`python -m tests.support.nodes.agent_process FD`: the first object on the connection is the
AgentConfig. Calls (number, method, arguments) are answered as (number, "ok" | "error", value),
signals are sent as (0, "signal", document), and the request to lose the node as (0, "node_lost",
None). A nursery (`nursery.py`) calls `local` in a process that has already imported everything.
`... remote`: serves calls over the network (`namespaces.py`) as long as its standard input is open.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import structlog
from tests.support.nodes import namespaces

from holdfast_workers import log_setup
from holdfast_workers.agent.node_agent import NodeAgent
from holdfast_workers.ipc.children import ZygoteProcess, start_zygote
from holdfast_workers.protocol import codec
from holdfast_workers.protocol.commands import Request
from holdfast_workers.protocol.signals import Signal

_log = structlog.get_logger()


def main() -> None:
    if sys.argv[1] == "remote":
        remote()
    else:
        local(Connection(int(sys.argv[1])))


def remote() -> None:
    log_setup.configure(timestamps=True)
    config, port, supervisor = pickle.load(sys.stdin.buffer)
    signals: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def lose_node() -> None:
        namespaces.send(supervisor, namespaces.NodeLost(config.agent))

    def on_signal(signal: Signal) -> None:
        signals.put(codec.encode(signal))

    agent = NodeAgent(config, on_signal, lose_node)

    def answer(method: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
        try:
            return "ok", _carry_out(agent, method, arguments)
        except Exception as error:
            return "error", error

    def send() -> None:
        while True:
            namespaces.send(supervisor, signals.get())

    for body in (
        lambda: _start(agent),
        send,
        lambda: namespaces.serve(port, config.host, answer),
    ):
        threading.Thread(target=body, daemon=True).start()
    sys.stdin.buffer.read()  # until the process that started this one ends
    os._exit(0)


def local(
    connection: Connection,
    zygote: Callable[[int, dict[str, str]], ZygoteProcess] = start_zygote,
) -> None:
    log_setup.configure(timestamps=True)
    config = connection.recv()
    lock = threading.Lock()

    def send(number: int, kind: str, value: Any) -> None:
        with lock:
            connection.send((number, kind, value))

    def on_signal(signal: Signal) -> None:
        send(0, "signal", codec.encode(signal))

    def lose_node() -> None:
        send(0, "node_lost", None)

    agent = NodeAgent(config, on_signal, lose_node, zygote)
    threading.Thread(target=_start, args=(agent,), daemon=True).start()
    pool = ThreadPoolExecutor(16)

    def answer(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            value = _carry_out(agent, method, arguments)
        except Exception as error:
            send(number, "error", error)
        else:
            send(number, "ok", value)

    while True:
        try:
            number, method, arguments = connection.recv()
        except EOFError:
            agent.release()
            return
        pool.submit(answer, number, method, arguments)


def _carry_out(agent: NodeAgent, method: str, arguments: tuple[Any, ...]) -> Any:
    """A call of the agent's actor: `execute` with a document, or `release`."""
    if method == "execute":
        (document,) = arguments
        return codec.encode(agent.answer(codec.decode(document, Request)))
    return getattr(agent, method)(*arguments)


def _start(agent: NodeAgent) -> None:
    try:
        agent.start()
    except Exception:
        _log.exception("the agent cannot start")


if __name__ == "__main__":
    main()
