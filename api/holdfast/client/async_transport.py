"""One HTTP connection to a server for an event loop: the asynchronous twin of `transport.py`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

from holdfast.client import http_answers, sse
from holdfast.client.calls import Call, Feed, Pages
from holdfast.client.retry import RetrySchedule

T = TypeVar("T")


class AsyncTransport:
    """Sends requests over one connection; its methods are those of `Transport`."""

    def __init__(self, address: str, timeout_s: float, retry_s: float, token: str | None) -> None:
        self.address = address
        self._retry_s = retry_s
        self._http = httpx.AsyncClient(**http_answers.settings(address, timeout_s, token))

    async def close(self) -> None:
        await self._http.aclose()

    async def call(self, call: Call[T]) -> T:
        schedule = RetrySchedule(self._retry_s)
        while True:
            try:
                return http_answers.read_answer(
                    call, await self._http.request(**http_answers.request(call))
                )
            except http_answers.TRANSIENT as error:
                await self._pause(schedule.pause_s(time.monotonic()), error)

    async def pages(self, pages: Pages[Any, T]) -> AsyncIterator[T]:
        call: Call[Any] | None = pages.first
        while call is not None:
            page = await self.call(call)
            for item in pages.items(page):
                yield item
            call = pages.following(page)

    async def follow(self, feed: Feed[T]) -> AsyncIterator[T]:
        following = http_answers.FeedFollower(feed, RetrySchedule(self._retry_s))
        while True:
            error: Exception = http_answers.CUT_OFF
            try:
                async with self._http.stream(**following.request()) as response:
                    await _read_error(response)
                    following.opened(response)
                    async for line in _lines(response):
                        for message in following.take(line):
                            yield message
                        if following.over:
                            return
            except http_answers.TRANSIENT as broken:
                error = broken
            if following.over:
                return
            await self._pause(following.pause_s(time.monotonic()), error)

    async def lines(self, method: str, path: str) -> AsyncIterator[str]:
        async with self._answer(method, path, None, http_answers.STREAM_SILENCE_S) as response:
            async for line in _lines(response):
                yield line

    async def download(
        self,
        path: str,
        params: dict[str, Any],
        target: Path,
        on_bytes: Callable[[int, int], None],
    ) -> int:
        partial = http_answers.partial_file(target)
        written = 0
        try:
            async with self._answer(
                "GET", path, params, http_answers.DOWNLOAD_SILENCE_S
            ) as response:
                file = await asyncio.to_thread(partial.open, "wb")
                with file:
                    whole = http_answers.file_length(response)
                    async for piece in response.aiter_raw(http_answers.DOWNLOAD_PIECE):
                        written += await asyncio.to_thread(file.write, piece)
                        on_bytes(written, whole)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return written

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, params: dict[str, Any] | None, silence_s: float
    ) -> AsyncIterator[httpx.Response]:
        try:
            async with self._http.stream(
                method,
                path,
                params=params,
                headers=http_answers.UNCOMPRESSED,
                timeout=http_answers.timeout(silence_s),
            ) as response:
                await _read_error(response)
                http_answers.raise_for_error(response)
                yield response
        except http_answers.TRANSIENT as error:
            raise http_answers.final_error(self.address, error) from error

    async def _pause(self, pause_s: float | None, error: Exception) -> None:
        if pause_s is None:
            raise http_answers.final_error(self.address, error) from error
        await asyncio.sleep(pause_s)


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    lines = sse.LineSplitter()
    async for text in response.aiter_text():
        for line in lines.take(text):
            yield line
    for line in lines.rest():
        yield line


async def _read_error(response: httpx.Response) -> None:
    if response.is_error:
        await response.aread()
