"""Refuses requests to other hosts than this server, from foreign web pages, and ambiguous ones; and
query parameters that a route does not know: a misspelt filter must not be ignored.

A web page in the user's browser reaches a server on loopback, too: by a name that resolves to
127.0.0.1 (DNS rebinding), or by a plain form post, also from another port of this machine. The
first request carries a foreign `Host`; of the second, the browser says where it comes from, in
`Origin` and `Sec-Fetch-Site`.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.rest.http.problems import ProblemError, refused
from holdfast.rest.origins import host_port, origin_of
from holdfast.rest.services import Services
from holdfast.rest.version import server_version

_OWN_SITES = ("same-origin", "none")  # none: the user typed the address


class RequestGuard:
    """ASGI middleware around everything else, error pages included."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope, Headers(scope=scope))
        answer = self._app if refusal is None else refused(refusal, scope["path"])
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> ProblemError | None:
        hosts = headers.getlist("host")
        found = host_port(hosts[0]) if len(hosts) == 1 else None
        if found is None:
            return _malformed("it needs one Host header, which is HOST or HOST:PORT")
        allowed, (name, _) = self._services.allowed_hosts, found
        if allowed is not None and name not in allowed:
            why = f"this server is not {name!r}: if that is the name of a proxy, start the server "
            return ProblemError(421, "untrusted_host", f"{why}with --allowed-host {name}")
        known = {origin_of(f"{scope['scheme']}://{hosts[0]}"), *self._services.allowed_origins}
        for origin in headers.getlist("origin"):
            if origin_of(origin) not in known - {None}:
                return _foreign(f"a page of {origin!r}")
        site = headers.get("sec-fetch-site")
        if site is not None and site not in _OWN_SITES and not _follows_link(scope, headers):
            return _foreign("a page of another site or port")
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy and this server may disagree about the end of such a request.
            return _malformed("it has both Content-Length and Transfer-Encoding")
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


def _malformed(why: str) -> ProblemError:
    return ProblemError(400, "malformed_request", f"the request is malformed: {why}")


async def known_parameters(request: Request) -> None:
    """A dependency of every route of the API. Raises ProblemError."""
    if not request.query_params:
        return
    known = _parameter_names(request.scope["route"])
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        offer = f"use {', '.join(known)}" if known else "it takes none"
        raise ProblemError(
            422,
            "invalid_parameters",
            f"this resource has no parameter {unknown[0][:64]!r}: {offer} (this server is Holdfast "
            f"{server_version()}; clients of other versions may send other parameters)",
            faults=[
                {"path": f"query.{name[:64]}", "message": "no such parameter"} for name in unknown
            ],
        )


def _parameter_names(route: APIRoute) -> tuple[str, ...]:
    """The query parameters of the route, with those of its dependencies."""
    return tuple(sorted(set(_parameters_of(route.dependant))))


def _parameters_of(dependant: Dependant) -> Iterator[str]:
    yield from (parameter.alias for parameter in dependant.query_params)
    for dependency in dependant.dependencies:
        yield from _parameters_of(dependency)
