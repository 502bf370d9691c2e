"""Callbacks and statistics see a job's transaction only after it is stored."""

from __future__ import annotations

import pytest

from holdfast_service.job_model.events.incidents import IncidentClosedEvent, IncidentRecord
from holdfast_service.job_model.lifecycle import State
from holdfast_service.readers.fleet_metrics import FleetReader
from holdfast_service.services.jobs import JobService
from holdfast_service.store.engine import Store
from holdfast_service.store.models import IncidentRow
from holdfast_service.store.transaction import job_transaction


async def test_an_incident_is_reported_after_it_is_stored(store: Store, jobs: JobService) -> None:
    job = (await jobs.submit({"name": "x"}))[0]
    closed = IncidentClosedEvent(record=IncidentRecord(incident=1))
    reported: list[tuple[str, IncidentRecord]] = []
    store.on_incident_closed = lambda job_id, incident: reported.append((job_id, incident))
    with pytest.raises(RuntimeError):
        async with job_transaction(store, job.id) as tx:
            tx.emit(closed)
            tx.transition(State.STARTING)
            raise RuntimeError("rolled back")
    assert not reported and not store.transitions
    async with job_transaction(store, job.id) as tx:
        tx.emit(closed)
        tx.transition(State.STARTING)
        assert not reported
    assert reported == [(job.id, closed.record)]
    assert store.transitions == {("QUEUED", "STARTING", ""): 1}


async def test_fleet_statistics_count_each_incident_once(store: Store, jobs: JobService) -> None:
    job = (await jobs.submit({"name": "x"}))[0]
    fleet = FleetReader(store)

    async def close(number: int, at: float) -> None:
        fields = {
            "cause": "hang",
            "decision": "ignore",
            "steps_lost": 2,
            "phases_s": {"total": 0.3},
        }
        async with store.write() as session:
            session.add(
                IncidentRow(
                    job_id=job.id, number=number, opened_at=at - 1, closed_at=at, data=fields
                )
            )

    await close(1, 1000.0)
    assert (await fleet.statistics(2000.0)).lost_steps == 2
    await close(2, 990.0)  # stored after an incident that closed later
    for _ in range(2):
        statistics = await fleet.statistics(2000.0)
        assert statistics.incidents == {("hang", "ignore"): 2}
        assert (statistics.lost_steps, sum(statistics.phases["total"].counts)) == (4, 2)
    assert statistics.jobs == {"QUEUED": 1}
    assert statistics.goodput is None
