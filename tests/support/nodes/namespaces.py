"""Nodes in network namespaces on a bridge, and agents on them that are called over it.

A cut link cuts everything: calls, signals, lifelines, replication and collectives. Needs root and
`ip` (iproute2); `why_not` returns what is missing. Names and addresses are unique to this process.
`close` removes everything, also what an earlier process with the same pid left behind.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from tests.support.nodes.local_agents import LocalAgent, LocalAgents

from holdfast_workers.fault_injection import network_faults
from holdfast_workers.protocol.process_identity import ProcessIdentity

AGENT_PORT = 7001
CALL_S = 12.0
CONNECT_S = 1.0
INTERFACE = "eth0"


@cache
def why_not() -> str:
    """Why this machine does not support namespaces; "" if it does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (package iproute2)"
    try:
        with Bridge(["probe"]) as bridge:
            bridge.link("probe", up=False)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    return ""


class Bridge:
    """A bridge with this process on it, and a namespace with an address for each name."""

    def __init__(self, names: list[str], pid: int | None = None) -> None:
        """`pid`: of the process whose bridge it is; None: of this one."""
        pid = pid or os.getpid()
        self._tag = f"hf{pid % 100000}"
        self._net = f"10.{64 + pid // 250 % 128}.{pid % 250}"
        self._names = names
        self.gateway = f"{self._net}.1"

    def __enter__(self) -> Bridge:
        self.close()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, name: str) -> str:
        return f"{self._net}.{10 + self._names.index(name)}"

    def inside(self, name: str) -> list[str]:
        """The prefix of a command that runs in the namespace."""
        return ["ip", "netns", "exec", f"{self._tag}-{name}"]

    def link(self, name: str, *, up: bool) -> None:
        """Cut or restore the only link of the namespace, without notifying any process."""
        _ip("link", "set", self._veth(name), "up" if up else "down")

    def route(self, name: str) -> None:
        """Let the namespace reach other networks through this process's address, as a machine
        does through its router. A link that was cut has lost its route."""
        there = f"{self._tag}-{name}"
        _ip("-n", there, "route", "replace", "default", "via", self.gateway, "dev", INTERFACE)

    def close(self) -> None:
        for name in self._names:
            _ip("link", "del", self._veth(name), check=False)
            _ip("netns", "del", f"{self._tag}-{name}", check=False)
        _ip("link", "del", f"{self._tag}br", check=False)

    def _make(self) -> None:
        bridge = f"{self._tag}br"
        _ip("link", "add", bridge, "type", "bridge", "forward_delay", "0")
        _ip("addr", "add", f"{self.gateway}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for name in self._names:
            there, veth = f"{self._tag}-{name}", self._veth(name)
            _ip("netns", "add", there)
            _ip("link", "add", veth, "type", "veth", "peer", "name", INTERFACE, "netns", there)
            _ip("link", "set", veth, "master", bridge)
            _ip("-n", there, "addr", "add", f"{self.address(name)}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", there, "link", "set", interface, "up")
            _ip("link", "set", veth, "up")

    def _veth(self, name: str) -> str:
        return f"{self._tag}v{self._names.index(name)}"


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


def over(sock: socket.socket, timeout_s: float) -> Connection:
    """A pickling connection whose reads and writes fail after `timeout_s` without progress."""
    sock.settimeout(None)
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, limit)
    return Connection(sock.detach())


@dataclass(frozen=True)
class NodeLost:
    """An agent's message that its node is to be lost."""

    seat: str


