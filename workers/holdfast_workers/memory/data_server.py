"""The server of the data channel: receives replicas, serves commits and files of the node's cache,
and beats on lifelines.

Promises:

- A replica is committed only if every byte arrived and has the announced digest.
- A push of a fenced attempt commits nothing once `fence` has returned.
- Commits are served straight from shared memory; the client is notified if a commit was overwritten
  while it was sent.
- A client that does not know the job's secret receives a nonce and nothing else, and takes no place
  from one that does.

One thread accepts connections and serves the lifelines (`memory/heartbeat.py`); each push or fetch
connection has its own thread.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from holdfast_workers.ipc.listening import PortRange, PortsExhausted, listen
from holdfast_workers.memory import wire
from holdfast_workers.memory.box_transfer import requested_commit, serve_boxes
from holdfast_workers.memory.cache_transfer import serve_cached
from holdfast_workers.memory.heartbeat import HeartbeatSender, HeldLifeline
from holdfast_workers.memory.link_probe import echo
from holdfast_workers.memory.peer_tls import PeerTls
from holdfast_workers.memory.resumable_push import AnnouncedState, ReplicaIntake
from holdfast_workers.memory.segment import Commit, Segment, SegmentError, SegmentSpaceError
from holdfast_workers.memory.segment_store import SegmentBusy, SegmentStore
from holdfast_workers.memory.wire import (
    DEFAULT_TIMEOUTS,
    RefusalCode,
    Role,
    Timeouts,
    WireError,
    WireRefused,
)
from holdfast_workers.protocol.lease import Grant
from holdfast_workers.protocol.messages import Place
from holdfast_workers.state.digest import payload_digest

_log = structlog.get_logger()


class DataServer:
    """Listens from construction to `close`.

    `on_replica(rank, attempt, step)` is called in a connection's thread for every replica
    committed. `on_grant(grant)` is called for every lease grant received on a lifeline, and
    `on_lifeline_end(epoch)` when the last lifeline ends on which that supervisor has granted; these
    two must not block."""

    def __init__(
        self,
        store: SegmentStore,
        secret: bytes,
        host: str,
        ports: PortRange | None = None,
        *,
        on_replica: Callable[[int, int, int], None] | None = None,
        on_grant: Callable[[Grant], None] = lambda _: None,
        on_lifeline_end: Callable[[int], None] = lambda _: None,
        heartbeat_s: float = 0.2,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        max_connections: int = 1024,
        max_handshakes: int = 256,
        tls: PeerTls | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        self._store = store
        self._secret = secret
        self._tls = tls
        self._cache_dir = cache_dir
        self._on_replica = on_replica
        self._timeouts = timeouts
        self._max_connections = max_connections
        self._max_handshakes = max_handshakes
        self._intake = ReplicaIntake()
        self._lock = threading.Lock()
        self._fenced = 0
        self._closing = False
        self._handshakes: dict[socket.socket, threading.Thread] = {}  # not authenticated yet
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._selector = selectors.DefaultSelector()
        self._heartbeats = HeartbeatSender(self._selector, heartbeat_s, on_grant, on_lifeline_end)
        try:
            self._listener = listen(host, ports, backlog=128)
        except PortsExhausted:
            self._selector.close()
            raise
        except OSError as error:
            self._selector.close()
            reason = f"cannot listen on {host}, the address of this node: {error.strerror}"
            raise OSError(error.errno, reason) from error
        self._listener.setblocking(False)
        self._port = int(self._listener.getsockname()[1])
        self._wake_reader, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="data-server", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._port

    def fence(self, attempt: int) -> None:
        """Commit no push of an attempt below `attempt` after the return. The fence only rises."""
        with self._lock:
            self._fenced = max(self._fenced, attempt)

    def close(self, timeout_s: float = 2.0) -> None:
        """Close every connection and stop every thread, within `timeout_s`."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            connections = self._handshakes | self._connections
        with contextlib.suppress(BrokenPipeError):  # the thread has already ended
            os.write(self._wake_writer, b"!")
        for sock in connections:
            wire.shut(sock)
        deadline = time.monotonic() + timeout_s
        for thread in (self._thread, *connections.values()):
            thread.join(max(0.0, deadline - time.monotonic()))
        os.close(self._wake_writer)

    def _run(self) -> None:
        selector = self._selector
        selector.register(self._listener, selectors.EVENT_READ)
        selector.register(self._wake_reader, selectors.EVENT_READ)
        while not self._closing:
            for key, _events in selector.select(self._heartbeats.next_beat_in_s()):
                if isinstance(key.data, HeldLifeline):
                    self._heartbeats.receive(key.data)
                elif key.fileobj is self._listener:
                    self._accept()
            self._heartbeats.beat_if_due()
        self._listener.close()
        self._heartbeats.close()
        selector.close()
        os.close(self._wake_reader)

    def _accept(self) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError:  # the client closed the connection before it was accepted
            return
        with self._lock:
            if self._closing:
                sock.close()
                return
            if len(self._handshakes) >= self._max_handshakes:
                # A client that knows the secret needs milliseconds: the oldest is hardly one.
                wire.shut(next(iter(self._handshakes)))
            thread = threading.Thread(
                target=self._serve, args=(sock,), name="data-connection", daemon=True
            )
            self._handshakes[sock] = thread
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        keep = False
        try:
            sock.setblocking(True)
            if self._tls is not None:
                sock = self._secured(sock, self._tls)
            wire.tune(sock)
            role = self._admit(sock)
            if not self._count(sock):
                return
            sock.settimeout(self._timeouts.stall_s)
            match role:
                case Role.PUSH:
                    self._serve_requests(sock, self._receive_push)
                case Role.FETCH:
                    self._serve_requests(sock, self._serve_fetch)
                case Role.BOXES:
                    self._serve_requests(sock, self._serve_boxes)
                case Role.CACHE:
                    wire.lower_priority(sock)
                    self._serve_requests(sock, self._serve_cached)
                case Role.EXCHANGE:
                    self._serve_requests(sock, echo)
                case Role.LIFELINE:
                    keep = self._hold_lifeline(sock)
        except (WireError, OSError):
            pass  # the client notices the end of the connection and reports the failed transfer
        finally:
            with self._lock:
                self._handshakes.pop(sock, None)
                self._connections.pop(sock, None)
            if not keep:
                sock.close()

    def _secured(self, accepted: socket.socket, tls: PeerTls) -> socket.socket:
        """The server's side of TLS over `accepted`, which it replaces. Reads the certificates if
        they have changed, so it is called in the connection's own thread."""
        try:
            sock = wire.announce_tls(accepted, tls)
        except WireError as error:
            _log.warning("cannot accept a connection", problem=str(error))
            raise
        with self._lock:
            if self._closing:
                sock.close()
                raise WireError("the data server closes")
            self._handshakes[sock] = self._handshakes.pop(accepted)
        return sock

    def _admit(self, sock: socket.socket) -> Role:
        try:
            return wire.admit(sock, self._secret, self._timeouts)
        except wire.Intercepted as error:
            _log.warning("cannot accept a connection", problem=str(error))
            raise

    def _count(self, sock: socket.socket) -> bool:
        """Count the connection, whose client is authenticated; False if there are too many."""
        with self._lock:
            if self._closing or len(self._connections) >= self._max_connections:
                return False
            self._connections[sock] = self._handshakes.pop(sock)
            return True

    def _hold_lifeline(self, sock: socket.socket) -> bool:
        with self._lock:
            if self._closing:
                return False
            self._heartbeats.add(sock)
            return True

    def _serve_requests(
        self, sock: socket.socket, serve: Callable[[socket.socket, dict[str, Any]], None]
    ) -> None:
        """Answer requests one after the other. The stream stays in sync after a refusal."""
        while True:
            sock.settimeout(self._timeouts.idle_s)
            header = wire.receive_header(sock)
            sock.settimeout(self._timeouts.stall_s)
            try:
                serve(sock, header)
            except WireRefused as refusal:
                wire.send_refusal(sock, RefusalCode(refusal.code), str(refusal))
            except SegmentSpaceError as error:
                wire.send_refusal(sock, RefusalCode.NO_SPACE, str(error))
            except SegmentBusy as error:
                wire.send_refusal(sock, RefusalCode.BUSY, str(error))
            except SegmentError as error:
                wire.send_refusal(sock, RefusalCode.NOT_HELD, str(error))

    def _receive_push(self, sock: socket.socket, header: dict[str, Any]) -> None:
        match header.get("op"):
            case "layout":
                self._receive_layout(sock, header)
            case "push":
                self._receive_payload(sock, header)
            case other:
                raise WireError(f"unknown request {other!r}")

    def _receive_layout(self, sock: socket.socket, header: dict[str, Any]) -> None:
        rank, length = wire.int_field(header, "rank"), wire.int_field(header, "nbytes")
        if length > wire.LAYOUT_LIMIT:
            raise WireError(f"a layout of {length} bytes is above the limit")
        raw = bytearray(length)
        wire.receive_into(sock, memoryview(raw))
        store = self._store_for(header)
        self._check_fence(wire.int_field(header, "credential"))
        with store.writing(rank, Place.REPLICA):
            layout = wire.parse_layout(bytes(raw), wire.text_field(header, "digest"))
            replaces = store.prepare_replica(rank, layout)
        wire.send_header(sock, {"ok": True, "replaces": replaces})

    def _receive_payload(self, sock: socket.socket, header: dict[str, Any]) -> None:
        rank, attempt, step, nbytes, credential = (
            wire.int_field(header, key)
            for key in ("rank", "attempt", "step", "nbytes", "credential")
        )
        digest, store = wire.text_field(header, "digest"), self._store_for(header)
        self._check_fence(credential)
        with store.writing(rank, Place.REPLICA):
            segment = store.replica_of_size(rank, nbytes)
            if segment is None:
                raise WireRefused(
                    RefusalCode.NO_LAYOUT, f"no replica segment of rank {rank} that fits"
                )
            held = segment.find(attempt, step, digest=digest)
            if held is not None and held.digest == digest:
                with self._lock:
                    if credential >= self._fenced:
                        segment.make_newest(held)  # may be the first push after a rollback
                wire.send_header(sock, {"go": False})
                return
            keep = _commit_beside(segment, header)
            resume_at = self._intake.begin(segment, AnnouncedState(attempt, step, digest), keep)
            wire.send_header(sock, {"go": True, "from": resume_at})
            if not self._intake.receive(segment, sock):
                segment.abandon()
                raise WireRefused(
                    RefusalCode.BAD_DIGEST,
                    f"rank {rank}, step {step}: the bytes differ from the digest",
                )
            with self._lock:  # a fence may rise concurrently
                if credential >= self._fenced:
                    segment.commit(attempt=attempt, step=step, digest=digest)
                    store.put_in_place(rank, segment)
        self._check_fence(credential)
        wire.send_header(sock, {"ok": True})
        if self._on_replica is not None:
            self._on_replica(rank, attempt, step)

    def _store_for(self, header: dict[str, Any]) -> SegmentStore:
        """The store of the mesh that a request names: two meshes may be in memory at a time."""
        try:
            return self._store.for_mesh(wire.text_field(header, "mesh"))
        except ValueError as error:
            raise WireRefused(RefusalCode.MALFORMED, str(error)) from error

    def _serve_boxes(self, sock: socket.socket, header: dict[str, Any]) -> None:
        serve_boxes(sock, header, self._store_for, self._timeouts)

    def _serve_cached(self, sock: socket.socket, header: dict[str, Any]) -> None:
        serve_cached(sock, header, self._cache_dir)

    def _check_fence(self, credential: int) -> None:
        if credential < self._fenced:
            raise WireRefused(
                RefusalCode.FENCED, f"attempt {credential} has ended, {self._fenced} is on"
            )

    def _serve_fetch(self, sock: socket.socket, header: dict[str, Any]) -> None:
        _, segment, commit = requested_commit(self._store_for(header), header)
        segment.pin(commit, self._timeouts.stall_s)
        try:
            layout = segment.layout.to_json()
            answer = {
                "digest": commit.digest,
                "nbytes": commit.nbytes,
                "layout": len(layout),
                "layout_digest": payload_digest(layout),
            }
            with segment.payload(commit) as payload:
                wire.send_header(sock, answer)
                wire.send_payload(sock, layout)
                wire.send_payload(sock, payload)
            wire.send_header(sock, {"whole": segment.is_current(commit)})
        finally:
            segment.unpin()


def _commit_beside(segment: Segment, header: dict[str, Any]) -> Commit | None:
    """The commit that the owner keeps beside the one that it sends; None: it is not here."""
    if "beside_step" not in header:
        return None
    attempt, step = (wire.int_field(header, f"beside_{key}") for key in ("attempt", "step"))
    return segment.find(attempt, step, digest=wire.text_field(header, "beside_digest"))
