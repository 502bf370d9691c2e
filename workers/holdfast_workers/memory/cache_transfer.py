"""Transfer of token sets between caches of nodes: both sides of the data channel's `cache` role.

A client asks which of some files a node has, and reads one. Their names have their digests: who
reads verifies. The server reads into memory and maps nothing, so that a file that another process
makes shorter ends the connection, and not the agent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast_workers.data import token_cache
from holdfast_workers.errors import WorkersError
from holdfast_workers.memory import wire
from holdfast_workers.memory.peer_tls import PeerTls
from holdfast_workers.memory.wire import (
    DEFAULT_TIMEOUTS,
    RefusalCode,
    Role,
    Timeouts,
    WireError,
    WireRefused,
)
from holdfast_workers.protocol.messages import Partner

MOST_NAMES = 64
"""Of one question: it fits into a header."""
_PIECE_BYTES = 256 << 10
LEAST_BYTES_PER_S = 5e6
"""A node that sends slower has failed."""
_SLOW_READER_S = 60.0
"""How long a client's disk may take none of what it is sent."""


class CacheUnreachable(WorkersError):
    """A node cannot be reached, or has not sent what it has."""


class NotCached(WorkersError):
    """The node has the file no more."""


def serve_cached(sock: socket.socket, header: dict[str, Any], cache_dir: Path | None) -> None:
    """Answer which of some files are there, or send one. `cache_dir`: None of a node without."""
    match header.get("op"):
        case "which":
            names = wire.texts_field(header, "names")[:MOST_NAMES]
            wire.send_header(
                sock, {"there": [each for each in names if _is_there(cache_dir, each)]}
            )
        case "read":
            _send(sock, cache_dir, wire.text_field(header, "name"))
        case other:
            raise WireError(f"unknown request {other!r}")


def _is_there(cache_dir: Path | None, name: str) -> bool:
    if cache_dir is None or not token_cache.is_name(name):
        return False
    with contextlib.suppress(OSError):
        return stat.S_ISREG((cache_dir / name).lstat().st_mode)  # opening a pipe would wait
    return False


def _send(sock: socket.socket, cache_dir: Path | None, name: str) -> None:
    if cache_dir is None or not _is_there(cache_dir, name):
        raise WireRefused(RefusalCode.NOT_HELD, f"no file {name[:80]!r} in the cache")
    try:
        descriptor = os.open(cache_dir / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:  # it was removed just now
        raise WireRefused(RefusalCode.NOT_HELD, f"{name}: {error.strerror}") from error
    sock.settimeout(_SLOW_READER_S)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        left = os.fstat(file.fileno()).st_size
        wire.send_header(sock, {"nbytes": left})
        while left:
            piece = file.read(min(left, _PIECE_BYTES))
            if not piece:
                raise WireError(f"{name} has become shorter")
            wire.send_payload(sock, piece)
            left -= len(piece)


class RemoteCache:
    """The cache of another node of the job. Keeps a connection until it fails; for one thread."""

    def __init__(
        self,
        secret: bytes,
        partner: Partner,
        tls: PeerTls | None = None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self.partner = partner
        self._secret = secret
        self._tls = tls
        self._timeouts = timeouts
        self._sock: socket.socket | None = None

    def which(self, names: Iterable[str]) -> set[str]:
        """Those of the files, `MOST_NAMES` at most, that are there. Raises CacheUnreachable."""
        asked = list(names)
        with self._connected() as sock:
            wire.send_header(sock, {"op": "which", "names": asked})
            answer = wire.receive_header(sock, time.monotonic() + self._timeouts.stall_s)
            return set(wire.texts_field(answer, "there")) & set(asked)

    @contextmanager
    def open(self, name: str) -> Iterator[CachedReader]:
        """The content of a file, which is to be verified: its end is that of the file as it was
        sent. Raises CacheUnreachable, and so does the reader; NotCached."""
        with self._connected() as sock:
            wire.send_header(sock, {"op": "read", "name": name})
            answer = wire.receive_header(sock, time.monotonic() + self._timeouts.stall_s)
            nbytes = wire.int_field(answer, "nbytes")
            within_s = self._timeouts.stall_s + nbytes / LEAST_BYTES_PER_S
            reader = CachedReader(sock, nbytes, within_s, self)
        try:
            yield reader
        finally:
            if reader.left:
                self.close()

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock = None

    @contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        with self.failing():
            if self._sock is not None and wire.is_stale(self._sock):
                self.close()
            if self._sock is None:
                host, port = self.partner.host, self.partner.data_port
                self._sock = wire.connect(
                    self._secret, host, port, Role.CACHE, self._timeouts, tls=self._tls
                )
            self._sock.settimeout(self._timeouts.stall_s)
            yield self._sock

    @contextmanager
    def failing(self) -> Iterator[None]:
        """What goes wrong inside ends the connection, but for a refusal. Raises CacheUnreachable
        and NotCached."""
        try:
            yield
        except WireRefused as error:
            raise NotCached(f"{self.partner.agent}: {error}") from error
        except (OSError, WireError) as error:
            self.close()
            where = f"{self.partner.host}:{self.partner.data_port}"
            raise CacheUnreachable(f"{self.partner.agent} ({where}): {error}") from error


class CachedReader:
    """The bytes of one file, in order. Used until the next question to its cache."""

    def __init__(self, sock: socket.socket, nbytes: int, within_s: float, cache: RemoteCache):
        """`within_s`: the most that its reads may wait in all."""
        self.left = nbytes
        self._sock = sock
        self._left_s = within_s
        self._cache = cache

    def readinto(self, target: memoryview) -> int:
        """Fill `target`, or less of it at the end; the number of bytes. Raises CacheUnreachable."""
        count = min(self.left, len(target))
        began = time.monotonic()
        with self._cache.failing():
            wire.receive_into(self._sock, target[:count], deadline=began + self._left_s)
        self._left_s -= time.monotonic() - began
        self.left -= count
        return count

    def read_all(self, limit: int) -> bytes:
        """What is left, of at most `limit` bytes. Raises CacheUnreachable."""
        with self._cache.failing():
            if self.left > limit:
                raise WireError(f"{self.left} bytes are more than {limit}")
        content = bytearray(self.left)
        self.readinto(memoryview(content))
        return bytes(content)
