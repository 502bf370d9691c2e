"""Finds out who sends a request, before anything of its body is read.

The answer stands in the request's state as `principal`; a request of nobody is refused. The pages
and files of the dashboard are for everyone, since they hold no data, and so are the probes of
`health_probes`; but no body of nobody is received, which would take a place of a user's.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.rest.http.problems import problem_response
from holdfast.rest.local_access import ANYBODY, LOCAL_USER, LocalAccess, Principal
from holdfast.rest.services import Services

PAGE_KEY_HEADER = "Holdfast-Page-Key"
_OPEN = frozenset(
    {"/", "/jobs", "/cluster", "/submit", "/boot.js", "/mark.svg", "/healthz", "/readyz"}
)
_OPEN_BELOW = ("/jobs/", "/assets/")
_EXCHANGE = ("POST", "/api/v1/session")
_DOWNLOAD = re.compile(r"/api/v1/(jobs/[^/]+/logs/download|operations/[^/]+/content)")
"""Links that a browser follows by itself, without headers of the page."""


class Authentication:
    """ASGI middleware inside of the checks of hosts and origins."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        access = self._services.access
        principal = ANYBODY if access is None else principal_of(access, scope)
        if principal is None and not _is_open(scope):
            response = problem_response(
                401,
                "unauthorized",
                _advice(Headers(scope=scope)),
                instance=scope["path"],
                headers={"WWW-Authenticate": "Bearer"},
            )
            await response(scope, receive, send)
            return
        scope.setdefault("state", {})["principal"] = principal
        await self._app(scope, receive, send)


def principal_of(access: LocalAccess, scope: Scope) -> Principal | None:
    """The sender of the request; None: nobody that the server knows."""
    headers = Headers(scope=scope)
    given = headers.getlist("authorization")
    if given:
        scheme, _, token = given[0].partition(" ")
        known = scheme.lower() == "bearer" and access.accepts_token(token.strip())
        return LOCAL_USER if known and len(given) == 1 else None
    cookie = cookie_parser(headers.get("cookie", "")).get(access.cookie_name)
    if cookie is None:
        return None
    reads = scope["method"] in ("GET", "HEAD")
    if reads and _DOWNLOAD.fullmatch(scope["path"]):
        return LOCAL_USER if access.accepts_session(cookie, None) else None
    if not reads and "origin" not in headers:  # the guard has compared it with the server's own
        return None
    page_key = headers.get(PAGE_KEY_HEADER, "")
    return LOCAL_USER if access.accepts_session(cookie, page_key) else None


def _is_open(scope: Scope) -> bool:
    method, path, headers = scope["method"], scope["path"], Headers(scope=scope)
    if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
        return False  # nobody's bodies are received
    reads = method in ("GET", "HEAD") and (path in _OPEN or path.startswith(_OPEN_BELOW))
    return reads or (method, path) == _EXCHANGE


def _advice(headers: Headers) -> str:
    what = "this server does not know the given token"
    if "authorization" not in headers:
        what = "this server needs a token"
        if "cookie" in headers:
            what = "this browser is not signed in, or no longer"
    return (
        f"{what}. Commands of its user find the token in the server's data directory "
        "(HOLDFAST_DATA_DIR, if it is not ~/.holdfast) or in HOLDFAST_TOKEN; other programs send "
        "the header `Authorization: Bearer TOKEN`; for a browser, `holdfast dashboard` prints a "
        "link"
    )
