# Generated from asynchronous/transport.py by api/generate_client.py: do not edit.
"""One HTTP connection to a server: sends the requests that `calls` describes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
from httpx_sse import EventSource

from holdfast.client import http_answers
from holdfast.client.address import ServerAddress
from holdfast.client.calls import Call, Feed, Pages
from holdfast.client.retry import RetrySchedule
from holdfast.client.waiting import off_loop, sleep

T = TypeVar("T")


class Transport:
    """Sends requests over one connection."""

    def __init__(self, server: ServerAddress, timeout_s: float, retry_s: float) -> None:
        self.address = server.address
        self._retry_s = retry_s
        self._http = httpx.Client(**http_answers.settings(server, timeout_s))

    def close(self) -> None:
        self._http.close()

    def call(self, call: Call[T]) -> T:
        """The answer; retried while the server is unreachable. Raises ApiError or a subclass,
        ServerUnreachable."""
        schedule = RetrySchedule(self._retry_s)
        while True:
            try:
                answer = self._http.request(**http_answers.request(call))
                return http_answers.read_answer(call, answer)
            except http_answers.TRANSIENT as error:
                self._pause(schedule.pause_s(time.monotonic()), error)

    def pages(self, pages: Pages[Any, T]) -> Iterator[T]:
        """The items of all pages, which are fetched as they are needed. Raises as :meth:`call`."""
        call: Call[Any] | None = pages.first
        while call is not None:
            page = self.call(call)
            yield from pages.items(page)
            call = pages.following(page)

    def follow(self, feed: Feed[T]) -> Iterator[T]:
        """The messages until the end of the feed; resumes after a broken connection or server.

        Raises as :meth:`call`.
        """
        following = http_answers.FeedFollower(feed, RetrySchedule(self._retry_s))
        while True:
            error: Exception = http_answers.CUT_OFF
            try:
                with self._http.stream(**following.request()) as response:
                    _read_error(response)
                    if following.opened(response):
                        for event in EventSource(response).iter_sse():
                            yield from following.take(event)
                            if following.over:
                                break
            except http_answers.TRANSIENT as broken:
                error = broken
            if following.over:
                return
            self._pause(following.pause_s(time.monotonic()), error)

    def download(
        self,
        path: str,
        target: Path,
        on_bytes: Callable[[int, int], None],
    ) -> int:
        """Write an answer to `target`, which appears whole or not at all; resumes after a broken
        connection. Raises as :meth:`call`; OSError if `target` cannot be written."""
        partial = http_answers.partial_file(target)
        download = http_answers.FileDownload(RetrySchedule(self._retry_s))
        try:
            file = off_loop(partial.open, "wb")
            with file:
                while True:
                    try:
                        with self._http.stream(**download.request(path)) as response:
                            _read_error(response)
                            file.seek(download.opened(response))
                            file.truncate()
                            for piece in response.iter_raw(http_answers.DOWNLOAD_PIECE):
                                download.wrote(off_loop(file.write, piece))
                                on_bytes(download.written, download.whole)
                        break
                    except http_answers.TRANSIENT as error:
                        self._pause(download.pause_s(time.monotonic()), error)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return download.written

    def _pause(self, pause_s: float | None, error: Exception) -> None:
        if pause_s is None:
            raise http_answers.final_error(self.address, error) from error
        sleep(pause_s)


def _read_error(response: httpx.Response) -> None:
    if response.is_error:
        response.read()
