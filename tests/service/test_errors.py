"""An error of the API is one class, with one code and one status, for server and client."""

from __future__ import annotations

import pickle

import pytest

from holdfast_service import errors
from holdfast_workers.spec import SpecFault

STATUS_OF_CODE = {
    "invalid_spec": 422,
    "invalid_fault": 422,
    "invalid_parameters": 422,
    "invalid_regex": 422,
    "invalid_idempotency_key": 422,
    "invalid_time": 422,
    "invalid_code": 422,
    "invalid_cursor": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "injection_disabled": 403,
    "not_found": 404,
    "job_not_found": 404,
    "node_not_found": 404,
    "checkpoint_not_found": 404,
    "code_not_found": 404,
    "operation_not_found": 404,
    "content_gone": 404,
    "unknown_metric": 404,
    "job_ended": 409,
    "job_not_ended": 409,
    "spec_unreadable": 409,
    "job_changed": 412,
    "idempotency_conflict": 409,
    "nothing_to_replay": 409,
    "not_a_replay": 409,
    "code_store_full": 409,
    "checkpoint_pinned": 409,
    "checkpoint_needed": 409,
    "checkpoint_elsewhere": 409,
    "checkpoint_bad": 409,
    "last_checkpoint": 409,
    "being_removed": 409,
    "not_exportable": 409,
    "no_content": 409,
    "operation_ended": 409,
    "operation_cancelled": 409,
    "operation_abandoned": 500,
    "not_ready": 503,
    "cluster_unreachable": 503,
    "storage_unavailable": 503,
}
"""Programs depend on them: they never change."""
KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.ApiError) and kind.code != "unknown"
]


def test_codes_and_their_statuses_are_stable() -> None:
    assert {kind.code: kind.status for kind in KINDS} == STATUS_OF_CODE
    assert len(KINDS) == len(STATUS_OF_CODE), "each class has a code of its own"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_error_that_the_server_raised_is_raised_at_the_client(
    kind: type[errors.ApiError],
) -> None:
    faults = [{"path": "train.steps", "message": "must be positive"}]
    raised = kind("it cannot be done", faults=faults, checks={"database": "ok"})
    for again in (errors.from_problem(raised.problem), pickle.loads(pickle.dumps(raised))):
        assert type(again) is kind
        assert vars(again) == vars(raised)
        assert again.faults == faults
        assert str(again) == "it cannot be done\n  train.steps: must be positive"


def test_an_unknown_code_becomes_the_class_of_its_status() -> None:
    for status, kind in {
        400: errors.ApiError,
        403: errors.Forbidden,
        409: errors.Conflict,
        507: errors.ServerError,
    }.items():
        error = errors.from_problem({"status": status, "code": "new", "title": "A title"})
        assert type(error) is kind
        assert (error.status, error.code, str(error)) == (status, "new", "A title")
    other_status = errors.from_problem({"status": 404, "code": "job_ended", "detail": "gone"})
    assert type(other_status) is errors.NotFound
    assert other_status.code == "job_ended"


def test_an_invalid_document_reports_every_fault() -> None:
    faults = [SpecFault(path="", message="no name"), SpecFault(path="a.b", message="too large")]
    error = errors.InvalidSpec.of(faults)
    assert error.summary == "the spec has 2 faults"
    assert str(error).splitlines()[1:] == ["  spec: no name", "  a.b: too large"]
    assert error.faults[1] == {"path": "a.b", "message": "too large"}
    assert errors.InvalidFault.of(faults[1:]).summary == "the requested fault is invalid: 1 problem"
