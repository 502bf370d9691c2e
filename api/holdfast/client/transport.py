"""One HTTP connection to a server: retries what may be repeated, turns problems into errors."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import stamina

from holdfast.client import sse
from holdfast.errors import ApiError, ServerUnreachable, from_problem, unfinished

PASSING = frozenset({502, 503, 504})
NO_CONTENT = 204
CONNECT_S = 5.0
PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
DOWNLOAD_SILENCE_S = 3600.0  # a large checkpoint is verified before its first byte comes
AS_IT_IS = {"Accept-Encoding": "identity"}
DOWNLOAD_PIECE = 1 << 20
STREAM_SILENCE_S = 60.0  # four times the server's keep-alive


class _Nothing(Exception):
    """The server has nothing to stream, and will not have."""


class _Passing(Exception):
    """The server said that it cannot at present; carries what to raise if it stays so."""

    def __init__(self, error: ApiError) -> None:
        self.error = error


class Transport:
    def __init__(self, address: str, timeout_s: float, retry_s: float) -> None:
        self.address = address
        self._retry_s = retry_s
        self._http = httpx.Client(
            base_url=address,
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
            headers={"Accept": "application/json, application/problem+json"},
            trust_env=False,  # a proxy must not stand between a user and the server on loopback
        )

    def close(self) -> None:
        self._http.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, Any] | None = None,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """The JSON that the server answers. Only for calls that may be repeated: it retries.

        Raises ApiError and its kin, ServerUnreachable.
        """
        present = {key: value for key, value in (params or {}).items() if value is not None}
        try:
            for attempt in self._retries():
                with attempt:
                    response = self._http.request(
                        method, path, params=present, json=body, headers=headers
                    )
                    if response.status_code in PASSING:
                        raise _Passing(from_problem(_problem(response)))
        except _Passing as passing:
            raise passing.error from None
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise from_problem(_problem(response))
        return None if response.status_code == NO_CONTENT else response.json()

    def lines(self, method: str, path: str) -> Iterator[str]:
        """The lines of an answer, as they come; asked for once. Raises as :meth:`call`."""
        timeout = httpx.Timeout(STREAM_SILENCE_S, connect=CONNECT_S)
        with self._answer(method, path, None, timeout) as response:
            yield from response.iter_lines()

    def download(
        self,
        path: str,
        params: dict[str, Any],
        target: Path,
        on_bytes: Callable[[int, int], None],
    ) -> int:
        """Write an answer to `target`, which appears whole or not at all. Raises as :meth:`call`,
        OSError if it cannot be written."""
        timeout = httpx.Timeout(DOWNLOAD_SILENCE_S, connect=CONNECT_S)
        partial = target.with_name(f".{target.name}.{os.getpid()}.part")
        written = 0
        try:
            with self._answer("GET", path, params, timeout) as response, partial.open("wb") as file:
                whole = _length(response)
                for piece in response.iter_raw(DOWNLOAD_PIECE):
                    written += file.write(piece)
                    on_bytes(written, whole)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return written

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, params: dict[str, Any] | None, timeout: httpx.Timeout
    ) -> Iterator[httpx.Response]:
        """An answer to be read piece by piece."""
        try:
            with self._http.stream(
                method, path, params=params, headers=AS_IT_IS, timeout=timeout
            ) as response:
                if response.is_error:
                    response.read()
                    raise from_problem(_problem(response))
                yield response
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def stream(
        self, path: str, after: int, params: dict[str, Any] | None = None
    ) -> Iterator[sse.Message]:
        """Messages with a number above `after`, resumed when the connection or the server breaks.

        Ends when the server says that nothing more will come. Raises as :meth:`call`.
        """
        present = {key: value for key, value in (params or {}).items() if value is not None}
        last, broken_at, pause_s = after, time.monotonic(), PAUSE_S
        while True:
            try:
                for message in self._connection(path, last, present):
                    broken_at, pause_s = math.inf, PAUSE_S
                    if message is None:
                        continue
                    if message.event == "end":
                        return
                    last = message.id
                    yield message
                error: Exception = httpx.RemoteProtocolError("the stream was cut off")
            except _Nothing:
                return
            except (httpx.TransportError, _Passing) as broken:
                error = broken
            broken_at = min(broken_at, time.monotonic())
            if time.monotonic() - broken_at > self._retry_s:
                raise error.error if isinstance(error, _Passing) else self._unreachable(error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _connection(
        self, path: str, after: int, params: dict[str, Any]
    ) -> Iterator[sse.Message | None]:
        """None once the server has begun to answer, then its messages."""
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        timeout = httpx.Timeout(STREAM_SILENCE_S, connect=CONNECT_S)
        with self._http.stream(
            "GET", path, params=params, headers=headers, timeout=timeout
        ) as response:
            if response.is_error:
                response.read()
                error = from_problem(_problem(response))
                raise _Passing(error) if response.status_code in PASSING else error
            if response.status_code == NO_CONTENT:
                raise _Nothing
            yield None
            yield from sse.messages(response.iter_lines())

    def _retries(self) -> Iterator[Any]:
        return iter(
            stamina.retry_context(
                on=(httpx.TransportError, _Passing),
                attempts=None,
                timeout=self._retry_s,
                wait_initial=PAUSE_S,
                wait_max=LONGEST_PAUSE_S,
            )
        )

    def _unreachable(self, error: Exception) -> ServerUnreachable:
        return ServerUnreachable(
            f"no Holdfast server answers at {self.address} ({error}); "
            "start one with `holdfast serve`, or name it with --address or HOLDFAST_ADDRESS"
        )


def _length(response: httpx.Response) -> int:
    """Of the file that comes, as the server has it; less is an error of the connection's."""
    headers = response.headers
    if headers.get("content-encoding", "identity") != "identity" or "content-length" not in headers:
        raise unfinished("the file comes changed: something on the way compresses or cuts answers")
    return int(headers["content-length"])


def _problem(response: httpx.Response) -> dict[str, Any]:
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if isinstance(problem, dict) and "code" in problem:
        return problem
    status = response.status_code
    return {"status": status, "code": f"http_{status}", "detail": f"the server answered {status}"}
