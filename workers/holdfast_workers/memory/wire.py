"""The wire format of the data channel between node agents: handshake, headers and raw payloads.

Handshake: the server sends a nonce. The client proves that it knows the job's secret with an HMAC
over that nonce and the role it requests, and sends a nonce of its own, for which the server gives
the same proof. So neither side accepts state from, or sends state to, a peer without the secret.
With TLS (`memory/peer_tls.py`), the server first announces it by an opening of its own, and all of
this runs inside; both proofs then name the session of TLS, so that a third party that ends TLS on
the way is refused. Each side knows from its settings whether it uses TLS, and gives up if the
opening is the other one: an opening that changed on its way can prevent a connection, not weaken
it.

After the handshake, headers are JSON of bounded size, preceded by their length and checksum, and
payloads are raw bytes. A bit that changes in transit is detected in headers too: a wrong step
number in a header would do as much harm as wrong bytes of the step.

Every wait on a socket has a timeout. It bounds the time without progress and not the duration of a
transfer, unless a deadline is given; a handshake always has a deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import select
import socket
import ssl
import struct
import time
import zlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import xxhash

from holdfast_workers.errors import WorkersError
from holdfast_workers.memory.peer_tls import (
    TLS_VARIABLE,
    PeerTls,
    TlsUnusable,
    explain,
    session_of,
)
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.layout import StateLayout

GREETING = b"HFDATA1\n"
TLS_OPENING = b"HFTLS-2\n"  # HFTLS13: with proofs that did not name the session
OPENING_BYTES = len(TLS_OPENING)
_OF_ANY_VERSION = (b"HFDATA", b"HFTLS")
NONCE_BYTES = 32
GREETING_BYTES = len(GREETING) + NONCE_BYTES
HEADER_LIMIT = 16 * 1024
LAYOUT_LIMIT = 64 * 1024 * 1024
_PREFIX = struct.Struct(">II")  # of a header: its length, and the crc32 of length and header
PREFIX_BYTES = _PREFIX.size
_CHUNK = 4 * 1024 * 1024
RECORD_BYTES = 16 * 1024
"""The most that one record of TLS carries. A TLS socket that is asked for as much keeps nothing
back that no selector would see."""
_LOWER_EFFORT = 0x04  # code point 1, above the two bits of congestion notification
_FILLER = 1  # TC_PRIO_FILLER of Linux
# Small pieces, each hashed at once: the socket buffers and the piece stay in the core's own cache.
# Measured on loopback, 256 MB hashed: 58 ms in pieces of 128 KiB, 114 ms in pieces as they arrive.
_RECEIVED_PIECE = 128 * 1024


NOT_READY = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Raised by a socket that does not block if it would have to."""


class Role(StrEnum):
    """The purpose of a connection, requested in the handshake."""

    PUSH = "push"
    FETCH = "fetch"
    BOXES = "boxes"
    LIFELINE = "lifeline"
    EXCHANGE = "exchange"
    CACHE = "cache"


class WireError(WorkersError):
    """The peer violated the protocol or closed the connection."""


class Intercepted(WireError):
    """A client that knows the secret has its session of TLS with a third party."""


class WireRefused(WireError):
    """The peer refused a request. `code` is a value of `RefusalCode`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class RefusalCode(StrEnum):
    """Why a server refuses a request."""

    UNAUTHORISED = "unauthorised"
    INTERCEPTED = "intercepted"  # the client's session of TLS is not with this server
    MALFORMED = "malformed"
    FENCED = "fenced"  # the push belongs to an attempt below the fence
    NO_LAYOUT = "no_layout"
    BAD_DIGEST = "bad_digest"  # the bytes do not have the announced digest
    NOT_HELD = "not_held"
    NO_SPACE = "no_space"
    BUSY = "busy"


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of the socket operations on the data channel, in seconds."""

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
    tls: PeerTls | None = None,
) -> socket.socket:
    """Open an authenticated connection, ready for the first header of `role`.

    `deadline` (`time.monotonic()`) limits the handshake if it comes before the timeout. Raises
    OSError (including TimeoutError) if the peer cannot be reached, WireRefused if the peer rejects
    the client's proof, WireError if the client rejects the peer's.
    """
    sock = socket.create_connection((host, port), timeout=timeouts.connect_s)
    try:
        tune(sock)
        sock.settimeout(timeouts.handshake_s)
        until = time.monotonic() + timeouts.handshake_s
        if deadline is not None:
            until = min(until, deadline)
        opening = _receive_opening(sock, until)
        if tls is not None:
            check_opening(opening, tls=True)
            sock = start_tls(sock, tls)
            _shake_hands(sock, until)
            opening = _receive_opening(sock, until)
        check_opening(opening, tls=False)
        nonce = bytearray(NONCE_BYTES)
        receive_into(sock, memoryview(nonce), deadline=until)
        session = session_of(sock)
        answer, client_nonce = answer_greeting(secret, opening + bytes(nonce), role, session)
        sock.sendall(answer)
        check_welcome(secret, client_nonce, role, session, receive_header(sock, until))
        sock.settimeout(timeouts.stall_s)
    except ssl.SSLError as error:
        sock.close()
        raise WireError(explain(error)) from error
    except BaseException:
        sock.close()
        raise
    return sock


