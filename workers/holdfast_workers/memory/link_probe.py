"""Link probe: an echo of random bytes between two agents that tests the path between their nodes.

It uses the same authenticated connections as state transfers, and the echo must equal the bytes
sent.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from typing import Any

from holdfast_workers.memory import wire
from holdfast_workers.memory.peer_tls import PeerTls
from holdfast_workers.memory.wire import DEFAULT_TIMEOUTS, RefusalCode, Role, WireError, WireRefused
from holdfast_workers.state.digest import payload_digest

EXCHANGED_BYTES = 4 << 20


def exchange(
    secret: bytes, host: str, port: int, timeout_s: float, tls: PeerTls | None = None
) -> str:
    """Send random bytes to the agent at `host`:`port` and receive the echo, within `timeout_s`.

    Returns "" if the echo is correct, else a message that describes the failure."""
    deadline = time.monotonic() + timeout_s
    timeouts = replace(
        DEFAULT_TIMEOUTS,
        connect_s=min(DEFAULT_TIMEOUTS.connect_s, timeout_s),
    )
    sent = os.urandom(EXCHANGED_BYTES)
    digest = payload_digest(sent)
    received = bytearray(EXCHANGED_BYTES)
    try:
        with wire.connect(secret, host, port, Role.EXCHANGE, timeouts, deadline, tls) as sock:
            header = wire.encode_header({"nbytes": len(sent), "digest": digest})
            wire.send_payload(sock, header, deadline)
            wire.send_payload(sock, sent, deadline)
            wire.receive_header(sock, deadline)
            wire.receive_into(sock, memoryview(received), deadline=deadline)
    except (OSError, WireError) as error:
        return f"{host}:{port}: {type(error).__name__}: {error}"
    return (
        ""
        if payload_digest(received) == digest
        else f"{host}:{port}: the echo differs from the bytes sent"
    )


def echo(sock: socket.socket, header: dict[str, Any]) -> None:
    """Serve one exchange: the listening side."""
    nbytes = wire.int_field(header, "nbytes")
    if nbytes > EXCHANGED_BYTES:
        raise WireError(f"an exchange of {nbytes} bytes is above the limit")
    received = bytearray(nbytes)
    wire.receive_into(sock, memoryview(received))
    if payload_digest(received) != wire.text_field(header, "digest"):
        raise WireRefused(RefusalCode.BAD_DIGEST, "the bytes received differ from the bytes sent")
    wire.send_header(sock, {"ok": True})
    wire.send_payload(sock, memoryview(received))
