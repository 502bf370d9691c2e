"""Clients that send nothing, or half of something, or take nothing: each connection ends, and none
holds much of the server."""

from __future__ import annotations

import contextlib
import io
import json
import select
import socket
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from tests.support.service.live_server import SPEC, LiveServer, live_server
from tests.support.waiting import DEADLINE_S, eventually

from holdfast.rest.limits import ConnectionLimits, UploadLimits

QUICK = ConnectionLimits(idle_s=0.5, head_s=0.2, untaken_s=0.2, untaken_bytes=2**16)
SLOW = ConnectionLimits(idle_s=600, head_s=600)
CODE_BYTES = 2**22
LARGE_AT_ONCE = 4
UPLOADS = 40
HELD_BYTES = UPLOADS * 2**18
"""Less than a tenth of what the uploads have sent."""


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Its limits of time are never reached."""
    limits = UploadLimits(silence_s=600, base_s=600, large_at_once=LARGE_AT_ONCE)
    folder = tmp_path_factory.mktemp("patient")
    with live_server(
        folder, connections=SLOW, max_code_bytes=CODE_BYTES, upload_limits=limits
    ) as server:
        yield server


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """For what a client never does: its own bytes are `sent` at once, so that it need not be
    fast."""
    limits = UploadLimits(silence_s=0.2)
    folder = tmp_path_factory.mktemp("impatient")
    with live_server(folder, connections=QUICK, upload_limits=limits) as server:
        yield server


@contextlib.contextmanager
def connected(server: LiveServer) -> Iterator[socket.socket]:
    parts = urlsplit(server.address)
    with socket.create_connection((parts.hostname, parts.port), timeout=DEADLINE_S) as connection:
        yield connection


@contextlib.contextmanager
def sent(server: LiveServer, content: bytes) -> Iterator[socket.socket]:
    """A connection whose first bytes are there when the server accepts it."""
    with contextlib.ExitStack() as stack:
        with server.halted():
            connection = stack.enter_context(connected(server))
            connection.sendall(content)
        yield connection


def head(server: LiveServer, first: str, *lines: str) -> bytes:
    host = urlsplit(server.address).netloc
    return "\r\n".join((f"{first} HTTP/1.1", f"Host: {host}", *lines, "", "")).encode()


def until_closed(connection: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):  # it had not read all
        while block := connection.recv(2**16):
            answer += block
    return answer


def problem(answer: bytes, status: int) -> dict[str, object]:
    top, _, body = answer.partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 %d " % status), answer[:300]
    assert b"application/problem+json" in top
    found: dict[str, object] = json.loads(body)
    assert found["status"] == status
    return found


def test_a_silent_connection_ends(impatient: LiveServer) -> None:
    with connected(impatient) as connection:
        assert until_closed(connection) == b""


@pytest.mark.parametrize("begun", [b"G", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: "])
def test_the_head_of_a_request_has_a_deadline(impatient: LiveServer, begun: bytes) -> None:
    with sent(impatient, begun) as connection:
        assert problem(until_closed(connection), 408)["code"] == "request_timeout"


def test_the_head_of_a_second_request_has_a_deadline(impatient: LiveServer) -> None:
    """A client that begins it too late finds the connection closed, and tries again."""

    def begun_in_time() -> bool:
        with sent(impatient, head(impatient, "GET /healthz")) as connection:
            assert b" 200 " in connection.recv(2**16)
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"GET /")
            _, found, second = until_closed(connection).partition(b"HTTP/1.1 408 ")
        return bool(found) and problem(found + second, 408)["code"] == "request_timeout"

    eventually(begun_in_time)


def test_a_body_that_stops_is_refused(impatient: LiveServer) -> None:
    for length in ("Content-Length: 100", "Transfer-Encoding: chunked"):
        lines = ("Content-Type: application/json", length)
        with sent(impatient, head(impatient, "POST /api/v1/jobs", *lines)) as connection:
            assert problem(until_closed(connection), 408)["code"] == "request_timeout"


def test_a_body_that_trickles_is_refused(tmp_path: Path) -> None:
    limits = UploadLimits(silence_s=600, base_s=0.5)
    with live_server(tmp_path, upload_limits=limits) as server, connected(server) as connection:
        lines = ("Content-Type: application/zip", "Content-Length: 100000")
        connection.sendall(head(server, "POST /api/v1/code", *lines))
        while not select.select([connection], [], [], 0.05)[0]:
            connection.sendall(b"x")
        assert problem(until_closed(connection), 408)["code"] == "request_timeout"


def test_the_rest_of_a_refused_body_is_not_awaited_for_ever(impatient: LiveServer) -> None:
    lines = ("Content-Length: 10000", "Host: evil.example")
    with sent(impatient, head(impatient, "POST /api/v1/jobs", *lines)) as connection:
        assert b" 400 " in until_closed(connection)


def test_an_answer_that_nobody_takes_ends(tmp_path: Path) -> None:
    limits = replace(SLOW, untaken_s=0.2, untaken_bytes=2**16)
    with live_server(tmp_path, connections=limits) as server, connected(server) as connection:
        code = uploaded(server, zipped(2**23))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        connection.sendall(head(server, f"GET /api/v1/code/{code}"))
        watch = select.poll()
        watch.register(connection, select.POLLHUP | select.POLLERR)
        assert watch.poll(DEADLINE_S * 1000), "the connection is still open"


def test_a_quiet_stream_lives_on(impatient: LiveServer) -> None:
    """Longer than every limit of this server; a follower sends nothing, and gets nothing."""
    body = json.dumps(SPEC).encode()
    lines = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    with sent(impatient, head(impatient, "POST /api/v1/jobs", *lines) + body) as connection:
        job = json.loads(until_closed(connection).partition(b"\r\n\r\n")[2])["id"]
    follow = head(impatient, f"GET /api/v1/live?job={job}", "Accept: text/event-stream")
    with sent(impatient, follow) as stream, connected(impatient) as silent:
        eventually(lambda: b"hello" in stream.recv(2**16))
        assert until_closed(silent) == b""  # the deadline of a connection has passed
        impatient.supervisor(job).train(2)
        text = b""
        while b"event: metrics" not in text:
            text += (block := stream.recv(2**16))
            assert block, "the stream has ended"


def test_forty_unfinished_uploads_hold_little_memory(patient: LiveServer) -> None:
    lines = ("Content-Type: application/zip", f"Content-Length: {CODE_BYTES}")
    start = head(patient, "POST /api/v1/code", *lines) + bytes(CODE_BYTES - 1)
    with contextlib.ExitStack() as open_:
        connections = [open_.enter_context(connected(patient)) for _ in range(UPLOADS)]
        open_.callback(tracemalloc.stop)
        tracemalloc.start()
        for connection in connections:
            connection.sendall(start)

        def refused() -> int:
            return len(select.select(connections, [], [], 0)[0])

        def held() -> int:
            return tracemalloc.get_traced_memory()[1]

        eventually(lambda: refused() == UPLOADS - LARGE_AT_ONCE or held() > HELD_BYTES)
        assert held() <= HELD_BYTES
        for connection in select.select(connections, [], [], 0)[0]:
            connection.shutdown(socket.SHUT_WR)
            answer = until_closed(connection)
            assert problem(answer, 503)["code"] == "too_many_uploads"
            assert b"retry-after: " in answer.lower()
        # Small bodies need no place, and have their answer meanwhile.
        assert httpx.post(f"{patient.address}/api/v1/jobs", json=SPEC).status_code == 201
    assert uploaded(patient, zipped(100_000))  # the places are free again


def test_an_upload_leaves_no_file(patient: LiveServer) -> None:
    def files() -> set[Path]:
        return {path for path in patient.settings.data_dir.iterdir() if path.is_file()}

    before = files()
    with connected(patient) as connection:
        lines = ("Content-Type: application/zip", f"Content-Length: {CODE_BYTES}")
        connection.sendall(head(patient, "POST /api/v1/code", *lines) + bytes(2**20))
        assert uploaded(patient, zipped(100_000))
        assert files() == before


def test_the_connections_of_a_server_have_a_limit(tmp_path: Path) -> None:
    limits = replace(SLOW, at_once=3)
    with live_server(tmp_path, connections=limits) as server, contextlib.ExitStack() as open_:
        for _ in range(3):
            connection = open_.enter_context(connected(server))
            connection.sendall(head(server, "GET /healthz"))
            assert b" 200 " in connection.recv(2**16)
        with connected(server) as one_more:
            assert problem(until_closed(one_more), 503)["code"] == "too_many_connections"


def test_the_limit_of_connections_is_that_of_the_system_only_if_its_hard_limit_is_low() -> None:
    program = """
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from starlette.applications import Starlette
from holdfast.rest.connections import server_config
from holdfast.rest.limits import ConnectionLimits
for hard in (1000, 300):
    setrlimit(RLIMIT_NOFILE, (256, hard))
    config = server_config(Starlette(), ConnectionLimits(at_once=400))
    print(config.http.keywords["limits"].at_once, *getrlimit(RLIMIT_NOFILE))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert ran.stdout.splitlines() == ["400 800 1000", "150 300 300"], ran.stderr


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET /\r\n\r\n", b"a" * 2**15]
)
def test_what_is_not_http_is_refused_by_a_problem(patient: LiveServer, sent: bytes) -> None:
    with connected(patient) as connection:
        connection.sendall(sent)
        assert problem(until_closed(connection), 400)["code"] == "malformed_request"


def zipped(nbytes: int) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as package:
        package.writestr("main.py", b"#" * nbytes)
    return written.getvalue()


def uploaded(server: LiveServer, package: bytes) -> str:
    answer = httpx.post(
        f"{server.address}/api/v1/code",
        content=package,
        headers={"content-type": "application/zip"},
        timeout=DEADLINE_S,
        trust_env=False,
    )
    assert answer.status_code == 201, answer.text
    return str(answer.json()["code"])
