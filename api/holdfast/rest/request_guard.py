"""Refuses requests from foreign hosts and foreign origins, and oversized bodies.

A server on loopback has no authentication: it trusts every client that reaches it. A web page in
the user's browser reaches it, too: by a name that resolves to 127.0.0.1 (DNS rebinding), or by a
plain form post. The first request carries a foreign `Host`, the second a foreign `Origin`.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.rest.problems import ProblemError, problem_response, too_large
from holdfast.rest.services import Services


class RequestGuard:
    """ASGI middleware around everything else, error pages included."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(headers, self._max_bytes(scope["path"]))
        if refusal is not None:
            response = problem_response(
                refusal.status, refusal.code, refusal.detail, instance=scope["path"]
            )
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _max_bytes(self, path: str) -> int:
        code = path == "/api/v1/code"
        return self._services.max_code_bytes if code else self._services.max_body_bytes

    def _refusal(self, headers: Headers, max_bytes: int) -> ProblemError | None:
        allowed = self._services.allowed_hosts
        host = _name(f"//{headers.get('host', '')}")
        if allowed is not None and host not in allowed:
            return ProblemError(421, "untrusted_host", f"this server is not {host!r}")
        origin = headers.get("origin")
        if origin is not None and _name(origin) not in (allowed or {host}):
            return ProblemError(403, "foreign_origin", f"requests from {origin!r} are refused")
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy and this server may disagree about the end of such a request.
            return ProblemError(
                400,
                "malformed_request",
                "the request has both Content-Length and Transfer-Encoding",
            )
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > max_bytes:
            return too_large(max_bytes)
        return None


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
