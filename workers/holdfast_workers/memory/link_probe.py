"""Bytes there and back between two agents, to try out the way between their nodes.

Over the same authenticated connections that state moves on; what comes back must be what was sent.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from typing import Any

from holdfast_workers.memory import wire
from holdfast_workers.memory.wire import DEFAULT_TIMEOUTS, Code, Refused, Role, WireError
from holdfast_workers.state.digest import payload_digest

EXCHANGED_BYTES = 4 << 20


def exchange(secret: bytes, host: str, port: int, timeout_s: float) -> str:
    """Send bytes to the agent that listens there and take them back: "" if all is well, else what
    went wrong, in words. Takes `timeout_s` at most."""
    deadline = time.monotonic() + timeout_s
    timeouts = replace(
        DEFAULT_TIMEOUTS,
        connect_s=min(DEFAULT_TIMEOUTS.connect_s, timeout_s),
    )
    sent = os.urandom(EXCHANGED_BYTES)
    digest = payload_digest(sent)
    back = bytearray(EXCHANGED_BYTES)
    try:
        with wire.connect(secret, host, port, Role.EXCHANGE, timeouts, deadline) as sock:
            header = wire.encode_header({"nbytes": len(sent), "digest": digest})
            wire.send_payload(sock, header, deadline)
            wire.send_payload(sock, sent, deadline)
            wire.receive_header(sock, deadline)
            wire.receive_into(sock, memoryview(back), deadline=deadline)
    except (OSError, WireError) as error:
        return f"{host}:{port}: {type(error).__name__}: {error}"
    return "" if payload_digest(back) == digest else f"{host}:{port}: other bytes came back"


def give_back(sock: socket.socket, header: dict[str, Any]) -> None:
    """The listening side of one exchange."""
    nbytes = wire.whole(header, "nbytes")
    if nbytes > EXCHANGED_BYTES:
        raise WireError(f"an exchange of {nbytes} bytes is above the limit")
    taken = bytearray(nbytes)
    wire.receive_into(sock, memoryview(taken))
    if payload_digest(taken) != wire.text(header, "digest"):
        raise Refused(Code.BAD_DIGEST, "other bytes arrived than were sent")
    wire.send_header(sock, {"ok": True})
    wire.send_payload(sock, memoryview(taken))