class RemoteAgent(LocalAgent):
    """A seat in a namespace. Each call has a connection of its own, so that it notices a restored
    link at once."""

    def __init__(
        self, local: LocalAgent, bridge: Bridge, signals: int, pool: ThreadPoolExecutor
    ) -> None:
        name = local.config.agent
        config = replace(
            local.config,
            host=bridge.address(name),
            env={**local.config.env, "GLOO_SOCKET_IFNAME": INTERFACE},
        )
        super().__init__(config, lambda _: None, lambda _: None)
        self._inside = bridge.inside(name)
        self._supervisor = (bridge.gateway, signals)
        self._pool = pool

    def start(self) -> None:
        process = subprocess.Popen(
            [*self._inside, sys.executable, "-m", "tests.support.nodes.agent_process", "remote"],
            stdin=subprocess.PIPE,
            env={**os.environ, network_faults.VARIABLE: INTERFACE},
        )
        self.process = process
        assert process.stdin is not None
        pickle.dump((self.config, AGENT_PORT, self._supervisor), process.stdin)
        process.stdin.flush()

    def call(self, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        return self._pool.submit(self._call, method, arguments)

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        sock = socket.create_connection((self.config.host, AGENT_PORT), CONNECT_S)
        with over(sock, CALL_S) as connection:
            connection.send((method, arguments))
            try:
                kind, value = connection.recv()
            except EOFError:
                raise ConnectionError("the agent died") from None
        if kind == "ok":
            return value
        raise value


class RemoteAgents(LocalAgents):
    """All seats of a job, each behind a link of its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bridge = Bridge(list(self.agents))
        self._bridge.__enter__()
        self._pool = ThreadPoolExecutor(64, "remote-call")
        self._listener = socket.create_server((self._bridge.gateway, 0))
        port = self._listener.getsockname()[1]
        self.agents = {
            seat: RemoteAgent(agent, self._bridge, port, self._pool)
            for seat, agent in self.agents.items()
        }
        self._cut: set[str] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seat: str) -> None:
        self._cut.add(seat)
        self._bridge.link(seat, up=False)

    def mend(self, seat: str) -> None:
        self._bridge.link(seat, up=True)
        self._cut.discard(seat)

    @contextmanager
    def out_of_reach(self, seat: str) -> Iterator[None]:
        """Mark a seat as cut off while something else cuts its link."""
        self._cut.add(seat)
        try:
            yield
        finally:
            self._cut.discard(seat)

    def restart(self, seat: str, process: ProcessIdentity) -> None:
        """Restart only a reachable seat: a cluster cannot reach a process across a cut link."""
        if seat not in self._cut:
            super().restart(seat, process)

    def node_answers(self, node_id: str) -> bool:
        seat = next(s for s, agent in self.agents.items() if agent.config.node_id == node_id)
        return seat not in self._cut and super().node_answers(node_id)

    def close(self) -> None:
        super().close()
        self._listener.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._bridge.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._pool.submit(self._handle, sock)

    def _handle(self, sock: socket.socket) -> None:
        with over(sock, CONNECT_S) as connection, contextlib.suppress(OSError, EOFError):
            message = connection.recv()
            if isinstance(message, NodeLost):
                self.kill_node(message.seat)
            else:
                self._receive(message)


def serve(port: int, host: str, answer: Callable[[str, tuple[Any, ...]], tuple[str, Any]]) -> None:
    """The agent's side: answer calls without end, each on a connection of its own."""
    with socket.create_server((host, port)) as listener, ThreadPoolExecutor(16) as pool:
        while True:
            sock, _ = listener.accept()
            pool.submit(_answer, sock, answer)


def _answer(sock: socket.socket, answer: Callable[[str, tuple[Any, ...]], tuple[str, Any]]) -> None:
    with over(sock, CALL_S) as connection, contextlib.suppress(OSError, EOFError):
        connection.send(answer(*connection.recv()))


def send(supervisor: tuple[str, int], signal: bytes | NodeLost) -> None:
    """Best effort, as in production: the supervisor asks later for messages that a cut link
    drops."""
    with contextlib.suppress(OSError):
        sock = socket.create_connection(supervisor, CONNECT_S)
        with over(sock, CONNECT_S) as connection:
            connection.send(signal)


@contextmanager
def cut(agents: RemoteAgents, seat: str, for_s: float) -> Iterator[None]:
    """Cut the link of a node for at least `for_s`, and for as long as the body takes."""
    agents.cut(seat)
    began = time.monotonic()
    try:
        yield
        time.sleep(max(0.0, for_s - (time.monotonic() - began)))
    finally:
        agents.mend(seat)
