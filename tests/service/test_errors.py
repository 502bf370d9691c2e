"""An error of the API is one class, with one code and one status, for server and client."""

from __future__ import annotations

import pickle
import re

import pytest

from holdfast_service import errors
from holdfast_workers.spec import SpecFault

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.ApiError) and kind.code != "unknown"
]


def test_each_error_has_a_code_of_its_own_a_status_and_a_meaning() -> None:
    assert {kind.code: kind.status for kind in KINDS} == errors.statuses()
    assert len(KINDS) == len(errors.statuses()), "each class has a code of its own"
    for kind in KINDS:
        assert re.fullmatch(r"[a-z_]+", kind.code) and 400 <= kind.status < 600 and kind.__doc__


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
