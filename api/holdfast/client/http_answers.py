"""Builds httpx requests, interprets answers, defines timeouts. Neither waits nor sends: the two
transports do that."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
from httpx_sse import ServerSentEvent

from holdfast.client.address import ServerAddress
from holdfast.client.calls import Call, Feed
from holdfast.client.credentials import BearerToken
from holdfast.client.retry import RetrySchedule
from holdfast.errors import (
    ApiError,
    HoldfastError,
    InvalidConfig,
    ServerError,
    ServerUnreachable,
    from_problem,
    unfinished,
)
from holdfast.schemas import VERSION_HEADER
from holdfast_service.extras import DISTRIBUTION

TRANSIENT_STATUS = frozenset({502, 503, 504})
NO_CONTENT = 204
PARTIAL = 206
CONNECT_S = 5.0
STREAM_SILENCE_S = 60.0  # four times the server's keep-alive
DOWNLOAD_PIECE = 1 << 20
UNCOMPRESSED = {"Accept-Encoding": "identity"}
STREAM = "text/event-stream"
END = "end"

T = TypeVar("T")


class TransientError(Exception):
    """The server cannot answer at present. `error` is raised if that does not change."""

    def __init__(self, error: ApiError) -> None:
        self.error = error


TRANSIENT = (httpx.TransportError, TransientError)
"""Errors after which a retry may succeed."""


@functools.cache
def client_version() -> str:
    return importlib.metadata.version(DISTRIBUTION)


def settings(server: ServerAddress, timeout_s: float) -> dict[str, Any]:
    """The arguments of an httpx client."""
    headers = {
        "Accept": "application/json, application/problem+json",
        "User-Agent": f"holdfast/{client_version()}",
    }
    return {
        "base_url": checked_address(server.address),
        "auth": BearerToken(server.address, server.find_credential),
        "timeout": httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
        "headers": headers,
        "trust_env": False,  # no proxy between a user and a server on loopback
        "verify": _certificates(),
    }


@functools.cache
def _certificates() -> ssl.SSLContext:
    """httpx's default context; it takes 20 ms to read, which each client would spend."""
    return httpx.create_ssl_context(trust_env=False)


def request(call: Call[Any]) -> dict[str, Any]:
    limit = None if call.timeout_s is None else httpx.Timeout(call.timeout_s, connect=CONNECT_S)
    return {
        **({} if limit is None else {"timeout": limit}),
        "method": call.method,
        "url": call.path,
        "params": present(call.params),
        "json": call.body,
        "content": call.content,
        "headers": dict(call.headers or {}),
    }


def read_answer(call: Call[T], response: httpx.Response) -> T:
    """The value of an answer. Raises TransientError, ApiError or a subclass."""
    raise_for_error(response)
    with raising_not_understood(response):
        return call.read(None if response.status_code == NO_CONTENT else response.json())


