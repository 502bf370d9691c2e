"""Random requests, made from the OpenAPI document, are answered as the document says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schemathesis
import schemathesis.checks
import schemathesis.specs.openapi.checks
from hypothesis import HealthCheck, Phase, settings
from tests.support.service.live_server import live_server

CHECKS = [  # a spec that fits its schema may still be impossible, so not: accepts what fits
    schemathesis.checks.not_a_server_error,
    schemathesis.specs.openapi.checks.status_code_conformance,
    schemathesis.specs.openapi.checks.content_type_conformance,
    schemathesis.specs.openapi.checks.response_schema_conformance,
]
schemathesis.serializer.alias("application/zip", "application/octet-stream")
FEW = settings(
    max_examples=8,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


@schemathesis.serializer("application/zip")
def _as_it_is(_context: object, value: Any) -> bytes:
    """Whatever bytes are thought of: hardly ever an archive."""
    found = getattr(value, "data", value)
    return found if isinstance(found, bytes) else str(found).encode("utf-8", "replace")


@pytest.mark.timeout(180)
def test_answers_conform_to_the_document(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        schema = schemathesis.openapi.from_url(f"{server.address}/api/v1/openapi.json")
        tested = 0
        for result in schema.exclude(path="/metrics").get_all_operations():
            operation = result.ok()

            @FEW
            @_given(operation)
            def conforms(case: schemathesis.Case) -> None:
                case.call_and_validate(timeout=20, checks=CHECKS)

            conforms()
            tested += 1
        assert tested >= 30


def _given(operation: object) -> object:
    from hypothesis import given

    return given(case=operation.as_strategy())  # type: ignore[attr-defined]
