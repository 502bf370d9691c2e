"""The event streams of `benchmarks.api`, read in a separate process so that the timed calls are not
delayed.

    python -m benchmarks.api_watchers ADDRESS COUNT

Opens COUNT streams on `/live`, reads each without delay as a browser would, and discards the data.
Answers each line on its standard input with a line of JSON: the number of open streams (`held`), of
lost streams, and of messages received in total. Ends when its standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from dataclasses import dataclass
from urllib.parse import urlsplit

from benchmarks.api_figures import TOKEN

OPENED_TOGETHER = 50
PAUSE_S = 0.1


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


async def main(address: str, count: int) -> None:
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
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        print(json.dumps(vars(counts)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
