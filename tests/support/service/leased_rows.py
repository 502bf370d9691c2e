"""Rows of each table whose rows are leased, without their meaning."""

from __future__ import annotations

import pytest
from tests.support.service.fake_cluster import FakeCluster

from holdfast_service.job_model.operations import OperationKind, OperationState
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.models import JobRecord, Leased, Operation


@pytest.fixture(params=[JobRecord, Operation], ids=["jobs", "operations"])
def table(request: pytest.FixtureRequest) -> type[Leased]:
    kind: type[Leased] = request.param
    return kind


async def add_rows(store: Store, settings: Settings, table: type[Leased], count: int) -> list[str]:
    jobs = JobService(store, FakeCluster(), settings)
    ids = [(await jobs.submit({"name": "x"}))[0].id for _ in range(count)]
    if table is Operation:
        async with store.write() as session:
            session.add_all(
                Operation(
                    id=job_id,
                    job_id=job_id,
                    kind=OperationKind.VERIFY,
                    uri="",
                    step=1,
                    state=OperationState.PENDING,
                    created_at=0.0,
                )
                for job_id in ids
            )
    return sorted(ids)
