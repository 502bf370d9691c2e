"""The bytes between node agents: authentication, headers, and payloads straight from memory.

A connection begins with the server's nonce. The client proves that it knows the job's secret by
an HMAC over that nonce and the role it asks for, and sends a nonce of its own, which the server
answers in kind: neither side takes a byte of state from, or gives one to, a stranger. After that,
headers are JSON of bounded size behind their length and checksum, and payloads are raw. A bit that
changes on the way is found: a step's number in a header is worth as much as the step's bytes.

Every wait on a socket has a timeout. It bounds the time without progress, not the whole of a
transfer, unless a deadline is given; a handshake always has one.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import time
import zlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import xxhash

from holdfast_workers.errors import WorkersError
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.layout import StateLayout

GREETING = b"HFDATA1\n"
NONCE_BYTES = 32
GREETING_BYTES = len(GREETING) + NONCE_BYTES
HEADER_LIMIT = 16 * 1024
LAYOUT_LIMIT = 64 * 1024 * 1024
_PREFIX = struct.Struct(">II")  # of a header: its length, and the crc32 of length and header
PREFIX_BYTES = _PREFIX.size
_CHUNK = 4 * 1024 * 1024
_LOWER_EFFORT = 0x04  # code point 1, above the two bits of congestion notification
_FILLER = 1  # TC_PRIO_FILLER of Linux
# Small pieces, each hashed at once: the socket's buffers and the piece stay in a core's own cache.
# Measured on loopback, 256 MB hashed: 58 ms by 128 KiB, 114 ms by as much as there is.
_RECEIVED_PIECE = 128 * 1024


class Role(StrEnum):
    PUSH = "push"
    FETCH = "fetch"
    BOXES = "boxes"
    LIFELINE = "lifeline"
    EXCHANGE = "exchange"


class WireError(WorkersError):
    """The other side broke the protocol, or closed the connection."""


class Refused(WireError):
    """The other side said no. `code` is one of a closed set, see `Code`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Code(StrEnum):
    """Why a request is refused."""

    UNAUTHORISED = "unauthorised"
    MALFORMED = "malformed"
    FENCED = "fenced"  # the push is of an attempt that has been ended
    NO_LAYOUT = "no_layout"
    BAD_DIGEST = "bad_digest"  # what arrived is not what was announced
    NOT_HELD = "not_held"
    NO_SPACE = "no_space"
    BUSY = "busy"


@dataclass(frozen=True)
class Timeouts:
    """Of every socket operation on the data channel, in seconds."""

    connect_s: float = 2.0
    handshake_s: float = 2.0
    stall_s: float = 5.0  # no progress within a message or a payload
    idle_s: float = 600.0  # a server's wait for the next message of an idle client


DEFAULT_TIMEOUTS = Timeouts()


def connect(
    secret: bytes,
    host: str,
    port: int,
    role: Role,
    timeouts: Timeouts,
    deadline: float | None = None,
) -> socket.socket:
    """An authenticated connection, ready for the role's first header; by `deadline` if there is
    one, however much more the timeouts would give.

    Raises OSError (also as TimeoutError) if the peer cannot be reached, Refused if it does not
    know us, WireError if we do not know it.
    """
    sock = socket.create_connection((host, port), timeout=timeouts.connect_s)
    try:
        tune(sock)
        sock.settimeout(timeouts.handshake_s)
        until = time.monotonic() + timeouts.handshake_s
        if deadline is not None:
            until = min(until, deadline)
        greeting = bytearray(GREETING_BYTES)
        receive_into(sock, memoryview(greeting), deadline=until)
        answer, mine = answer_greeting(secret, bytes(greeting), role)
        sock.sendall(answer)
        check_welcome(secret, mine, role, receive_header(sock, until))
        sock.settimeout(timeouts.stall_s)
    except BaseException:
        sock.close()
        raise
    return sock


def answer_greeting(secret: bytes, greeting: bytes, role: Role) -> tuple[bytes, bytes]:
    """The client's answer to a greeting, as bytes to send, and the nonce it carries."""
    if not greeting.startswith(GREETING):
        raise WireError(f"no data server: it greets with {greeting[:8]!r}")
    mine = secrets.token_hex(NONCE_BYTES).encode()
    proof = _proof(secret, "client", greeting[len(GREETING) :], role)
    return encode_header({"role": role, "nonce": mine.decode(), "proof": proof}), mine


def check_welcome(secret: bytes, mine: bytes, role: Role, welcome: dict[str, Any]) -> None:
    """Raises WireError unless the server proved that it knows the secret."""
    expected = _proof(secret, "server", mine, role)
    if not _same(welcome.get("proof"), expected):
        raise WireError("the data server does not know the job's secret")


def admit(sock: socket.socket, secret: bytes, timeouts: Timeouts) -> Role:
    """The server's side of `connect`. Raises WireError or OSError; the caller closes."""
    sock.settimeout(timeouts.handshake_s)
    nonce = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(GREETING + nonce)
    claim = receive_header(sock, time.monotonic() + timeouts.handshake_s)
    role = claim.get("role")
    expected = _proof(secret, "client", nonce, str(role))
    if role not in list(Role) or not _same(claim.get("proof"), expected):
        send_refusal(sock, Code.UNAUTHORISED, "wrong secret or unknown role")
        raise WireError("a client did not know the job's secret")
    theirs = text(claim, "nonce").encode()
    send_header(sock, {"proof": _proof(secret, "server", theirs, role)})
    return Role(role)


