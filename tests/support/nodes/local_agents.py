"""Node agents as plain local processes: implements the supervisor's `Agents` without Ray.

Zygotes, workers, segments and signals are real; only the transport differs from production. A
killed agent is restarted after `restart_delay_s`, as by Ray, unless its node is marked dead.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from tests.support.nodes import nursery
from tests.support.nodes.agent_config import agent_config
from tests.support.waiting import DEADLINE_S

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.protocol import codec
from holdfast_workers.protocol.answers import AgentReport, accepted
from holdfast_workers.protocol.commands import Describe, Request
from holdfast_workers.protocol.process_identity import ProcessIdentity
from holdfast_workers.protocol.signals import Signal

Expected = TypeVar("Expected")


class LocalAgent:
    """A seat: its agent's process, and a new process after each death."""

    def __init__(
        self,
        config: AgentConfig,
        on_signal: Callable[[bytes], None],
        on_node_lost: Callable[[str], None],
    ) -> None:
        self.config = config
        self._on_node_lost = on_node_lost
        self._on_signal = on_signal
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self.process: nursery.NurseryProcess | subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        ours, theirs = Pipe()
        self.process = nursery.start_agent(theirs.fileno())
        theirs.close()
        ours.send(self.config)
        self._attend(ours)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = future
            try:
                assert self._connection is not None
                self._connection.send((number, method, arguments))
            except (OSError, AssertionError) as error:
                del self._waiting[number]
                future.set_exception(ConnectionError(str(error)))
        return future

    def _attend(self, connection: Connection) -> None:
        self._connection = connection
        threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def _listen(self, connection: Connection) -> None:
        while True:
            try:
                number, kind, value = connection.recv()
            except (EOFError, OSError):
                break
            if kind == "signal":
                self._on_signal(value)
                continue
            if kind == "node_lost":
                self._on_node_lost(self.config.agent)
                continue
            future = self._waiting.pop(number)
            with contextlib.suppress(InvalidStateError):  # the call has timed out
                if kind == "ok":
                    future.set_result(value)
                else:
                    future.set_exception(value)
        with self._lock:
            orphans, self._waiting = self._waiting, {}
        for future in orphans.values():
            with contextlib.suppress(InvalidStateError):
                future.set_exception(ConnectionError("the agent died"))


