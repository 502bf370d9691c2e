"""Receives the body of a request before the application sees any of it: within its size, in time,
and on disk if it is large.

An unfinished upload holds little memory, whatever its size. Few large ones are received at a time:
another one is refused at once, and its client tries again. The file of an upload has no name: the
system removes it when the server closes it or ends, in whatever way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from tempfile import SpooledTemporaryFile
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.rest.http.problems import ProblemError, refused, too_large
from holdfast.rest.limits import UploadLimits
from holdfast.rest.services import Services

CODE_PATH = "/api/v1/code"
RETRY_AFTER_S = 2

T = TypeVar("T")


class BodyLimits:
    """ASGI middleware: the application inside gets a body that is complete."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services
        self._large = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        declared = int(headers.get("content-length", 0))
        if not declared and "transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        with ExitStack() as held:
            upload = _Upload(self._services, scope["path"], held, self._place)
            try:
                upload.expect(declared)
                await upload.take(receive)
            except ProblemError as refusal:
                await refused(refusal, scope["path"])(scope, receive, send)
            except _Disconnected:
                pass
            else:
                await self._app(scope, upload.replayed(receive), send)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """A place among the large bodies. Raises ProblemError."""
        most = self._services.upload_limits.large_at_once
        if self._large >= most:
            raise ProblemError(
                503,
                "too_many_uploads",
                f"the server receives {most} large bodies at a time: send this one again later",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        self._large += 1
        try:
            yield
        finally:
            self._large -= 1


class _Disconnected(Exception):
    """The client is gone: it gets no answer."""


class _Upload:
    """A body that arrives. `held` gets what it holds: its file, and its place if it is large."""

    def __init__(
        self,
        services: Services,
        path: str,
        held: ExitStack,
        place: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._limits: UploadLimits = services.upload_limits
        self._most = services.max_code_bytes if path == CODE_PATH else services.max_body_bytes
        self._held, self._place = held, place
        spool = SpooledTemporaryFile(self._limits.memory_bytes, dir=services.spool_folder)  # noqa: SIM115
        self._spool = held.enter_context(spool)
        self._received = 0
        self._is_large = False

    def expect(self, nbytes: int) -> None:
        """Prepare for a body of so many bytes, or more. Raises ProblemError."""
        if nbytes > self._most:
            raise too_large(self._most)
        if nbytes > self._limits.memory_bytes and not self._is_large:
            self._held.enter_context(self._place())
            self._is_large = True

    async def take(self, receive: Receive) -> None:
        """Receive all of it. Raises ProblemError, _Disconnected."""
        clock = asyncio.get_running_loop().time
        began, more = clock(), True
        while more:
            try:
                async with asyncio.timeout(self._limits.wait_s(self._received, clock() - began)):
                    message = await receive()
            except TimeoutError:
                raise self._overdue() from None
            if message["type"] == "http.disconnect":
                raise _Disconnected
            await self._add(message.get("body", b""))
            more = message.get("more_body", False)

    def replayed(self, receive: Receive) -> Receive:
        """Gives the application the whole body at once, and then what comes after it."""
        given = False

        async def next_message() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            self._spool.seek(0)
            return {"type": "http.request", "body": await self._io(self._spool.read)}

        return next_message

    async def _add(self, piece: bytes) -> None:
        self._received += len(piece)
        self.expect(self._received)
        try:
            await self._io(self._spool.write, piece)
        except OSError as error:
            why = f"the server cannot store the body: {error.strerror}"
            raise ProblemError(503, "no_room", why) from error

    async def _io(self, call: Callable[..., T], *arguments: bytes) -> T:
        """Call the file; in a thread if it is on disk: a slow disk must not stop the server."""
        return await asyncio.to_thread(call, *arguments) if self._is_large else call(*arguments)

    def _overdue(self) -> ProblemError:
        return ProblemError(
            408,
            "request_timeout",
            f"the body did not arrive in time: {self._received:,} bytes came, none for "
            f"{self._limits.silence_s:g} s or all of them too slowly",
            headers={"Connection": "close"},
        )
