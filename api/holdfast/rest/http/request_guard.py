"""Refuses requests from foreign hosts and foreign web pages, and oversized bodies.

A server on loopback has no authentication: it trusts every client that reaches it. A web page in
the user's browser reaches it, too: by a name that resolves to 127.0.0.1 (DNS rebinding), or by a
plain form post, also from another port of this machine. The first request carries a foreign `Host`;
of the second, the browser says where it comes from, in `Origin` and `Sec-Fetch-Site`.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.rest.http.problems import ProblemError, problem_response, too_large
from holdfast.rest.origins import origin_of
from holdfast.rest.services import Services

_OWN_SITES = ("same-origin", "none")  # none: the user typed the address


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
        refusal = self._refusal(scope, headers, self._max_bytes(scope["path"]))
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

    def _refusal(self, scope: Scope, headers: Headers, max_bytes: int) -> ProblemError | None:
        allowed, host = self._services.allowed_hosts, headers.get("host", "")
        name = _name(f"//{host}")
        if allowed is not None and name not in allowed:
            why = f"this server is not {name!r}: if that is the name of a proxy, start the server "
            return ProblemError(421, "untrusted_host", f"{why}with --allowed-host {name}")
        origin = headers.get("origin")
        if origin is not None:
            known = {origin_of(f"{scope['scheme']}://{host}"), *self._services.allowed_origins}
            if origin_of(origin) not in known - {None}:
                return _foreign(f"a page of {origin!r}")
        site = headers.get("sec-fetch-site")
        if site is not None and site not in _OWN_SITES and not _follows_link(scope, headers):
            return _foreign("a page of another site or port")
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


def _follows_link(scope: Scope, headers: Headers) -> bool:
    """Whether the user follows a link to this server, which opens in a page of its own."""
    opens = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest"))
    return scope["method"] in ("GET", "HEAD") and opens == ("navigate", "document")


def _foreign(page: str) -> ProblemError:
    return ProblemError(
        403,
        "foreign_origin",
        f"requests from {page} are refused: if that is a proxy of this server, start it with "
        "--allowed-host and the address of the proxy",
    )


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