def check_opening(opening: bytes, *, tls: bool) -> None:
    """Raise WireError unless a server opens as a client that uses TLS, or does not, expects it."""
    if opening == (TLS_OPENING if tls else GREETING):
        return
    if tls and opening == GREETING:
        raise WireError(
            f"the peer does not use TLS, but this node does: set {TLS_VARIABLE} on the peer's node "
            "and start it again, or on none"
        )
    if not tls and opening == TLS_OPENING:
        raise WireError(
            f"the peer uses TLS, but this node does not: set {TLS_VARIABLE} on this node and start "
            "it again, or on none"
        )
    if opening.startswith(_OF_ANY_VERSION):
        raise WireError(
            f"the peer's Holdfast is of another version (its greeting begins with {opening!r}): "
            "install the same version on both nodes"
        )
    raise WireError(f"the peer is not a data server: its greeting begins with {opening!r}")


def start_tls(sock: socket.socket, tls: PeerTls) -> ssl.SSLSocket:
    """The client's side of TLS, once the server has announced it; replaces `sock`. The handshake is
    still to be done. Raises WireError if this node's certificates are unusable."""
    try:
        return tls.client(sock)
    except TlsUnusable as error:
        raise WireError(str(error)) from error


def announce_tls(sock: socket.socket, tls: PeerTls) -> ssl.SSLSocket:
    """The server's side of TLS on a new connection; replaces `sock`. `admit` does the handshake.
    Raises WireError or OSError; `sock` is then closed."""
    try:
        sock.sendall(TLS_OPENING)  # into an empty buffer
        return tls.server(sock)
    except TlsUnusable as error:
        sock.close()
        raise WireError(str(error)) from error
    except OSError:
        sock.close()
        raise


def answer_greeting(
    secret: bytes, greeting: bytes, role: Role, session: str
) -> tuple[bytes, bytes]:
    """The client's answer to a greeting: the bytes to send, and the client's nonce in them.
    `session`: of TLS (`session_of`)."""
    client_nonce = secrets.token_hex(NONCE_BYTES)
    proof = _proof(secret, "client", greeting[len(GREETING) :], role, session)
    claim = {"role": role, "nonce": client_nonce, "proof": proof}
    if session:
        claim["session"] = session
    return encode_header(claim), client_nonce.encode()


def check_welcome(
    secret: bytes, client_nonce: bytes, role: Role, session: str, welcome: dict[str, Any]
) -> None:
    """Raise WireError unless the server has proved that it knows the secret, in this session."""
    expected = _proof(secret, "server", client_nonce, role, session)
    if not _same(welcome.get("proof"), expected):
        raise WireError("the data server does not know the job's secret")


def admit(sock: socket.socket, secret: bytes, timeouts: Timeouts) -> Role:
    """The server's side of the handshake: authenticate a client. Returns the role it requests.

    Raises WireError or OSError; the caller closes the socket."""
    sock.settimeout(timeouts.handshake_s)
    _shake_hands(sock, time.monotonic() + timeouts.handshake_s)
    nonce = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(GREETING + nonce)
    claim = receive_header(sock, time.monotonic() + timeouts.handshake_s)
    role, session = claim.get("role"), session_of(sock)
    claimed = text_field(claim, "session") if session else ""
    expected = _proof(secret, "client", nonce, str(role), claimed)
    if role not in list(Role) or not _same(claim.get("proof"), expected):
        send_refusal(sock, RefusalCode.UNAUTHORISED, "wrong secret or unknown role")
        raise WireError("a client did not know the job's secret")
    if not _same(claimed, session):
        send_refusal(sock, RefusalCode.INTERCEPTED, _THIRD_PARTY)
        raise Intercepted(_THIRD_PARTY)
    client_nonce = text_field(claim, "nonce").encode()
    send_header(sock, {"proof": _proof(secret, "server", client_nonce, role, session)})
    return Role(role)


