"""Reads the body of a request by its `Content-Type`: JSON or YAML, or a zip. `body_limits` has
received it."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request

from holdfast.formats import documents
from holdfast.rest.http.problems import ProblemError
from holdfast.rest.services import Services

JSON = "application/json"
ZIP = "application/zip"
YAML = frozenset({"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"})

EXAMPLE_SPEC: dict[str, Any] = {
    "name": "stdlib-lm",
    "recipe": "pretrain",
    "model": {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "sequence_length": 256},
    "data": {"source": "python-stdlib", "tokenizer": "bytes"},
    "train": {"steps": 300, "global_batch": 16, "micro_batch": 4, "seed": 7},
    "parallel": {"dp_shard": 2, "tp": 2},
    "resources": {"workers_per_node": 2, "standby_nodes": 1},
}
_SPEC = {"schema": {"$ref": "#/components/schemas/JobSpec"}, "example": EXAMPLE_SPEC}
SPEC_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": _SPEC, "application/yaml": _SPEC},
    }
}
"""The body of requests with a spec, in the OpenAPI document."""


async def document(request: Request, services: Services) -> dict[str, Any]:
    """The body as a mapping. Raises ProblemError (400, 415)."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Also a protection: a web page may send `text/plain` to any origin without a preflight request,
    # but not these types.
    if media_type != JSON and media_type not in YAML:
        given = f"not {media_type}" if media_type else "by a Content-Type header"
        raise ProblemError(
            415,
            "unsupported_media_type",
            f"send application/json or application/yaml, {given}",
            headers={"Accept": "application/json, application/yaml"},
        )
    read = documents.read_json if media_type == JSON else documents.read_yaml
    try:
        # In a thread: parsing a large invalid text takes long, and must not block other requests.
        body = await request.body()
        return await asyncio.wrap_future(services.document_threads.submit(read, body))
    except documents.DocumentError as error:
        raise ProblemError(400, "malformed_body", str(error)) from error


async def package(request: Request) -> bytes:
    """A zip file. Raises ProblemError (415)."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != ZIP:
        raise ProblemError(415, "unsupported_media_type", f"send {ZIP}", headers={"Accept": ZIP})
    return await request.body()
