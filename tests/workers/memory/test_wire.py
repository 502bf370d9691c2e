"""Peers without the secret and malformed data: they receive nothing and break nothing."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator

import pytest
from tests.support.memory.data_nodes import PATIENT, Node, source_at
from tests.support.memory.shm import MESH, SECRET, write
from tests.support.waiting import DEADLINE_S

from holdfast_workers.memory import wire
from holdfast_workers.memory.fetch import fetch
from holdfast_workers.memory.wire import Role, WireError, WireRefused
from holdfast_workers.state.digest import payload_digest


@contextlib.contextmanager
def closed_by_the_other() -> Iterator[None]:
    """Send and read until the other end has closed; it may do so before all is sent."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN}:
            raise


@pytest.mark.parametrize("role", list(Role))
def test_a_wrong_secret_is_refused(node: Callable[..., Node], role: Role) -> None:
    there = node("b")
    with pytest.raises(WireRefused, match="unauthorised"):
        wire.connect(b"a guess", "127.0.0.1", there.server.port, role, PATIENT)
    wire.connect(SECRET, "127.0.0.1", there.server.port, role, PATIENT).close()


def test_a_server_that_does_not_know_the_secret_receives_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(wire.GREETING + bytes(wire.NONCE_BYTES))
                wire.receive_header(sock)
                wire.send_header(sock, {"proof": "0" * 64})

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(WireError, match="does not know"):
            wire.connect(SECRET, "127.0.0.1", listener.getsockname()[1], Role.PUSH, PATIENT)
        thread.join()


def test_an_answer_cannot_be_replayed(node: Callable[..., Node]) -> None:
    there = node("b")
    answers: list[bytes] = []
    for _connection in range(2):
        with socket.create_connection(("127.0.0.1", there.server.port), DEADLINE_S) as sock:
            greeting = bytearray(wire.GREETING_BYTES)
            wire.receive_into(sock, memoryview(greeting))
            answers.append(wire.answer_greeting(SECRET, bytes(greeting), Role.FETCH, "")[0])
            sock.sendall(answers[0])
            if len(answers) == 2:
                with pytest.raises(WireRefused):
                    wire.receive_header(sock)
            else:
                assert "proof" in wire.receive_header(sock)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">II", wire.HEADER_LIMIT + 1, 0) + b"x" * 100,
        struct.pack(">II", 5, 0) + b"\xff\xfe\xfd\xfc\xfb",
        struct.pack(">II", 6, zlib.crc32(b"[1, 2]", 6)) + b"[1, 2]",
        *(wire.encode_header({"role": role, "proof": "\ud800"}) for role in ("push", "\ud800")),
        b"",
    ],
)
def test_garbage_ends_only_its_own_connection(node: Callable[..., Node], garbage: bytes) -> None:
    here, there = node("a"), node("b")
    at = ("127.0.0.1", there.server.port)
    with socket.create_connection(at, DEADLINE_S) as sock, closed_by_the_other():
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1000):
            pass
    commit = write(there.worker(0), 1, 1)
    assert (
        fetch(SECRET, source_at(there.server.port, 1), 0, here.store, DEADLINE_S).digest
        == commit.digest
    )


@pytest.mark.parametrize("rank", [-1, "0", None, True, 2**70])
def test_a_malformed_request_is_refused(node: Callable[..., Node], rank: object) -> None:
    there = node("b")
    with wire.connect(SECRET, "127.0.0.1", there.server.port, Role.PUSH, PATIENT) as sock:
        header = {"op": "layout", "rank": rank, "mesh": MESH, "nbytes": 2, "credential": 0}
        wire.send_header(sock, {**header, "digest": payload_digest(b"{}")})
        with pytest.raises((WireError, OSError)):
            sock.sendall(b"{}")
            wire.receive_header(sock)
    assert there.store.held() == []


def test_clients_without_the_secret_take_no_place_from_others(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = node("b")
    monkeypatch.setattr(there.server, "_max_connections", 3)
    monkeypatch.setattr(there.server, "_max_handshakes", 4, raising=False)
    port = there.server.port
    with contextlib.ExitStack() as held:
        for _ in range(20):  # silent until the handshake's deadline
            held.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE_S))
        for _ in range(3):
            held.enter_context(wire.connect(SECRET, "127.0.0.1", port, Role.FETCH, PATIENT))
        with pytest.raises((WireError, OSError)):
            sock = wire.connect(SECRET, "127.0.0.1", port, Role.FETCH, PATIENT)
            held.enter_context(sock)
            wire.send_header(sock, {"op": "?"})
            wire.receive_header(sock)
