"""A node agent in a process of its own, without Ray: what `LocalAgents` starts.

`python -m tests.support.agent_process FD`: the first object on the connection is the AgentConfig;
then requests (number, method, arguments) are answered as (number, "ok" | "error", value), and
signals are sent as (0, "signal", signal).
"""

from __future__ import annotations

import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from holdfast_workers.agent import NodeAgent
from holdfast_workers.messages import Signal


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    config = connection.recv()
    lock = threading.Lock()

    def tell(number: int, kind: str, value: Any) -> None:
        with lock:
            connection.send((number, kind, value))

    def on_signal(signal: Signal) -> None:
        tell(0, "signal", signal)

    agent = NodeAgent(config, on_signal)
    threading.Thread(target=_start, args=(agent,), daemon=True).start()
    pool = ThreadPoolExecutor(16)

    def answer(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            value = getattr(agent, method)(*arguments)
        except Exception as error:
            tell(number, "error", error)
        else:
            tell(number, "ok", value)

    while True:
        try:
            number, method, arguments = connection.recv()
        except EOFError:
            agent.release()
            return
        pool.submit(answer, number, method, arguments)


def _start(agent: NodeAgent) -> None:
    try:
        agent.start()
    except Exception:
        traceback.print_exc()


if __name__ == "__main__":
    main()
