"""The streams of `benchmarks.api`: a process of their own, so that reading them delays no call that
is timed.

    python -m benchmarks.api_watchers ADDRESS COUNT

Opens COUNT streams on `/live`, reads each as a browser would, at once and to the end, and throws it
away. Answers each line on its standard input with a line of JSON: how many are held, how many were
lost, how many messages came in all. Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from dataclasses import dataclass
from urllib.parse import urlsplit

OPENED_TOGETHER = 50
PAUSE_S = 0.1


@dataclass
class StreamCounts:
    held: int = 0
    lost: int = 0
    messages: int = 0
    nbytes: int = 0


class WatcherStream(asyncio.Protocol):
    """One connection: its request, then whatever comes."""

    def __init__(self, host: str, counts: StreamCounts) -> None:
        self._host = host
        self._told = counts
        self._begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(
            f"GET /api/v1/live HTTP/1.1\r\nHost: {self._host}\r\n"
            "Accept: text/event-stream\r\n\r\n".encode()
        )

    def data_received(self, data: bytes) -> None:
        if not self._begun and b" 200 " in data.split(b"\r\n", 1)[0]:
            self._begun = True
            self._told.held += 1
        self._told.nbytes += len(data)
        self._told.messages += data.count(b"\nevent: ")

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._told.lost += 1
        if self._begun:
            self._told.held -= 1


async def main(address: str, count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    parts = urlsplit(address)
    counts = StreamCounts()
    loop = asyncio.get_running_loop()
    for start in range(0, count, OPENED_TOGETHER):
        some = min(OPENED_TOGETHER, count - start)
        await asyncio.gather(
            *(
                loop.create_connection(
                    lambda: WatcherStream(parts.netloc, counts), parts.hostname, parts.port
                )
                for _ in range(some)
            )
        )
        await asyncio.sleep(PAUSE_S)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        print(json.dumps(vars(counts)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
