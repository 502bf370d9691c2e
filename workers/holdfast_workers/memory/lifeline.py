"""Lifelines: connections that carry only heartbeats, to observe the processes of agents.

If the peer's process dies, its kernel closes the connection, which is reported within milliseconds
as broken. That proves nothing: a device on the path can reset or refuse a connection too. So the
lifeline is connected again at once, and the caller asks for a proof. If no heartbeat arrives for
`heartbeat_timeout_s`, the agent is reported as lost. Each beat is answered with the supervisor's
lease grant (`protocol/lease.py`), once there is one.

One thread with one selector serves every lifeline, including connecting. It reports observations
and draws no conclusions.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import structlog

from holdfast_workers.memory import wire
from holdfast_workers.memory.peer_tls import PeerTls, explain, session_of
from holdfast_workers.memory.wire import NOT_READY, RECORD_BYTES, Role, WireError
from holdfast_workers.protocol.lease import BEAT_BYTES, Grant, clock_s

_log = structlog.get_logger()

_MAX_WAIT_S = 0.5
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.01, 0.25
"""Pauses before a broken lifeline is connected again; each is twice as long as the one before."""
_SUSPENDED_S = 0.1


class _Phase(Enum):
    """The phases of a lifeline's handshake."""

    CONNECTING = auto()
    OPENING = auto()  # with TLS: waiting for the server to announce it
    SECURING = auto()  # with TLS: its handshake is under way
    CONNECTED = auto()  # waiting for the server's greeting
    ANSWERED = auto()  # greeting answered, waiting for the server's welcome
    LIVE = auto()  # waiting for beats


@dataclass(eq=False)
class _Lifeline:
    agent: str
    address: tuple[str, int]
    last_received: float
    sock: socket.socket | None = None
    """The connection; None if it is broken, to be made again at `retry_at`."""
    phase: _Phase = _Phase.CONNECTING
    received: bytearray = field(default_factory=bytearray)
    nonce: bytes = b""
    session: str = ""
    beat: bytes = b""
    """The newest beat received."""
    failures: int = 0
    """Number of times that the connection broke since the newest beat."""
    problem: str = ""
    """Why it broke last, if no beat has arrived since."""
    retry_at: float = 0.0


SILENCE = "no heartbeat"
"""Prefix of the reason of each loss: the agent may be alive but unreachable."""


