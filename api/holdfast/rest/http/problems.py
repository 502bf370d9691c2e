"""Errors of the API: every error leaves as `application/problem+json` with a stable code."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from holdfast.rest.http import request_ids
from holdfast.schemas import Problem
from holdfast_service.errors import ApiError

MEDIA_TYPE = "application/problem+json"
_log = structlog.get_logger()

CODE_OF_STATUS = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    408: "request_timeout",
    412: "precondition_failed",
    413: "body_too_large",
    415: "unsupported_media_type",
    416: "range_not_satisfiable",
    421: "untrusted_host",
    500: "internal_error",
    503: "not_ready",
}
STATUS_DESCRIPTIONS = {
    400: "The request is malformed.",
    401: "The server does not know the sender.",
    403: "The server does not allow this operation.",
    404: "The resource does not exist.",
    406: "The response has another media type.",
    408: "The body did not arrive in time.",
    409: "The present state does not allow this operation.",
    412: "Users have changed the job since `If-Match`.",
    413: "The body is larger than the server accepts.",
    415: "The body is neither JSON nor YAML.",
    416: "`Range` names no part of the file.",
    422: "Some values are invalid; `faults` names each with its path.",
    503: "The server is not ready; retry later.",
}
EXAMPLE_CODE = {
    403: "injection_disabled",
    409: "job_ended",
    412: "job_changed",
    422: "invalid_spec",
    404: "job_not_found",
    400: "malformed_body",
}


class ProblemError(Exception):
    """A refusal by the REST layer itself, with the status and the code of the problem."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        **extensions: Any,
    ) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail
        self.headers, self.extensions = headers, extensions


def too_large(limit: int) -> ProblemError:
    return ProblemError(413, "body_too_large", f"the body exceeds the limit of {limit} bytes")


def problem_response(
    status: int,
    code: str,
    detail: str | None,
    *,
    instance: str | None = None,
    headers: Mapping[str, str] | None = None,
    **extensions: Any,
) -> Response:
    body = {
        "type": f"urn:holdfast:problem:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "code": code,
        "detail": detail,
        "instance": instance,
        "request_id": request_ids.current(),
        **extensions,
    }
    present = {key: value for key, value in body.items() if value is not None}
    return Response(
        json.dumps(present), status_code=status, media_type=MEDIA_TYPE, headers=dict(headers or {})
    )


def refused(error: ProblemError, path: str) -> Response:
    """The answer of a middleware, which no exception handler surrounds."""
    return problem_response(
        error.status,
        error.code,
        error.detail,
        instance=path,
        headers=error.headers,
        **error.extensions,
    )


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI `responses` of a route that may answer with these problems."""
    return {
        status: {
            "description": STATUS_DESCRIPTIONS[status],
            "model": Problem,
            "content": {
                MEDIA_TYPE: {
                    "schema": {"$ref": "#/components/schemas/Problem"},
                    "example": _example(status),
                }
            },
        }
        for status in statuses
    }


def install(app: FastAPI) -> None:
    """Register handlers that turn every exception of a request into a problem."""

    @app.exception_handler(ProblemError)
    async def refusal(request: Request, error: ProblemError) -> Response:
        return refused(error, request.url.path)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return _problem(request, **error.problem)

    @app.exception_handler(RequestValidationError)
    async def invalid_parameters(request: Request, error: RequestValidationError) -> Response:
        return _problem(
            request,
            422,
            "invalid_parameters",
            "some parameters are invalid",
            faults=_parameter_faults(error.errors()),
        )

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        status = error.status_code
        code = CODE_OF_STATUS.get(status, f"http_{status}")
        headers = error.headers
        if status == 405 and (allowed := _allowed_methods(app, request)):
            headers = {"Allow": allowed}
        return _problem(request, status, code, str(error.detail), headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        # The framework raises the error again after this response, and uvicorn logs the traceback,
        # but without the id of the request, which this line has.
        _log.error("request.failed", path=request.url.path, error=repr(error))
        return _problem(request, 500, "internal_error", "an unexpected error; see the server's log")


def _problem(
    request: Request,
    status: int,
    code: str,
    detail: str,
    headers: Mapping[str, str] | None = None,
    **extensions: Any,
) -> Response:
    return problem_response(
        status, code, detail, instance=request.url.path, headers=headers, **extensions
    )


def _allowed_methods(app: FastAPI, request: Request) -> str:
    """All methods of a path; the framework lists the methods of a single route only."""
    methods: set[str] = set()
    for template, operations in app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\{[^}]+\}", "[^/]+", template), request.url.path):
            methods |= {method.upper() for method in operations}
    return ", ".join(sorted(methods))


def _parameter_faults(errors: Sequence[Any]) -> list[dict[str, str]]:
    return [
        {"path": ".".join(str(part) for part in error["loc"]), "message": error["msg"]}
        for error in errors
    ]


def _example(status: int) -> dict[str, Any]:
    code = EXAMPLE_CODE.get(status) or CODE_OF_STATUS[status]
    example: dict[str, Any] = {
        "type": f"urn:holdfast:problem:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "code": code,
        "detail": STATUS_DESCRIPTIONS[status],
    }
    if status == 422:
        fault = {"path": "parallel.tp", "message": "heads 4 is not divisible by tp 3"}
        example |= {"detail": "the spec has 1 fault", "faults": [fault]}
    return example