def tune(sock: socket.socket) -> None:
    """Send small messages at once (TCP_NODELAY)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def lower_priority(sock: socket.socket) -> None:
    """Give way to all other traffic, as far as host and network distinguish traffic classes: a
    replica can wait, the collectives of training cannot.

    Marks packets as Lower Effort (RFC 8622), and as filler for the queue of this host.
    """
    family, option = (
        (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
        if sock.family == socket.AF_INET6
        else (socket.IPPROTO_IP, socket.IP_TOS)
    )
    sock.setsockopt(family, option, _LOWER_EFFORT)
    # The priority is set last, because setting the traffic class changes it too.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _FILLER)


def encode_header(header: dict[str, Any]) -> bytes:
    raw = json.dumps(header, separators=(",", ":")).encode()
    if len(raw) > HEADER_LIMIT:
        raise WireError(f"a header of {len(raw)} bytes is above the limit of {HEADER_LIMIT}")
    return _PREFIX.pack(len(raw), _checksum(raw)) + raw


def decode_header(prefix: bytes | bytearray, raw: bytes) -> dict[str, Any]:
    """Decode the header that followed `prefix`. Raises WireRefused for a refusal, WireError for a
    damaged header."""
    if _PREFIX.unpack(prefix)[1] != _checksum(raw):
        raise WireError(f"the checksum of the header is wrong: {raw[:40]!r}")
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a header: {raw[:40]!r}") from error
    if not isinstance(header, dict):
        raise WireError(f"not a header: {raw[:40]!r}")
    if "refused" in header:
        raise WireRefused(text_field(header, "refused"), text_field(header, "message"))
    return header


def header_length(prefix: bytes | bytearray) -> int:
    """Size in bytes of the header that follows `prefix`. Raises WireError above the limit."""
    length, _ = _PREFIX.unpack(prefix)
    if length > HEADER_LIMIT:
        raise WireError(f"a header of {length} bytes was announced, the limit is {HEADER_LIMIT}")
    return int(length)


def send_header(sock: socket.socket, header: dict[str, Any]) -> None:
    sock.sendall(encode_header(header))


def send_refusal(sock: socket.socket, code: RefusalCode, message: str) -> None:
    send_header(sock, {"refused": code, "message": message[:1024]})


def receive_header(sock: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    """The next header. Raises WireRefused if it is a refusal, WireError at end-of-file."""
    prefix = bytearray(PREFIX_BYTES)
    receive_into(sock, memoryview(prefix), deadline=deadline)
    body = bytearray(header_length(prefix))
    receive_into(sock, memoryview(body), deadline=deadline)
    return decode_header(prefix, bytes(body))


def send_payload(
    sock: socket.socket, payload: memoryview | bytes, deadline: float | None = None
) -> None:
    """Send all bytes in pieces, so that a timeout means a stall and not a large payload."""
    # With TLS, a timeout is for each record, so that a deadline has to be looked at for each.
    looks_often = deadline is not None and isinstance(sock, ssl.SSLSocket)
    piece = RECORD_BYTES if looks_often else _CHUNK
    with memoryview(payload) as view:
        for start in range(0, len(view), piece):
            _limit(sock, deadline)
            sock.sendall(view[start : start + piece])


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
    """Decode a received layout after checking its digest. Raises WireError."""
    if payload_digest(raw) != digest:
        raise WireError("the layout does not have the announced digest")
    try:
        return StateLayout.from_json(raw)
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"not a layout: {error}") from error


def shut(sock: socket.socket) -> None:
    """Shut down a connection that another thread uses; its reads and writes return at once."""
    with contextlib.suppress(OSError):  # it may already be closed
        # Not the method of a TLS socket: that drops its encryption before it shuts the connection
        # down, and a thread that sends meanwhile would send in the clear.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def is_stale(sock: socket.socket) -> bool:
    """True if the peer has closed an idle connection on which no data is expected."""
    poll = select.poll()  # select() itself cannot take descriptors above 1023
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def int_field(header: dict[str, Any], key: str) -> int:
    """The integer in [0, 2**63) at `key` of a header. Raises WireError if there is none."""
    value = header.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise WireError(f"header field {key!r} is {value!r}, not a non-negative integer")
    return value


def text_field(header: dict[str, Any], key: str) -> str:
    """The string at `key` of a header. Raises WireError if there is none."""
    value = header.get(key)
    if not isinstance(value, str):
        raise WireError(f"header field {key!r} is {value!r}, not a string")
    return value


def texts_field(header: dict[str, Any], key: str) -> list[str]:
    """The strings at `key` of a header. Raises WireError if there is no list of them."""
    value = header.get(key)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise WireError(f"header field {key!r} is {value!r}, not a list of strings")
    return value


def _receive_opening(sock: socket.socket, deadline: float) -> bytes:
    opening = bytearray(OPENING_BYTES)
    receive_into(sock, memoryview(opening), deadline=deadline)
    return bytes(opening)


def _shake_hands(sock: socket.socket, deadline: float) -> None:
    """Do the handshake of TLS, if the socket uses it, by `deadline`."""
    if isinstance(sock, ssl.SSLSocket):
        _limit(sock, deadline)
        sock.do_handshake()


def _limit(sock: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        return
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("the transfer was not done by its deadline")
    stall_s = sock.gettimeout()
    sock.settimeout(remaining_s if stall_s is None else min(stall_s, remaining_s))


def _checksum(raw: bytes) -> int:
    return zlib.crc32(raw, len(raw))


def _same(claimed: object, expected: str) -> bool:
    return hmac.compare_digest(_encoded(str(claimed)), expected.encode())


def _proof(secret: bytes, side: str, nonce: bytes, role: str, session: str) -> str:
    said = side.encode() + nonce + _encoded(role + session)
    return hmac.new(secret, said, hashlib.sha256).hexdigest()


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # JSON can hold what UTF-8 cannot


_THIRD_PARTY = (
    "a third party ends TLS between the two nodes, with a certificate of their authority: find it "
    "on the path between them, then replace the authority and all certificates"
)
