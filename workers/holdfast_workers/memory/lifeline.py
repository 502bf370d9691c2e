"""Lifelines: detect the death of another agent's process within milliseconds.

A lifeline is a connection that carries only heartbeats. If the peer's process dies, its kernel
closes the connection, which is detected at once. If the peer's machine or the network fails, or the
process is stopped, the heartbeats end, which is detected after `heartbeat_timeout_s`. Each beat is
answered with the supervisor's lease grant (`protocol/lease.py`), once there is one.

One thread with one selector serves every lifeline, including connecting. It reports observations
and draws no conclusions: a lost lifeline may be a lost link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import structlog

from holdfast_workers.memory import wire
from holdfast_workers.memory.wire import Role, WireError
from holdfast_workers.protocol.lease import BEAT_BYTES, Grant, clock_s

_log = structlog.get_logger()

_READ_BYTES = 4096
_MAX_WAIT_S = 0.5
_PEER_ENDED = (errno.ECONNRESET, errno.ECONNREFUSED, errno.EPIPE)
_SUSPENDED_S = 0.1


class _Phase(Enum):
    """How far the handshake of a lifeline has come."""

    CONNECTING = auto()
    CONNECTED = auto()  # waiting for the server's greeting
    ANSWERED = auto()  # greeting answered, waiting for the server's welcome
    LIVE = auto()  # waiting for beats


@dataclass(eq=False)
class _Lifeline:
    agent: str
    sock: socket.socket
    last_received: float
    phase: _Phase = _Phase.CONNECTING
    received: bytearray = field(default_factory=bytearray)
    nonce: bytes = b""
    beat: bytes = b""
    """The newest beat received."""
    broken: str = ""
    """Why nothing more can be received, which proves nothing about the peer."""
    released_at: float | None = None
    """When the agent was released: nothing is granted to it since then, but its end is still
    detected."""


SILENCE = "no heartbeat"
"""Prefix of the reason if an agent is only silent: it may be alive but unreachable."""


class Lifelines:
    """All lifelines of one supervisor.

    `on_lost(agent, reason)` is called once per watch, from this object's thread; it must not block.
    A lost agent is no longer watched until `watch` is called again."""

    def __init__(
        self,
        secret: bytes,
        on_lost: Callable[[str, str], None],
        heartbeat_timeout_s: float,
    ) -> None:
        self._secret = secret
        self._on_lost = on_lost
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
        cannot be reached is reported as lost."""
        self._schedule(lambda: self._open(agent, host, port))

    def forget(self, agent: str) -> None:
        """Stop granting to this agent. The end of its process is still reported if it comes within
        the heartbeat timeout; nothing else about it is reported."""
        self._schedule(lambda: self._release(agent))

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
                elif self._lines.get(line.agent) is line:  # not dropped by an earlier event
                    self._handle_ready(line)
            self._drop_silent()
        for agent in tuple(self._lines):
            self._drop(agent)
        self._selector.close()
        os.close(self._wake_reader)

    def _run_commands(self) -> None:
        os.read(self._wake_reader, _READ_BYTES)
        with self._lock:
            commands, self._commands = self._commands, []
        for command in commands:
            command()

    def _wait_s(self) -> float | None:
        if not self._lines:
            return None
        oldest = min(line.released_at or line.last_received for line in self._lines.values())
        return min(_MAX_WAIT_S, max(0.0, oldest + self._timeout_s - time.monotonic()))

    def _credit_suspension(self, suspended_s: float) -> None:
        """Do not count the time in which this process did not run (stopped, suspended with its
        machine, or starved of CPU) as silence of the peers: they may have been stopped with it."""
        if suspended_s > _SUSPENDED_S:
            for line in self._lines.values():
                line.last_received += suspended_s

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for line in tuple(self._lines.values()):
            if line.released_at is not None and now - line.released_at >= self._timeout_s:
                self._drop(line.agent)
            elif line.released_at is None and now - line.last_received >= self._timeout_s:
                self._lose(line, line.broken or f"{SILENCE} for {self._timeout_s} s")

    def _fail(self, line: _Lifeline, error: OSError) -> None:
        """Handle a socket error. Only the peer's own kernel can prove the end of its process.
        Network errors prove nothing: as with any other silence, the agent is not lost before the
        timeout, because its ranks may step until then."""
        if error.errno in _PEER_ENDED:
            self._end(line, str(error))
        else:
            self._mark_broken(line, str(error))

    def _end(self, line: _Lifeline, reason: str) -> None:
        """Handle a connection that the peer has closed or refused. That proves the end of the
        peer's process, except during the handshake: a peer that does not complete it may be too
        busy, or may be another process."""
        if line.phase in (_Phase.CONNECTING, _Phase.LIVE):
            self._lose(line, reason)
        else:
            self._mark_broken(line, reason)

    def _mark_broken(self, line: _Lifeline, reason: str) -> None:
        """Stop reading the line but keep it open until it is lost: the agent would take a closed
        connection for the end of this supervisor."""
        line.broken = f"{SILENCE}: {reason}"
        self._unregister(line)
        if line.released_at is not None:
            self._drop(line.agent)

    def _open(self, agent: str, host: str, port: int) -> None:
        self._drop(agent)
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setblocking(False)
        line = self._lines[agent] = _Lifeline(agent, sock, time.monotonic())
        try:
            wire.tune(sock)
            code = sock.connect_ex((host, port))
        except OSError as error:  # the host name cannot be resolved
            self._fail(line, error)
            return
        if code not in (0, errno.EINPROGRESS):
            self._fail(line, OSError(code, os.strerror(code)))
            return
        self._selector.register(sock, selectors.EVENT_WRITE, line)

    def _handle_ready(self, line: _Lifeline) -> None:
        try:
            if line.phase is _Phase.CONNECTING:
                self._connected(line)
            else:
                self._read(line)
        except BlockingIOError:
            pass  # a spurious wake-up
        except WireError as error:
            self._end(line, str(error))
        except OSError as error:
            self._fail(line, error)

    def _connected(self, line: _Lifeline) -> None:
        code = line.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        line.phase = _Phase.CONNECTED
        self._selector.modify(line.sock, selectors.EVENT_READ, line)

    def _read(self, line: _Lifeline) -> None:
        piece = line.sock.recv(_READ_BYTES)
        if not piece:
            raise WireError("the process ended (end of its connection)")
        line.last_received = time.monotonic()
        line.received += piece
        if line.phase is _Phase.CONNECTED and len(line.received) >= wire.GREETING_BYTES:
            greeting = bytes(line.received[: wire.GREETING_BYTES])
            del line.received[: wire.GREETING_BYTES]
            answer, line.nonce = wire.answer_greeting(self._secret, greeting, Role.LIFELINE)
            line.sock.sendall(answer)  # a few hundred bytes into an empty buffer
            line.phase = _Phase.ANSWERED
        if line.phase is _Phase.ANSWERED and len(line.received) >= wire.PREFIX_BYTES:
            prefix = line.received[: wire.PREFIX_BYTES]
            end = wire.PREFIX_BYTES + wire.header_length(prefix)
            if len(line.received) >= end:
                welcome = wire.decode_header(prefix, bytes(line.received[wire.PREFIX_BYTES : end]))
                wire.check_welcome(self._secret, line.nonce, Role.LIFELINE, welcome)
                del line.received[:end]
                line.phase = _Phase.LIVE
        if line.phase is _Phase.LIVE and len(line.received) >= BEAT_BYTES:
            end = len(line.received) // BEAT_BYTES * BEAT_BYTES
            line.beat = bytes(line.received[end - BEAT_BYTES : end])
            del line.received[:end]
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
                    self._fail(line, error)

    def _release(self, agent: str) -> None:
        """Release an agent: a grant with `lease_s` 0 announces that the end of this connection is
        not the end of this supervisor."""
        line = self._lines.get(agent)
        if line is None:
            return
        if line.broken or line.phase is not _Phase.LIVE:
            self._drop(agent)
            return
        line.released_at = time.monotonic()
        if line.beat and self._grant is not None:
            last = replace(self._grant, silence_s=0.0, lease_s=0.0).answer_to(line.beat)
            with contextlib.suppress(OSError):
                line.sock.send(last)

    def _answer(self, line: _Lifeline) -> None:
        if self._grant is None or clock_s() >= self._granting_until:
            return
        if line.broken or line.released_at is not None:
            return
        answer = self._grant.answer_to(line.beat)
        # BlockingIOError: the peer reads nothing now; a later grant replaces this one.
        with contextlib.suppress(BlockingIOError):
            if line.sock.send(answer) < len(answer):
                raise OSError(errno.ENOBUFS, "the peer's receive buffer is full")

    def _lose(self, line: _Lifeline, reason: str) -> None:
        self._drop(line.agent)
        try:
            self._on_lost(line.agent, reason)
        except Exception:  # a faulty callback must not end the other lifelines
            _log.exception("cannot report a lost lifeline", agent=line.agent)

    def _drop(self, agent: str) -> None:
        line = self._lines.pop(agent, None)
        if line is None:
            return
        self._unregister(line)
        line.sock.close()

    def _unregister(self, line: _Lifeline) -> None:
        if line.sock.fileno() in self._selector.get_map():
            self._selector.unregister(line.sock)
