"""Jobs whose ranks use Ray are refused unless the server allows them."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_service.job_model.job_spec import parse
from holdfast_service.services.ray_access import find_fault
from holdfast_service.settings import Settings

EMBEDDED: dict[str, Any] = {}
EXTERNAL: dict[str, Any] = {"ray_address": "10.0.0.1:6379"}


def fault_of(settings: dict[str, Any], **document: Any) -> Any:
    return find_fault(parse({"name": "x", **document}, None), Settings(**settings))


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        (EMBEDDED, True),
        ({**EMBEDDED, "ranks_may_use_ray": False}, False),
        (EXTERNAL, False),
        ({**EXTERNAL, "ranks_may_use_ray": True}, True),
    ],
)
def test_datasets_are_refused_where_ranks_may_not_use_ray(
    settings: dict[str, Any], allowed: bool
) -> None:
    found = fault_of(settings, ray_train="a:b", ray_run={"datasets": "a:c"})
    assert (found is None) is allowed
    if found is not None:
        assert found.path == "ray_run.datasets"
        assert "HOLDFAST_RANKS_MAY_USE_RAY" in found.message


def test_jobs_without_datasets_are_not_refused() -> None:
    assert fault_of(EXTERNAL, ray_train="a:b") is None
    assert fault_of(EXTERNAL, script="-m a") is None