def tune(sock: socket.socket) -> None:
    """Small messages leave at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def step_back(sock: socket.socket) -> None:
    """Let what is sent here pass only where nothing else wants to, as far as host and network
    tell classes of traffic apart: a copy can wait, the collectives of training cannot.

    Marked as Lower Effort (RFC 8622), and as filler for this host's own queue.
    """
    family, option = (
        (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
        if sock.family == socket.AF_INET6
        else (socket.IPPROTO_IP, socket.IP_TOS)
    )
    sock.setsockopt(family, option, _LOWER_EFFORT)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _FILLER)  # after: marking sets it too


def encode_header(header: dict[str, Any]) -> bytes:
    raw = json.dumps(header, separators=(",", ":")).encode()
    if len(raw) > HEADER_LIMIT:
        raise WireError(f"a header of {len(raw)} bytes is above the limit of {HEADER_LIMIT}")
    return _PREFIX.pack(len(raw), _checksum(raw)) + raw


def decode_header(prefix: bytes | bytearray, raw: bytes) -> dict[str, Any]:
    """The header behind its prefix. Raises Refused for a refusal, WireError for what is not a
    header, or not the one that was sent."""
    if _PREFIX.unpack(prefix)[1] != _checksum(raw):
        raise WireError(f"not the header that was sent: {raw[:40]!r}")
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise WireError(f"not a header: {raw[:40]!r}") from error
    if not isinstance(header, dict):
        raise WireError(f"not a header: {raw[:40]!r}")
    if "refused" in header:
        raise Refused(text(header, "refused"), text(header, "message"))
    return header


def header_length(prefix: bytes | bytearray) -> int:
    """Bytes of the header that follows this prefix. Raises WireError beyond the limit."""
    length, _ = _PREFIX.unpack(prefix)
    if length > HEADER_LIMIT:
        raise WireError(f"a header of {length} bytes was announced, the limit is {HEADER_LIMIT}")
    return int(length)


def send_header(sock: socket.socket, header: dict[str, Any]) -> None:
    sock.sendall(encode_header(header))


def send_refusal(sock: socket.socket, code: Code, message: str) -> None:
    send_header(sock, {"refused": code, "message": message[:1024]})


def receive_header(sock: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    """The next header. Raises Refused if it is a refusal, WireError at the end of the stream."""
    prefix = bytearray(PREFIX_BYTES)
    receive_into(sock, memoryview(prefix), deadline=deadline)
    body = bytearray(header_length(prefix))
    receive_into(sock, memoryview(body), deadline=deadline)
    return decode_header(prefix, bytes(body))


def send_payload(
    sock: socket.socket, payload: memoryview | bytes, deadline: float | None = None
) -> None:
    """All bytes, in pieces, so that a timeout means a stall and not a big payload."""
    with memoryview(payload) as view:
        for start in range(0, len(view), _CHUNK):
            _limit(sock, deadline)
            sock.sendall(view[start : start + _CHUNK])


def receive_into(
    sock: socket.socket,
    target: memoryview,
    hasher: xxhash.xxh3_128 | None = None,
    deadline: float | None = None,
) -> None:
    """Fill `target`, without allocating. Raises WireError if the stream ends before."""
    filled = 0
    while filled < len(target):
        _limit(sock, deadline)
        piece = target[filled : filled + _RECEIVED_PIECE]
        count = sock.recv_into(piece)
        if count == 0:
            raise WireError(f"the connection ended after {filled} of {len(target)} bytes")
        if hasher is not None:
            hasher.update(piece[:count])
        filled += count


def parse_layout(raw: bytes, digest: str) -> StateLayout:
    """A layout that was received, once it is the one announced. Raises WireError."""
    if payload_digest(raw) != digest:
        raise WireError("not the layout that was announced")
    try:
        return StateLayout.from_json(raw)
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"not a layout: {error}") from error


def shut(sock: socket.socket) -> None:
    """End a connection under another thread's hands; its reads and writes return at once."""
    with contextlib.suppress(OSError):  # it may have ended by itself
        sock.shutdown(socket.SHUT_RDWR)


def is_stale(sock: socket.socket) -> bool:
    """True if the other side has ended an idle connection on which nothing is to come."""
    poll = select.poll()  # select() itself cannot take descriptors above 1023
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def whole(header: dict[str, Any], key: str) -> int:
    """A whole number ≥ 0 of a header. Raises WireError."""
    value = header.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise WireError(f"header field {key!r} is {value!r}, not a whole number")
    return value


def text(header: dict[str, Any], key: str) -> str:
    """A string of a header. Raises WireError."""
    value = header.get(key)
    if not isinstance(value, str):
        raise WireError(f"header field {key!r} is {value!r}, not a string")
    return value


def _limit(sock: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the transfer was not done by its deadline")
    stall_s = sock.gettimeout()
    sock.settimeout(left if stall_s is None else min(stall_s, left))


def _checksum(raw: bytes) -> int:
    return zlib.crc32(raw, len(raw))


def _same(claimed: object, expected: str) -> bool:
    return hmac.compare_digest(str(claimed).encode(), expected.encode())


def _proof(secret: bytes, side: str, nonce: bytes, role: str) -> str:
    return hmac.new(secret, side.encode() + nonce + role.encode(), hashlib.sha256).hexdigest()
