"""Lifelines: seeing another agent's process die, within milliseconds of it.

A lifeline is a connection on which nothing happens but a heartbeat. If the peer's process dies,
its kernel closes the connection, and that is seen at once; if its machine or the network goes, or
the process stops, the heartbeats end, and that is seen after `heartbeat_timeout_s`. Each beat is
answered with what the supervisor grants (`protocol/lease.py`), once there is anything to grant.

One thread with one selector carries every lifeline, connecting included. It says what it saw; it
does not judge: a lost lifeline may be a lost link.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from holdfast_workers.memory import wire
from holdfast_workers.memory.wire import Role, WireError
from holdfast_workers.protocol.lease import BEAT_BYTES, Grant, clock_s

_log = logging.getLogger(__name__)

_READ_BYTES = 4096
_LOOK_S = 0.5
_NOBODY_THERE = (errno.ECONNRESET, errno.ECONNREFUSED, errno.EPIPE)
_OVERSLEPT_S = 0.1


class _Phase(Enum):
    CONNECTING = auto()
    GREETED = auto()  # waiting for the server's greeting
    ANSWERED = auto()  # waiting for its welcome
    LIVE = auto()


@dataclass(eq=False)
class _Line:
    agent: str
    sock: socket.socket
    last_heard: float
    phase: _Phase = _Phase.CONNECTING
    received: bytearray = field(default_factory=bytearray)
    nonce: bytes = b""
    beat: bytes = b""
    """The newest."""
    broken: str = ""
    """Why nothing will be heard any more, which proves nothing of its peer."""
    let_go: float | None = None
    """Since when nothing is granted on it; that its peer ends is still seen."""


SILENCE = "nothing heard"
"""What the reason begins with where an agent is silent only: it may live, out of reach."""


class Lifelines:
    """`on_lost(agent, why)` is called once per watch, from this object's thread; it must not
    block. A lost agent is forgotten: to go on, watch it again."""

    def __init__(
        self,
        secret: bytes,
        on_lost: Callable[[str, str], None],
        heartbeat_timeout_s: float,
    ) -> None:
        self._secret = secret
        self._on_lost = on_lost
        self._timeout_s = heartbeat_timeout_s
        self._lines: dict[str, _Line] = {}
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
        """Hold a lifeline to `agent`, instead of any earlier one. Returns at once; that the agent
        cannot be reached is told like its loss."""
        self._soon(lambda: self._open(agent, host, port))

    def forget(self, agent: str) -> None:
        """Grant this agent nothing any more. Its end is still told if it comes within the time in
        which its silence would be told, and nothing else."""
        self._soon(lambda: self._let_go(agent))

    def grant(self, grant: Grant, for_s: float) -> None:
        """Answer every agent's beats with this, for so long. To be said again in time: whoever
        does not get to it may have been replaced."""
        until = clock_s() + for_s
        self._soon(lambda: self._begin_granting(grant, until))

    def close(self, timeout_s: float = 2.0) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            with contextlib.suppress(BrokenPipeError):  # the thread saw it by itself, and is gone
                os.write(self._wake_writer, b"!")
        self._thread.join(timeout_s)
        os.close(self._wake_writer)

    def _soon(self, command: Callable[[], None]) -> None:
        with self._lock:
            if not self._closing:
                self._commands.append(command)
                os.write(self._wake_writer, b"!")

    def _run(self) -> None:
        while not self._closing:
            asked, began = self._patience(), time.monotonic()
            events = self._selector.select(asked)
            if asked is not None:
                self._forgive(time.monotonic() - began - asked)
            for key, _events in events:
                line: _Line | None = key.data
                if line is None:
                    self._obey()
                elif self._lines.get(line.agent) is line:  # not dropped by an earlier event
                    self._attend(line)
            self._drop_silent()
        for agent in tuple(self._lines):
            self._drop(agent)
        self._selector.close()
        os.close(self._wake_reader)

    def _obey(self) -> None:
        os.read(self._wake_reader, _READ_BYTES)
        with self._lock:
            commands, self._commands = self._commands, []
        for command in commands:
            command()

    def _patience(self) -> float | None:
        if not self._lines:
            return None
        oldest = min(line.let_go or line.last_heard for line in self._lines.values())
        return min(_LOOK_S, max(0.0, oldest + self._timeout_s - time.monotonic()))

    def _forgive(self, overslept_s: float) -> None:
        """Time in which this process did not run (it or its machine was stopped, or starved of
        processors) is no silence of the others': they may have been stopped with it."""
        if overslept_s > _OVERSLEPT_S:
            for line in self._lines.values():
                line.last_heard += overslept_s

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for line in tuple(self._lines.values()):
            if line.let_go is not None and now - line.let_go >= self._timeout_s:
                self._drop(line.agent)
            elif line.let_go is None and now - line.last_heard >= self._timeout_s:
                self._lose(line, line.broken or f"{SILENCE} for {self._timeout_s} s")

    def _fail(self, line: _Line, error: OSError) -> None:
        """Only the peer's own kernel knows that nobody is there. A network's errors prove nothing:
        as with any other silence, the agent is not lost before its time, for its ranks may step
        until then."""
        if error.errno in _NOBODY_THERE:
            self._end(line, str(error))
        else:
            self._break(line, str(error))

    def _end(self, line: _Line, why: str) -> None:
        """Its peer has closed it, or nobody listens: proof of its end, but where it was being
        greeted. Who does not come to that may be too busy to, or somebody else."""
        if line.phase in (_Phase.CONNECTING, _Phase.LIVE):
            self._lose(line, why)
        else:
            self._break(line, why)

    def _break(self, line: _Line, why: str) -> None:
        """Not closed before it is lost: the agent would take that for this supervisor's end."""
        line.broken = f"{SILENCE}: {why}"
        self._unregister(line)
        if line.let_go is not None:
            self._drop(line.agent)

    def _open(self, agent: str, host: str, port: int) -> None:
        self._drop(agent)
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setblocking(False)
        line = self._lines[agent] = _Line(agent, sock, time.monotonic())
        try:
            wire.tune(sock)
            code = sock.connect_ex((host, port))
        except OSError as error:  # a host's name that cannot be resolved
            self._fail(line, error)
            return
        if code not in (0, errno.EINPROGRESS):
            self._fail(line, OSError(code, os.strerror(code)))
            return
        self._selector.register(sock, selectors.EVENT_WRITE, line)

    def _attend(self, line: _Line) -> None:
        try:
            if line.phase is _Phase.CONNECTING:
                self._connected(line)
            else:
                self._read(line)
        except BlockingIOError:
            pass  # woken for nothing
        except WireError as error:
            self._end(line, str(error))
        except OSError as error:
            self._fail(line, error)

    def _connected(self, line: _Line) -> None:
        code = line.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        line.phase = _Phase.GREETED
        self._selector.modify(line.sock, selectors.EVENT_READ, line)

    def _read(self, line: _Line) -> None:
        piece = line.sock.recv(_READ_BYTES)
        if not piece:
            raise WireError("the process ended (end of its connection)")
        line.last_heard = time.monotonic()
        line.received += piece
        if line.phase is _Phase.GREETED and len(line.received) >= wire.GREETING_BYTES:
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

    def _begin_granting(self, grant: Grant, until: float) -> None:
        """A new one at once, on the beats heard last: an attempt must not wait for the next."""
        known, self._grant, self._granting_until = self._grant, grant, until
        if grant == known:
            return
        for line in tuple(self._lines.values()):
            if line.beat:
                try:
                    self._answer(line)
                except OSError as error:
                    self._fail(line, error)

    def _let_go(self, agent: str) -> None:
        """It is told: the end of this connection will not be the end of this supervisor."""
        line = self._lines.get(agent)
        if line is None:
            return
        if line.broken or line.phase is not _Phase.LIVE:
            self._drop(agent)
            return
        line.let_go = time.monotonic()
        if line.beat and self._grant is not None:
            last = replace(self._grant, silence_s=0.0, lease_s=0.0).answering(line.beat)
            with contextlib.suppress(OSError):
                line.sock.send(last)

    def _answer(self, line: _Line) -> None:
        if self._grant is None or clock_s() >= self._granting_until:
            return
        if line.broken or line.let_go is not None:
            return
        answer = self._grant.answering(line.beat)
        with contextlib.suppress(BlockingIOError):  # it reads nothing: a later one will do
            if line.sock.send(answer) < len(answer):
                raise OSError(errno.ENOBUFS, "its end of the connection is full")

    def _lose(self, line: _Line, why: str) -> None:
        self._drop(line.agent)
        try:
            self._on_lost(line.agent, why)
        except Exception:  # the other lifelines must not be lost with one faulty listener
            _log.exception("on_lost of agent %s failed", line.agent)

    def _drop(self, agent: str) -> None:
        line = self._lines.pop(agent, None)
        if line is None:
            return
        self._unregister(line)
        line.sock.close()

    def _unregister(self, line: _Line) -> None:
        if line.sock.fileno() in self._selector.get_map():
            self._selector.unregister(line.sock)
