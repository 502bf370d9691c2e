"""Refuses query parameters that a route does not know: a misspelt filter must not be ignored."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from holdfast.rest.http.problems import ProblemError
from holdfast.rest.version import server_version


async def known_parameters(request: Request) -> None:
    """A dependency of every route of the API. Raises ProblemError."""
    if not request.query_params:
        return
    known = _names(request.scope["route"])
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


def _names(route: APIRoute) -> tuple[str, ...]:
    """The query parameters of the route, with those of its dependencies."""
    return tuple(sorted(set(_of(route.dependant))))


def _of(dependant: Dependant) -> Iterator[str]:
    yield from (parameter.alias for parameter in dependant.query_params)
    for dependency in dependant.dependencies:
        yield from _of(dependency)
