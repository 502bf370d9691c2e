"""The API changes by decision only: its document is committed and compared with the release's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from tests.support.openapi_changes import breaking_changes

from holdfast.rest import openapi

API = Path(__file__).parents[3] / "api"
COMMITTED = API / "openapi.json"
RELEASED = API / "openapi-0.1.0.json"
DECIDED = API / "openapi-changes.yaml"


def test_the_committed_document_is_that_of_the_server() -> None:
    written = COMMITTED.read_text() == openapi.text()
    assert written, "run `python -m holdfast.rest.openapi > api/openapi.json` and read its diff"


def test_each_breaking_change_since_the_release_is_a_decision_with_a_reason() -> None:
    decided: dict[str, list[str]] = yaml.safe_load(DECIDED.read_text())
    changes = breaking_changes(json.loads(RELEASED.read_text()), json.loads(COMMITTED.read_text()))
    listed = sorted(change for changes in decided.values() for change in changes)
    assert listed == changes, f"update {DECIDED.name}"
    assert all(reason.strip() for reason in decided)


def test_each_operation_has_a_name_of_its_own() -> None:
    operations = [
        operation
        for path in openapi.document()["paths"].values()
        for operation in path.values()
        if isinstance(operation, dict)
    ]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


def document(**changed: Any) -> dict[str, Any]:
    """A document with one operation, `changed` in its parts."""
    parts: dict[str, Any] = {
        "parameters": [{"in": "query", "name": "q", "schema": {"type": "string"}}],
        "field": {"type": "number", "description": "x"},
        "states": ["A", "B"],
        "path": "/jobs",
    } | changed
    schema = {"$ref": "#/components/schemas/Job"}
    operation = {
        "parameters": parts["parameters"],
        "responses": {"200": {"content": {"application/json": {"schema": schema}}}},
    }
    return {
        "paths": {parts["path"]: {"get": operation}},
        "components": {
            "schemas": {
                "Job": {"properties": {"at": parts["field"]}},
                "State": {"enum": parts["states"]},
            }
        },
    }


def test_what_breaks_a_client_is_found_and_what_is_added_is_not() -> None:
    required = {"in": "query", "name": "r", "schema": {"type": "string"}, "required": True}
    (q,) = document()["paths"]["/jobs"]["get"]["parameters"]
    broken = {
        "GET /jobs: removed": document(path="/tasks"),
        "GET /jobs: query parameter q removed": document(parameters=[]),
        "GET /jobs: query parameter r is required": document(parameters=[q, required]),
        "Job.at has another type": document(field={"type": "string"}),
        "State: value B removed": document(states=["A"]),
    }
    for change, now in broken.items():
        assert breaking_changes(document(), now) == [change]
    described = {"type": "number", "description": "y"}
    for now in (document(), document(field=described), document(states=["A", "B", "C"])):
        assert breaking_changes(document(), now) == []
