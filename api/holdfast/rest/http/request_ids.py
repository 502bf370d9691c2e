"""Gives each request an id: in the answer, in problem documents, in traces, and in all lines that
the server logs while it handles the request. A client may send its own, in `X-Request-Id`.

Each answer names the server's version, so that a client of another version can say so.
"""

from __future__ import annotations

import re

import structlog
import uuid_utils
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.rest.version import server_version
from holdfast.schemas import VERSION_HEADER

HEADER = "X-Request-Id"
_ACCEPTED = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)

_LOGGED_AS = "request"


def current() -> str | None:
    """The id of the request that this task handles; None outside of requests."""
    return structlog.contextvars.get_contextvars().get(_LOGGED_AS)


class RequestIds:
    """ASGI middleware around everything else. An unusable id of a client is replaced."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _ACCEPTED.fullmatch(given) else str(uuid_utils.uuid7())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[HEADER] = request_id
                headers[VERSION_HEADER] = server_version()
            await send(message)

        with structlog.contextvars.bound_contextvars(**{_LOGGED_AS: request_id}):
            await self._app(scope, receive, send_with_id)
