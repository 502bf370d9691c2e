"""Every resolved spec that the API returns is accepted again, in both formats, as the same spec."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from tests.support.service.valid_specs import documents

from holdfast.formats.documents import read_json, read_yaml, write_yaml
from holdfast_service.errors import InvalidSpec
from holdfast_service.job_model.job_spec import MAX_SPEC_BYTES, parse
from holdfast_service.job_model.spec_document import MAX_VALUES


@pytest.mark.seconds
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(documents())
@example({"name": "1e5", "config": {"1e5": "1e5", "on": [1e-05, 1e16]}})
@example(
    {
        "name": "evaluated",
        "data": {"sources": [{"path": "/a"}], "validation": {"share": 0.1}},
        "evaluate": {"every_steps": 10, "stop": {"patience": 2}, "function": "a:b"},
        "checkpoint": {"remote": {"every_steps": 20, "keep_best": {"metric": "eval_loss"}}},
    }
)
def test_a_resolved_spec_is_accepted_again(document: dict[str, Any]) -> None:
    spec = parse(document, None)
    resolved = json.loads(spec.model_dump_json())
    for again in (
        read_json(json.dumps(resolved)),
        read_yaml(yaml.safe_dump(resolved)),
        read_yaml(write_yaml(resolved)),
    ):
        assert again == resolved
        assert parse(again, None) == spec


def test_a_spec_that_would_be_too_large_with_its_defaults_is_refused() -> None:
    largest = {"a": "x" * (MAX_SPEC_BYTES - 4_000), "b": ["\n"] * 100}
    spec = parse({"name": "x", "config": largest}, None)
    assert read_yaml(yaml.safe_dump(spec.model_dump(mode="json")))
    for config in ({"a": "x" * MAX_SPEC_BYTES}, {"a": [1] * (MAX_VALUES - 10)}):
        with pytest.raises(InvalidSpec, match="with its defaults has"):
            parse({"name": "x", "config": config}, None)
