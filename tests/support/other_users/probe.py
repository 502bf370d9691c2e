"""What another user of the machine gets at: tries it, and reports each success.

Run as a program by root, it takes that user's id first; only the standard library, loaded before.
Standard input: a JSON object with `user`, `paths`, `unix` (paths of Unix sockets), `abstract`
(names of abstract ones), `ports` (of loopback), `api` (a port, or 0) and `processes` (ids).
Standard output: a JSON list of sentences; empty: nothing.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  (the interpreter may be closed to the user)
import encodings.idna  # noqa: F401  (of sockets; the same)
import functools
import json
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PATIENCE_S = 5.0
RAYS_CALLS = (
    "ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "ray.rpc.InternalKVGcsService/InternalKVKeys",
    "ray.rpc.NodeManagerService/GetNodeStats",
    "ray.rpc.ObjectManagerService/Pull",
    "ray.rpc.CoreWorkerService/GetCoreWorkerStats",
)
API_REQUESTS = (
    *("GET /api/v1/jobs", "GET /api/v1/nodes", "GET /metrics", "GET /version"),
    *("POST /api/v1/jobs", "POST /api/v1/jobs/any/cancel", "POST /api/v1/session/codes"),
    *("PUT /api/v1/code/any", "DELETE /api/v1/jobs/any"),
)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4


def findings(given: dict[str, Any]) -> Iterator[str]:
    for path in map(Path, given["paths"]):
        yield from attempts(path)
    for path in given["unix"]:
        yield from succeeded(f"connected to {path}", functools.partial(talk, path))
    for name in given["abstract"]:
        if said := talk("\0" + name, socket.SOCK_SEQPACKET):
            yield f"the abstract socket {name} answered {said!r}"
    with ThreadPoolExecutor(max(1, len(given["ports"]))) as threads:
        for answered in threads.map(lambda port: list(answers(port)), given["ports"]):
            yield from answered
    if given["api"]:
        yield from answers_of_api(given["api"])
    for pid in given["processes"]:
        for entry in ("environ", "maps", "mem", "cwd", "root", "fd"):
            yield from attempts(Path(f"/proc/{pid}/{entry}"), change=False)


def attempts(path: Path, *, change: bool = True) -> Iterator[str]:
    """To read and to change the path, which need not exist any more. What succeeds is undone."""
    yield from succeeded(f"listed {path}", lambda: list(path.iterdir()))
    yield from succeeded(f"read {path}", lambda: read_byte(path))
    if not change:
        return
    yield from succeeded(f"opened {path} for writing", lambda: os.close(os.open(path, os.O_WRONLY)))
    yield from succeeded(f"renamed {path}", lambda: rename_and_back(path))
    yield from succeeded(f"planted a file in {path}", lambda: plant(path / "planted"))


def succeeded(what: str, attempt: Callable[[], object]) -> Iterator[str]:
    try:
        attempt()
    except OSError:
        return
    yield what


def read_byte(path: Path) -> None:
    if not stat.S_ISREG(path.stat().st_mode):
        raise IsADirectoryError
    with path.open("rb") as file:
        if not file.read(1) and path.is_relative_to("/proc"):
            raise ProcessLookupError  # it has ended


def rename_and_back(path: Path) -> None:
    path.rename(f"{path}.moved").rename(path)


def plant(path: Path) -> None:
    path.symlink_to("/etc/passwd")
    path.unlink()


def talk(address: str, kind: int = socket.SOCK_STREAM) -> bytes:
    """What a Unix socket answers. Raises OSError unless it can be connected to; the name of an
    abstract one is no secret: there only an answer counts."""
    with socket.socket(socket.AF_UNIX, kind) as link:
        link.settimeout(PATIENCE_S)
        try:
            link.connect(address)
        except OSError:
            if address.startswith("\0"):
                return b""
            raise
        try:
            link.send(b"{}\n")
            return link.recv(1024)
        except OSError:
            return b""


def answers(port: int) -> Iterator[str]:
    """Of a TCP port of loopback: to plain HTTP, and to Ray's calls without its token."""
    if (said := exchange(port, b"GET / HTTP/1.0\r\n\r\n")).startswith(b"HTTP/") and (
        said.split()[1].startswith(b"2")
    ):
        yield f"port {port} answered over HTTP: {said!r}"
    for call in RAYS_CALLS if said or not is_silent(port) else ():
        if any(kind == DATA for kind in frames(exchange(port, request(call, port)))):
            yield f"port {port} answered {call}"


def is_silent(port: int) -> bool:
    """Whether the port, as those of gloo do, takes a call and neither answers nor closes."""
    try:
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as link:
            link.sendall(request(RAYS_CALLS[0], port))
            link.recv(1)
    except TimeoutError:
        return True
    except OSError:  # refused, or reset
        pass
    return False


def answers_of_api(port: int) -> Iterator[str]:
    """To requests without a token, but for 401: what it shows, and what it would do."""
    for request_line in API_REQUESTS:
        lines = (f"{request_line} HTTP/1.0", f"Host: 127.0.0.1:{port}", "Content-Length: 0")
        said = exchange(port, "\r\n".join((*lines, "", "")).encode())
        if said.split()[1:2] != [b"401"]:
            yield f"the API answered {request_line}: {said[:200]!r}"


def exchange(port: int, sent: bytes) -> bytes:
    """All that comes back until the stream, or the connection, ends."""
    said = b""
    try:
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as link:
            link.sendall(sent)
            while more := link.recv(65536):
                said += more
                if sent.startswith(PREFACE) and {DATA, HEADERS} & {*frames(said)}:
                    break
    except OSError:  # refused, reset, or silent
        pass
    return said


def request(call: str, port: int, token: str = "") -> bytes:
    """A call of gRPC without arguments, over HTTP/2."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{call}",
        ":authority": f"127.0.0.1:{port}",
        "content-type": "application/grpc",
        "te": "trailers",
        **({"authorization": f"Bearer {token}"} if token else {}),
    }
    headers = b"".join(b"\0" + text(name) + text(field) for name, field in fields.items())
    message = bytes(5)  # not compressed, of no length
    return (
        PREFACE
        + frame(SETTINGS, 0, 0, b"")
        + frame(HEADERS, END_HEADERS, 1, headers)
        + frame(DATA, END_STREAM, 1, message)
    )


def text(value: str) -> bytes:
    """A string of HPACK (RFC 7541, section 5.2) of less than 127 bytes."""
    return bytes([len(value)]) + value.encode()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


def frames(said: bytes) -> Iterator[int]:
    """The kinds of the frames of HTTP/2 that belong to the call."""
    while len(said) >= 9:
        length, stream = int.from_bytes(said[:3], "big"), int.from_bytes(said[5:9], "big")
        if stream == 1:
            yield said[3]
        said = said[9 + length :]


def become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


if __name__ == "__main__":
    document = json.load(sys.stdin)
    become(document["user"])
    json.dump(list(findings(document)), sys.stdout)