@contextlib.contextmanager
def raising_not_understood(response: httpx.Response) -> Iterator[None]:
    """Raise ServerError for an answer that is not of this API: of a proxy or another version."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise _not_understood(response, str(error).split("\n")[0]) from error


def checked_address(address: str) -> str:
    """The address of a server. Raises InvalidConfig if it is not a URL."""
    try:
        httpx.URL(address)
    except httpx.InvalidURL as error:
        raise InvalidConfig(
            f"{address!r} is not the address of a server ({error}): write http://HOST:PORT"
        ) from error
    return address


def raise_for_error(response: httpx.Response) -> None:
    """Raise the error of an answer without success. Its body must have been read."""
    if not response.is_error:
        return
    error = from_problem(_problem(response))
    raise TransientError(error) if response.status_code in TRANSIENT_STATUS else error


def final_error(address: str, error: Exception) -> HoldfastError:
    """The error to raise after the last retry failed with one of `TRANSIENT`."""
    if isinstance(error, TransientError):
        return error.error
    return ServerUnreachable(
        f"no Holdfast server answers at {address} ({error}); "
        "start one with `holdfast serve`, or set its address with --address or HOLDFAST_ADDRESS"
    )


class FileDownload:
    """The position in a file that is read over any number of connections. `written`, `whole`: of
    its bytes."""

    def __init__(self, schedule: RetrySchedule) -> None:
        self._schedule = schedule
        self._etag: str | None = None
        self.written = self.whole = self._most = 0

    def request(self, path: str) -> dict[str, Any]:
        """The request of the next connection: for the whole file, or for its rest."""
        headers = dict(UNCOMPRESSED)
        if self.written and self._etag is not None:
            headers |= {"Range": f"bytes={self.written}-", "If-Range": self._etag}
        wait = timeout(STREAM_SILENCE_S)
        return {"method": "GET", "url": path, "headers": headers, "timeout": wait}

    def opened(self, response: httpx.Response) -> int:
        """The position in the file at which the bytes of this answer begin. The body of an error
        was read. Raises the errors of `raise_for_error`, and ServerError if this is not the file,
        or not its rest."""
        raise_for_error(response)
        headers = response.headers
        if (
            headers.get("content-encoding", "identity") != "identity"
            or "content-length" not in headers
        ):
            raise unfinished("the file comes changed: a proxy compresses or cuts the answers")
        if response.status_code == PARTIAL:
            rest = f"bytes {self.written}-{self.whole - 1}/{self.whole}"
            if headers.get("content-range") != rest or headers.get("etag") != self._etag:
                raise unfinished("the server sent another part of the file than the missing one")
        else:
            self.written, self.whole = 0, int(headers["content-length"])
            etag = headers.get("etag")
            self._etag = None if etag is None or etag.startswith("W/") else etag
        return self.written

    def wrote(self, nbytes: int) -> None:
        self.written += nbytes
        if self.written > self._most:  # not if the same bytes come again and again
            self._most = self.written
            self._schedule.succeeded()

    def pause_s(self, now: float) -> float | None:
        """The pause before the next connection. None: no more tries."""
        return self._schedule.pause_s(now)


def partial_file(target: Path) -> Path:
    """The temporary path of a download, before it gets its final name."""
    return target.with_name(f".{target.name}.{os.getpid()}.part")


def timeout(silence_s: float) -> httpx.Timeout:
    return httpx.Timeout(silence_s, connect=CONNECT_S)


def present(params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (params or {}).items() if value is not None}


class FeedFollower(Generic[T]):
    """The position in a feed, read over any number of connections. `over`: the feed has ended."""

    def __init__(self, feed: Feed[T], schedule: RetrySchedule) -> None:
        self._read: Callable[[str], T] = feed.read
        self._schedule = schedule
        self._params = present(feed.params)
        self._path = feed.path
        self._last = feed.after
        self.over = False

    def request(self) -> dict[str, Any]:
        """The request of the next connection, which starts with a new message."""
        return {
            "method": "GET",
            "url": self._path,
            "params": self._params,
            "headers": {"Accept": STREAM, "Last-Event-ID": str(self._last)},
            "timeout": timeout(STREAM_SILENCE_S),
        }

    def opened(self, response: httpx.Response) -> bool:
        """Whether the answer of a new connection is a stream; if not, the feed has ended. The body
        of an error was read. Raises as `raise_for_error`."""
        raise_for_error(response)
        self.over = response.status_code == NO_CONTENT
        content_type = response.headers.get("content-type", "nothing")
        if not self.over and not content_type.startswith(STREAM):
            raise _not_understood(response, f"it sends {content_type}")
        self._response = response
        self._schedule.succeeded()
        return not self.over

    def take(self, event: ServerSentEvent) -> list[T]:
        """The message in the event; none in the end of the feed, nor in a keep-alive, which repeats
        the number of the last message."""
        if event.event == END:
            self.over = True
        if self.over or not event.data:
            return []
        if event.id.isdecimal():
            self._last = int(event.id)
        with raising_not_understood(self._response):
            return [self._read(event.data)]

    def pause_s(self, now: float) -> float | None:
        """The pause before the next connection; None: no more tries."""
        return self._schedule.pause_s(now)


CUT_OFF = httpx.RemoteProtocolError("the stream was cut off")


def _not_understood(response: httpx.Response, why: str) -> ServerError:
    url, client = response.url.copy_with(query=None), client_version()
    match response.headers.get(VERSION_HEADER):
        case None:
            remedy = "is it a Holdfast server? A proxy may have answered"
        case server if server != client:
            remedy = (
                f"the server has version {server} and this client {client}: "
                f"pip install {DISTRIBUTION}=={server}"
            )
        case server:
            remedy = f"server and client both have version {server}, so this is a defect"
    detail = f"the answer of {url} is not understood ({why}): {remedy}"
    return ServerError(detail, status=502, code="not_understood")


def _problem(response: httpx.Response) -> dict[str, Any]:
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if isinstance(problem, dict) and "code" in problem:
        return problem
    status = response.status_code
    return {"status": status, "code": f"http_{status}", "detail": f"the server answered {status}"}
