"""The event streams of `benchmarks.api`, read in a separate process so that the timed calls are not
delayed.

Opens streams on `/live`, reads each without delay as a browser would, and discards the data. Sends
`StreamCounts` as a mapping once they are open, and again for each message. Ends when its connection
does.
"""

from __future__ import annotations

import asyncio
import resource
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

from benchmarks.api_figures import TOKEN

OPENED_TOGETHER = 50
PAUSE_S = 0.1
OPENING_S = 60.0


@dataclass
class StreamCounts:
    """Totals over all streams; `held` are the open ones."""

    held: int = 0
    lost: int = 0
    messages: int = 0
    nbytes: int = 0


class WatcherStream(asyncio.Protocol):
    """One connection: sends its request and counts the messages of the response."""

    def __init__(self, host: str, counts: StreamCounts) -> None:
        self._host = host
        self._told = counts
        self._open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(
            f"GET /api/v1/live HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Authorization: Bearer {TOKEN}\r\nAccept: text/event-stream\r\n\r\n".encode()
        )

    def data_received(self, data: bytes) -> None:
        if not self._open and b" 200 " in data.split(b"\r\n", 1)[0]:
            self._open = True
            self._told.held += 1
        self._told.nbytes += len(data)
        self._told.messages += data.count(b"\nevent: ")

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._told.lost += 1
        if self._open:
            self._told.held -= 1


def watch(connection: Connection, address: str, count: int) -> None:
    asyncio.run(_watch(connection, address, count))


async def _watch(connection: Connection, address: str, count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    parts = urlsplit(address)
    assert parts.hostname is not None
    assert parts.port is not None
    host, port = parts.hostname, parts.port
    counts = StreamCounts()
    loop = asyncio.get_running_loop()
    for start in range(0, count, OPENED_TOGETHER):
        batch = min(OPENED_TOGETHER, count - start)
        await asyncio.gather(
            *(
                loop.create_connection(lambda: WatcherStream(parts.netloc, counts), host, port)
                for _ in range(batch)
            )
        )
        await asyncio.sleep(PAUSE_S)
    deadline = time.monotonic() + OPENING_S
    while counts.held < count and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(PAUSE_S)
    connection.send(vars(counts))
    ended = asyncio.Event()

    def answer() -> None:
        try:
            connection.recv()
            connection.send(vars(counts))
        except EOFError:
            loop.remove_reader(connection.fileno())
            ended.set()

    loop.add_reader(connection.fileno(), answer)
    await ended.wait()