class Lifelines:
    """All lifelines of one supervisor.

    `on_broken(agent, reason)` is called whenever a connection ends, is refused or fails: the
    agent's process may have ended. `on_lost(agent, reason)` is called once per watch, if no beat
    arrives for `heartbeat_timeout_s`; then the agent is no longer watched until `watch` is called
    again. Both are called from this object's thread and must not block."""

    def __init__(
        self,
        secret: bytes,
        on_lost: Callable[[str, str], None],
        heartbeat_timeout_s: float,
        on_broken: Callable[[str, str], None] = lambda _agent, _reason: None,
        tls: PeerTls | None = None,
    ) -> None:
        self._secret = secret
        self._tls = tls
        self._on_lost = on_lost
        self._on_broken = on_broken
        self._timeout_s = heartbeat_timeout_s
        self._lines: dict[str, _Lifeline] = {}
        self._lock = threading.Lock()
        self._commands: list[Callable[[], None]] = []
        self._grant: Grant | None = None
        self._granting_until = 0.0
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="lifelines", daemon=True)
        self._thread.start()

    def watch(self, agent: str, host: str, port: int) -> None:
        """Open a lifeline to `agent`, replacing an earlier one. Returns at once; an agent that
        cannot be reached is reported as lost after the timeout."""
        self._schedule(lambda: self._open(agent, host, port))

    def forget(self, agent: str) -> None:
        """Close the lifeline: nothing is granted to this agent any more, or reported about it."""
        self._schedule(lambda: self._drop(agent))

    def grant(self, grant: Grant, for_s: float) -> None:
        """Answer the beats of every agent with this grant, for `for_s` seconds. The supervisor must
        repeat the call in time: one that does not may have been replaced."""
        until = clock_s() + for_s
        self._schedule(lambda: self._set_grant(grant, until))

    def close(self, timeout_s: float = 2.0) -> None:
        """Close every lifeline and stop the thread, within `timeout_s`."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            with contextlib.suppress(BrokenPipeError):  # the thread has already ended
                os.write(self._wake_writer, b"!")
        self._thread.join(timeout_s)
        os.close(self._wake_writer)

    def _schedule(self, command: Callable[[], None]) -> None:
        with self._lock:
            if not self._closing:
                self._commands.append(command)
                os.write(self._wake_writer, b"!")

    def _run(self) -> None:
        while not self._closing:
            wait_s, began = self._wait_s(), time.monotonic()
            events = self._selector.select(wait_s)
            if wait_s is not None:
                self._credit_suspension(time.monotonic() - began - wait_s)
            for key, _events in events:
                line: _Lifeline | None = key.data
                if line is None:
                    self._run_commands()
                elif line.sock is key.fileobj:  # not dropped by an earlier event
                    self._handle_ready(line, line.sock)
            self._reconnect_broken()
            self._drop_silent()
        for agent in tuple(self._lines):
            self._drop(agent)
        self._selector.close()
        os.close(self._wake_reader)

    def _run_commands(self) -> None:
        os.read(self._wake_reader, RECORD_BYTES)
        with self._lock:
            commands, self._commands = self._commands, []
        for command in commands:
            command()

    def _wait_s(self) -> float | None:
        if not self._lines:
            return None
        due = [line.last_received + self._timeout_s for line in self._lines.values()]
        due += [line.retry_at for line in self._lines.values() if line.sock is None]
        return min(_MAX_WAIT_S, max(0.0, min(due) - time.monotonic()))

    def _credit_suspension(self, suspended_s: float) -> None:
        """Do not count the time in which this process did not run (stopped, suspended with its
        machine, or starved of CPU) as silence of the peers: they may have been stopped with it."""
        if suspended_s > _SUSPENDED_S:
            for line in self._lines.values():
                line.last_received += suspended_s

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for line in tuple(self._lines.values()):
            if now - line.last_received >= self._timeout_s:
                problem = f": {line.problem}" if line.problem else ""
                self._drop(line.agent)
                self._report(self._on_lost, line, f"{SILENCE} for {self._timeout_s} s{problem}")

    def _reconnect_broken(self) -> None:
        now = time.monotonic()
        for line in tuple(self._lines.values()):
            if line.sock is None and now >= line.retry_at:
                self._connect(line)

    def _fail(self, line: _Lifeline, reason: str) -> None:
        """Handle a connection that has ended, was refused or failed, in any phase."""
        self._disconnect(line)
        pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2**line.failures)
        line.retry_at = time.monotonic() + pause_s
        line.failures += 1
        line.problem, line.beat = reason, b""
        self._report(self._on_broken, line, reason)

    def _open(self, agent: str, host: str, port: int) -> None:
        self._drop(agent)
        line = self._lines[agent] = _Lifeline(agent, (host, port), time.monotonic())
        self._connect(line)

    def _connect(self, line: _Lifeline) -> None:
        line.phase = _Phase.CONNECTING
        line.received.clear()
        family = socket.AF_INET6 if ":" in line.address[0] else socket.AF_INET
        sock = line.sock = socket.socket(family)
        sock.setblocking(False)
        try:
            wire.tune(sock)
            code = sock.connect_ex(line.address)
        except OSError as error:  # the host name cannot be resolved
            self._fail(line, str(error))
            return
        if code not in (0, errno.EINPROGRESS):
            self._fail(line, os.strerror(code))
            return
        self._selector.register(sock, selectors.EVENT_WRITE, line)

    def _handle_ready(self, line: _Lifeline, sock: socket.socket) -> None:
        try:
            match line.phase:
                case _Phase.CONNECTING:
                    self._connected(line, sock)
                case _Phase.OPENING:
                    self._start_tls(line, sock)
                case _Phase.SECURING:
                    self._shake_hands(line, sock)
                case _:
                    self._read(line, sock)
        except NOT_READY:
            pass  # a spurious wake-up, or a record that has not arrived in full
        except ssl.SSLError as error:
            self._fail(line, explain(error))
        except (WireError, OSError) as error:
            self._fail(line, str(error))

    def _connected(self, line: _Lifeline, sock: socket.socket) -> None:
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        line.phase = _Phase.CONNECTED if self._tls is None else _Phase.OPENING
        self._selector.modify(sock, selectors.EVENT_READ, line)

    def _start_tls(self, line: _Lifeline, sock: socket.socket) -> None:
        assert self._tls is not None
        # Not a byte more: what follows the opening is for TLS.
        self._receive(line, sock, wire.OPENING_BYTES - len(line.received))
        if len(line.received) < wire.OPENING_BYTES:
            return
        wire.check_opening(bytes(line.received), tls=True)
        line.received.clear()
        self._selector.unregister(sock)
        line.sock = wire.start_tls(sock, self._tls)
        self._selector.register(line.sock, selectors.EVENT_READ, line)
        line.phase = _Phase.SECURING
        self._shake_hands(line, line.sock)

    def _shake_hands(self, line: _Lifeline, sock: socket.socket) -> None:
        assert isinstance(sock, ssl.SSLSocket)
        try:
            sock.do_handshake()
        except ssl.SSLWantWriteError:
            self._selector.modify(sock, selectors.EVENT_WRITE, line)
            return
        except ssl.SSLWantReadError:
            self._selector.modify(sock, selectors.EVENT_READ, line)
            return
        line.phase = _Phase.CONNECTED
        self._selector.modify(sock, selectors.EVENT_READ, line)

    def _receive(self, line: _Lifeline, sock: socket.socket, limit: int) -> None:
        piece = sock.recv(limit)
        if not piece:
            raise WireError("the connection was closed")
        if not line.problem:  # a peer that only greets, again and again, is as good as silent
            line.last_received = time.monotonic()
        line.received += piece

    def _read(self, line: _Lifeline, sock: socket.socket) -> None:
        self._receive(line, sock, RECORD_BYTES)
        if line.phase is _Phase.CONNECTED and len(line.received) >= wire.OPENING_BYTES:
            wire.check_opening(bytes(line.received[: wire.OPENING_BYTES]), tls=False)
        if line.phase is _Phase.CONNECTED and len(line.received) >= wire.GREETING_BYTES:
            greeting = bytes(line.received[: wire.GREETING_BYTES])
            del line.received[: wire.GREETING_BYTES]
            line.session = session_of(sock)
            answer, line.nonce = wire.answer_greeting(
                self._secret, greeting, Role.LIFELINE, line.session
            )
            sock.sendall(answer)  # a few hundred bytes into an empty buffer
            line.phase = _Phase.ANSWERED
        if line.phase is _Phase.ANSWERED and len(line.received) >= wire.PREFIX_BYTES:
            prefix = line.received[: wire.PREFIX_BYTES]
            end = wire.PREFIX_BYTES + wire.header_length(prefix)
            if len(line.received) >= end:
                welcome = wire.decode_header(prefix, bytes(line.received[wire.PREFIX_BYTES : end]))
                wire.check_welcome(self._secret, line.nonce, Role.LIFELINE, line.session, welcome)
                del line.received[:end]
                line.phase = _Phase.LIVE
        if line.phase is _Phase.LIVE and len(line.received) >= BEAT_BYTES:
            end = len(line.received) // BEAT_BYTES * BEAT_BYTES
            line.beat = bytes(line.received[end - BEAT_BYTES : end])
            del line.received[:end]
            line.last_received, line.problem, line.failures = time.monotonic(), "", 0
            self._answer(line)

    def _set_grant(self, grant: Grant, until: float) -> None:
        """Store a grant. A new one answers the newest beats at once: an attempt must not wait for
        the next beat."""
        known, self._grant, self._granting_until = self._grant, grant, until
        if grant == known:
            return
        for line in tuple(self._lines.values()):
            if line.beat:
                try:
                    self._answer(line)
                except OSError as error:
                    self._fail(line, str(error))

    def _answer(self, line: _Lifeline) -> None:
        if self._grant is None or clock_s() >= self._granting_until or line.sock is None:
            return
        answer = self._grant.answer_to(line.beat)
        # Not ready: the peer reads nothing now. With TLS, the next call sends this grant and not
        # its own; without, this grant is lost. Either way the answer to the next beat follows.
        with contextlib.suppress(*NOT_READY):
            if line.sock.send(answer) < len(answer):
                raise OSError(errno.ENOBUFS, "the peer's receive buffer is full")

    def _report(self, callback: Callable[[str, str], None], line: _Lifeline, reason: str) -> None:
        try:
            callback(line.agent, reason)
        except Exception:  # a faulty callback must not end the other lifelines
            _log.exception("cannot report a broken lifeline", agent=line.agent)

    def _drop(self, agent: str) -> None:
        line = self._lines.pop(agent, None)
        if line is not None:
            self._disconnect(line)

    def _disconnect(self, line: _Lifeline) -> None:
        if line.sock is None:
            return
        if line.sock.fileno() >= 0 and line.sock.fileno() in self._selector.get_map():
            self._selector.unregister(line.sock)
        line.sock.close()
        line.sock = None
