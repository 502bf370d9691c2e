"""Responses to random requests, generated from the OpenAPI document, conform to the document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import schemathesis.checks
import schemathesis.specs.openapi.checks
from hypothesis import HealthCheck, Phase, settings
from schemathesis.core.result import Ok
from tests.support.service.live_server import live_server
from tests.support.waiting import DEADLINE_S

CHECKS = [  # without "accepts valid data": a spec may fit its schema and still be invalid
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


@pytest.mark.seconds
@pytest.mark.timeout(180)
def test_responses_conform_to_the_document(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        schema = schemathesis.openapi.from_url(
            f"{server.address}/api/v1/openapi.json", timeout=DEADLINE_S
        )
        tested = 0
        for result in schema.exclude(path="/metrics").get_all_operations():
            assert isinstance(result, Ok)
            operation = result.ok()

            @FEW
            @_given(operation)
            def conforms(case: schemathesis.Case[Any]) -> None:
                case.call_and_validate(timeout=DEADLINE_S, checks=CHECKS)

            conforms()
            tested += 1
        assert tested >= 30


def _given(operation: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    from hypothesis import given

    return given(case=operation.as_strategy())
