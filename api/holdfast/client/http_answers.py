"""What the two transports share: requests as httpx wants them, answers judged, timeouts.

Nothing here waits or sends: `Transport` and `AsyncTransport` differ only in how they do that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx

from holdfast.client import sse
from holdfast.client.calls import Call, Feed
from holdfast.client.retry import Patience
from holdfast.errors import (
    ApiError,
    HoldfastError,
    InvalidConfig,
    ServerError,
    ServerUnreachable,
    from_problem,
    unfinished,
)

PASSING = frozenset({502, 503, 504})
NO_CONTENT = 204
CONNECT_S = 5.0
DOWNLOAD_SILENCE_S = 3600.0  # a large checkpoint is verified before its first byte comes
STREAM_SILENCE_S = 60.0  # four times the server's keep-alive
DOWNLOAD_PIECE = 1 << 20
AS_IT_IS = {"Accept-Encoding": "identity"}
STREAM = "text/event-stream"
END = "end"

T = TypeVar("T")


class Passing(Exception):
    """The server said that it cannot at present; carries what to raise if it stays so."""

    def __init__(self, error: ApiError) -> None:
        self.error = error


AWAY = (httpx.TransportError, Passing)
"""What may be over in a moment."""


def settings(address: str, timeout_s: float, token: str | None) -> dict[str, Any]:
    """Of an httpx client."""
    headers = {"Accept": "application/json, application/problem+json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    return {
        "base_url": checked(address),
        "timeout": httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
        "headers": headers,
        "trust_env": False,  # a proxy must not stand between a user and the server on loopback
    }


def request(call: Call[Any]) -> dict[str, Any]:
    return {
        "method": call.method,
        "url": call.path,
        "params": present(call.params),
        "json": call.body,
        "content": call.content,
        "headers": dict(call.headers or {}),
    }


def answer(call: Call[T], response: httpx.Response) -> T:
    """What the server answered. Raises Passing, ApiError and its kin."""
    refuse(response)
    with understanding(str(response.url.copy_with(query=None))):
        return call.read(None if response.status_code == NO_CONTENT else response.json())


@contextlib.contextmanager
def understanding(where: str) -> Iterator[None]:
    """Raise ServerError for what is no answer of this API: of a proxy, of another version."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise _not_understood(where, str(error).split("\n")[0]) from error


def checked(address: str) -> str:
    """The address of a server. Raises InvalidConfig for what can be none."""
    try:
        httpx.URL(address)
    except httpx.InvalidURL as error:
        raise InvalidConfig(
            f"{address!r} is no address of a server ({error}): write http://HOST:PORT"
        ) from error
    return address


def refuse(response: httpx.Response) -> None:
    """Raise what the answer stands for, if it is no success. Its body must have been read."""
    if not response.is_error:
        return
    error = from_problem(_problem(response))
    raise Passing(error) if response.status_code in PASSING else error


def final(address: str, error: Exception) -> HoldfastError:
    """What is raised once no more is tried after one of `AWAY`."""
    if isinstance(error, Passing):
        return error.error
    return ServerUnreachable(
        f"no Holdfast server answers at {address} ({error}); "
        "start one with `holdfast serve`, or name it with --address or HOLDFAST_ADDRESS"
    )


def length(response: httpx.Response) -> int:
    """Of the file that comes, as the server has it; less is an error of the connection's."""
    headers = response.headers
    if headers.get("content-encoding", "identity") != "identity" or "content-length" not in headers:
        raise unfinished("the file comes changed: something on the way compresses or cuts answers")
    return int(headers["content-length"])


def partial_file(target: Path) -> Path:
    """Where a download is put together, before it appears under its name."""
    return target.with_name(f".{target.name}.{os.getpid()}.part")


def timeout(silence_s: float) -> httpx.Timeout:
    return httpx.Timeout(silence_s, connect=CONNECT_S)


def present(params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (params or {}).items() if value is not None}


class Following(Generic[T]):
    """One stream through any number of connections: where it is, and whether it is over."""

    def __init__(self, feed: Feed[T], patience: Patience) -> None:
        self._read: Callable[[str], T] = feed.read
        self._patience = patience
        self._lines = sse.Reader()
        self._params = present(feed.params)
        self._path = feed.path
        self._last = feed.after
        self.over = False

    def request(self) -> dict[str, Any]:
        """Of the next connection, which begins a new message."""
        self._lines = sse.Reader()
        return {
            "method": "GET",
            "url": self._path,
            "params": self._params,
            "headers": {"Accept": STREAM, "Last-Event-ID": str(self._last)},
            "timeout": timeout(STREAM_SILENCE_S),
        }

    def opened(self, response: httpx.Response) -> None:
        """A connection was answered; its body was read if it is an error. Raises as `refuse`."""
        refuse(response)
        self.over = response.status_code == NO_CONTENT
        kind = response.headers.get("content-type", "nothing")
        if not self.over and not kind.startswith(STREAM):
            raise _not_understood(str(response.url.copy_with(query=None)), f"it sends {kind}")
        self._patience.succeeded()

    def take(self, line: str) -> list[T]:
        """What a line of the answer completes: one message or none."""
        message = self._lines.take(line)
        if message is None:
            return []
        if message.event == END:
            self.over = True
            return []
        self._last = message.id
        with understanding(self._path):
            return [self._read(message.payload)]

    def pause_s(self, now: float) -> float | None:
        """How long to wait before the next connection; None: no more is tried."""
        return self._patience.pause_s(now)


CUT_OFF = httpx.RemoteProtocolError("the stream was cut off")


def _not_understood(where: str, why: str) -> ServerError:
    detail = (
        f"what answers at {where} is not understood ({why}): "
        "is it a Holdfast server, of the same version as this client?"
    )
    return ServerError({"status": 502, "code": "not_understood", "detail": detail})


def _problem(response: httpx.Response) -> dict[str, Any]:
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if isinstance(problem, dict) and "code" in problem:
        return problem
    status = response.status_code
    return {"status": status, "code": f"http_{status}", "detail": f"the server answered {status}"}