class LocalAgents:
    """All seats of a job. The owner of the supervisor sets `on_signal`."""

    def __init__(
        self,
        seats: int,
        training: dict[str, Any],
        mesh: dict[str, int],
        capacity: int,
        remote_root: Path,
        *,
        remote: str | None = None,
        job_id: str = "job",
        restart_delay_s: float = 0.3,
        host: str = "127.0.0.1",
        own_caches: bool = False,
        **config: Any,
    ) -> None:
        """`own_caches`: each node has a cache of its own; otherwise they share one."""
        self.root = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
        self.secret = os.urandom(32)
        self.on_signal: Callable[[Signal], None] = lambda _: None
        self._restart_delay_s = restart_delay_s
        self._dead_nodes: set[str] = set()
        self._given_back: set[str] = set()
        self.draining_nodes: dict[str, float | None] = {}
        """Node id → when the cluster removes the node."""
        self._closed = False
        self._reviving = False
        self.agents = {
            f"n{index}": LocalAgent(
                agent_config(
                    self.root / f"n{index}",
                    job_id=job_id,
                    agent=f"n{index}",
                    node_id=f"node-{index}",
                    host=host,
                    training=training,
                    mesh=mesh,
                    capacity=capacity,
                    secret=self.secret,
                    cache_dir=str(remote_root.parent / f"cache{index if own_caches else ''}"),
                    remote_root=remote or str(remote_root),
                    env={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
                    **config,
                ),
                self._receive,
                self.kill_node,
            )
            for index in range(seats)
        }

    def _receive(self, document: bytes) -> None:
        self.on_signal(codec.decode(document, Signal))

    @property
    def seats(self) -> list[str]:
        return list(self.agents)

    def ensure(self) -> bool:
        for agent in self.agents.values():
            if agent.process is None:
                agent.start()
        if (
            not self._reviving
        ):  # each supervisor calls this; two reviving threads would start agents twice
            self._reviving = True
            threading.Thread(target=self._revive, daemon=True).start()
        return True

    def call(
        self, seat: str, request: Request, answer: type[Expected], *, timeout_s: float
    ) -> Future[Expected]:
        """As in production, requests and answers travel as documents."""
        future = self.call_method(seat, "execute", codec.encode(request), timeout_s=timeout_s)
        answered: Future[Expected] = Future()

        def pass_on(done: Future[Any]) -> None:
            try:
                answered.set_result(accepted(done.result(), answer))
            except Exception as error:
                answered.set_exception(error)

        future.add_done_callback(pass_on)
        return answered

    def report(self, seat: str, timeout_s: float = DEADLINE_S) -> AgentReport:
        return self.call(seat, Request(Describe()), AgentReport, timeout_s=timeout_s).result()

    def call_method(self, seat: str, method: str, *args: Any, timeout_s: float) -> Future[Any]:
        future = self.agents[seat].call(method, args)
        timer = threading.Timer(timeout_s, self._expire, (future,))
        timer.daemon = True
        timer.start()
        future.add_done_callback(lambda _: timer.cancel())
        return future

    def restart(self, seat: str, process: ProcessIdentity) -> None:
        running = self.agents[seat].process
        if running is not None and running.pid == process.pid:
            self.kill(seat)

    def keep_seats(self, seats: frozenset[str] | None) -> None:
        """A seat that is given back ends with its memory; it starts again on another node."""
        for seat, agent in self.agents.items():
            is_there = agent.config.node_id not in self._dead_nodes
            if seats is not None and seat not in seats and is_there:
                self.kill_node(seat)
                self._given_back.add(seat)
            elif seats is None and seat in self._given_back:
                self._given_back.discard(seat)
                self.return_node(seat)

    def has_ended(self, seat: str, process: ProcessIdentity) -> bool:
        return False  # the kernel knows: all agents run on this machine

    def node_answers(self, node_id: str) -> bool:
        return node_id not in self._dead_nodes

    def draining(self) -> dict[str, float | None]:
        return dict(self.draining_nodes)

    def kill(self, seat: str) -> None:
        process = self.agents[seat].process
        if process is not None:
            process.send_signal(signal.SIGKILL)

    def forget_memory(self, seat: str) -> None:
        """End the agent's process and drop the node's memory but keep the node, as a restart of the
        machine does."""
        process = self.agents[seat].process
        self.kill(seat)
        if process is not None:
            process.wait(DEADLINE_S)
        shutil.rmtree(self.root / seat, ignore_errors=True)

    def kill_node(self, seat: str) -> None:
        """Kill the agent and all its processes for good, and drop the node's memory."""
        self._dead_nodes.add(self.agents[seat].config.node_id)
        self.kill(seat)
        shutil.rmtree(self.root / seat, ignore_errors=True)

    def return_node(self, seat: str) -> None:
        """Return a lost node, with a new id and an empty memory."""
        agent = self.agents[seat]
        agent.config = replace(agent.config, node_id=f"{agent.config.node_id}+")

    @property
    def lost_seats(self) -> list[str]:
        return [
            seat for seat, agent in self.agents.items() if agent.config.node_id in self._dead_nodes
        ]

    def close(self) -> None:
        self._closed = True
        for agent in self.agents.values():
            if agent.process is not None and agent.process.poll() is None:
                agent.process.kill()
            if agent.process is not None:
                agent.process.wait(DEADLINE_S)
        shutil.rmtree(self.root, ignore_errors=True)

    def _revive(self) -> None:
        while not self._closed:
            for agent in self.agents.values():
                dead = agent.process is not None and agent.process.poll() is not None
                if dead and agent.config.node_id not in self._dead_nodes:
                    time.sleep(self._restart_delay_s)
                    if not self._closed:
                        agent.start()
            time.sleep(0.02)

    @staticmethod
    def _expire(future: Future[Any]) -> None:
        with contextlib.suppress(InvalidStateError):
            future.set_exception(TimeoutError("the call timed out"))
