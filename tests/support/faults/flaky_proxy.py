"""An HTTP proxy before an S3 server that injects network and server faults.

The first rule that matches a request and is not used up applies; other requests are forwarded.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from dataclasses import dataclass
from typing import Any

UPSTREAM_S = 60.0
SLOW_PIECE_S = 0.002
SLOW_PIECE = 4096
LATE_S = 0.8


@dataclass
class Rule:
    """One fault. `action`: `status` (answer with this status, without the server), `silence` (never
    answer), `reset` (close at once), `cut_upload` (close after some bytes of the body),
    `cut_download` (close after some bytes of the answer), `slow` (send the answer slowly),
    `late` (answer after 0.8 s),
    `lose_answer` (the server handles the request, but the answer is dropped)."""

    action: str
    method: str = ""
    contains: str = ""
    """Text that must occur in the path or the query."""
    times: int = 1_000_000
    status: int = 500
    code: str = "InternalError"
    after_bytes: int = 10_000
    every: int = 1
    """Apply to every n-th matching request only."""
    matched: int = 0
    used: int = 0


class FlakyProxy:
    """The proxy; `endpoint` is its URL, `requests` the requests received so far."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream = ("127.0.0.1", upstream_port)
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self.requests: list[str] = []
        self.closing = threading.Event()
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):  # the client has closed the connection
                    proxy.serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def add(self, action: str, **fields: Any) -> Rule:
        rule = Rule(action, **fields)
        with self._lock:
            self._rules.append(rule)
        return rule

    @property
    def rules(self) -> tuple[Rule, ...]:
        with self._lock:
            return tuple(self._rules)

    def unused(self) -> int:
        """Number of rules that are not used up."""
        return sum(rule.used < rule.times for rule in self.rules)

    def heal(self) -> None:
        with self._lock:
            self._rules.clear()

    def serve(self, client: socket.socket) -> None:
        """Serve one request and close the connection."""
        client.settimeout(UPSTREAM_S)
        head, rest = _head(client)
        if not head:
            return
        method, path, _ = head.split("\r\n", 1)[0].split(" ", 2)
        rule = self._rule_for(method, path)
        action = rule.action if rule is not None else ""
        if action == "reset":
            return
        if action == "silence":
            self.closing.wait(UPSTREAM_S)
            return
        if _header(head, "expect"):
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = int(_header(head, "content-length") or 0)
        if rule is not None and action == "cut_upload":
            _read_body(client, rest, min(length, rule.after_bytes))
            return
        body = _read_body(client, rest, length)
        if rule is not None and action == "status":
            client.sendall(_error(rule))
            return
        answer = self._forward(head, body)
        if action == "lose_answer":
            return
        if rule is not None and action == "cut_download":
            client.sendall(answer[: rule.after_bytes])
        elif action == "late":
            self.closing.wait(LATE_S)
            client.sendall(answer)
        elif action == "slow":
            for start in range(0, len(answer), SLOW_PIECE):
                client.sendall(answer[start : start + SLOW_PIECE])
                time.sleep(SLOW_PIECE_S)
        else:
            client.sendall(answer)

    def _rule_for(self, method: str, path: str) -> Rule | None:
        with self._lock:
            self.requests.append(f"{method} {path}")
            for rule in self._rules:
                matches = rule.method in ("", method) and rule.contains in path
                if not matches or rule.used >= rule.times:
                    continue
                rule.matched += 1
                if rule.matched % rule.every == 0:
                    rule.used += 1
                    return rule
        return None

    def _forward(self, head: str, body: bytes) -> bytes:
        first, *lines = head.split("\r\n")
        kept = [
            line for line in lines if line.lower().split(":")[0] not in ("expect", "connection")
        ]
        request = "\r\n".join([first, *kept, "Connection: close"]) + "\r\n\r\n"
        with socket.create_connection(self._upstream, timeout=UPSTREAM_S) as upstream:
            upstream.sendall(request.encode("latin-1") + body)
            answer = b""
            while piece := upstream.recv(1 << 16):
                answer += piece
        return answer


def _head(client: socket.socket) -> tuple[str, bytes]:
    """The request's head, and the part of the body received with it."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        piece = client.recv(1 << 16)
        if not piece:
            return "", b""
        raw += piece
    head, _, rest = raw.partition(b"\r\n\r\n")
    return head.decode("latin-1"), rest


def _header(head: str, name: str) -> str:
    for line in head.split("\r\n")[1:]:
        key, _, value = line.partition(":")
        if key.strip().lower() == name:
            return value.strip()
    return ""


def _read_body(client: socket.socket, rest: bytes, length: int) -> bytes:
    body = bytearray(rest)
    while len(body) < length:
        piece = client.recv(1 << 16)
        if not piece:
            break
        body += piece
    return bytes(body)


def _error(rule: Rule) -> bytes:
    text = f"<Error><Code>{rule.code}</Code><Message>injected fault</Message></Error>".encode()
    head = f"HTTP/1.1 {rule.status} Bad Day\r\nContent-Type: application/xml\r\n"
    return f"{head}Content-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode() + text
