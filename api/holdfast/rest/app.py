"""Creates the ASGI application from its services; holds no state of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from fastapi import Depends, FastAPI
from prometheus_client import CollectorRegistry
from pydantic import TypeAdapter
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.types import ASGIApp

from holdfast.rest import dashboard, routes, version
from holdfast.rest.http import problems
from holdfast.rest.http.authentication import Authentication
from holdfast.rest.http.body_limits import BodyLimits
from holdfast.rest.http.request_guard import RequestGuard, known_parameters
from holdfast.rest.http.request_ids import RequestIds
from holdfast.rest.monitoring import health_probes, prometheus
from holdfast.rest.services import Services
from holdfast.rest.version import API_VERSION

TITLE = "Holdfast"
TOKEN_DESCRIPTION = "In `server.json` of the server's data directory, unless HOLDFAST_AUTH is none."
REFERENCE = "#/components/schemas/{model}"


def create_app(services: Services) -> FastAPI:
    app = FastAPI(
        title=TITLE,
        version=API_VERSION,
        summary="Elastic, fault-tolerant training as a service.",
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # those pages load scripts from other origins
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.services = services
    resources = [
        import_module(found.name) for found in iter_modules(routes.__path__, f"{routes.__name__}.")
    ]
    for resource in resources:
        app.include_router(resource.router, dependencies=[Depends(known_parameters)])
    app.include_router(health_probes.router)
    app.include_router(prometheus.router)
    app.include_router(version.router)
    app.include_router(dashboard.router())
    problems.install(app)
    app.state.registry = CollectorRegistry()
    app.add_middleware(BodyLimits, services=services)
    app.add_middleware(prometheus.RequestMetrics, registry=app.state.registry)
    app.add_middleware(Authentication, services=services)
    app.add_middleware(RequestGuard, services=services)
    _put_outermost(app, RequestIds)
    _add_extra_schemas(app, [model for each in resources for model in getattr(each, "SCHEMAS", ())])
    return app


def _put_outermost(app: FastAPI, middleware: Callable[[ASGIApp], ASGIApp]) -> None:
    """Put the middleware around Starlette's answer to unexpected errors, too: `add_middleware` puts
    it inside. As Starlette's own stacks do, the result begins with a ServerErrorMiddleware, which
    OpenTelemetry looks for."""
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: ServerErrorMiddleware(  # type: ignore[method-assign]
        middleware(build())
    )


def _add_extra_schemas(app: FastAPI, models: Iterable[type]) -> None:
    """Add to the OpenAPI document the schemas that no route's signature names, and the token."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            schemas = document["components"]["schemas"]
            for model in models:
                schema = TypeAdapter(model).json_schema(ref_template=REFERENCE)
                schemas |= schema.pop("$defs", {})
                schemas[model.__name__] = schema
            bearer = {"type": "http", "scheme": "bearer", "description": TOKEN_DESCRIPTION}
            document["components"]["securitySchemes"] = {"token": bearer}
            document["security"] = [{"token": []}]
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
