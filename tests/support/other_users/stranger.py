"""Another user's process that speaks to the ports of ranks and agents: garbage, and what their own
programs would say.

Run as a program by root, with a port of a rendezvous store, the names of its keys that are set and
ports of other programs, each from a line of standard input; it answers each line when all is sent.
Its connections stay open until standard input ends.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (of sockets; the interpreter may be closed to the user)
import json
import os
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534
GLOO_NUMBERS = range(16)
"""gloo's listeners give the connections that they wait for the first numbers."""
_QUERY_VALIDATE, _QUERY_SET = b"\0", b"\1"
_MAGIC = struct.pack("<I", 0x3C85F7CE)


class Stranger:
    """Drives the program from a test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def send(self, *ports: int, store: int = 0, keys: tuple[str, ...] = ()) -> None:
        """`store`: a port of a rendezvous store; 0: none."""
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"ports": ports, "store": store, "keys": keys}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "sent\n"


@contextmanager
def stranger() -> Iterator[Stranger]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Stranger(process)
    finally:
        process.communicate(timeout=60)


def messages(seed: int) -> Iterator[bytes]:
    for number in GLOO_NUMBERS:
        yield struct.pack("<q", number)
    dice = random.Random(seed)
    for length in (1, 8, 64, 4096):
        yield dice.randbytes(length)
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield struct.pack("<Q", 2**63 - 1)  # a length
    yield b""


def set_key(name: str, content: bytes) -> bytes:
    """What a client of torch's TCPStore sends (torch 2.13: `TCPStoreBackend.hpp`)."""
    fields = (_QUERY_VALIDATE, _MAGIC, _QUERY_SET, text(name.encode()), text(content))
    return b"".join(fields)


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def run() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    kept = []
    for seed, line in enumerate(sys.stdin):
        order = json.loads(line)
        sent = [(port, message) for port in order["ports"] for message in messages(seed)]
        sent += [(order["store"], set_key(key, bytes(64))) for key in order["keys"]]
        for port, message in sent:
            with contextlib.suppress(OSError):  # closed by the other end
                link = socket.create_connection(("127.0.0.1", port), 5.0)
                kept.append(link)
                link.sendall(message)
        print("sent", flush=True)


if __name__ == "__main__":
    run()
