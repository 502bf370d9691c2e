"""What others hear of a job's transaction they hear once it is stored, and only then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from holdfast_service.job_model.lifecycle import State
from holdfast_service.readers.fleet_metrics import Fleet
from holdfast_service.services.jobs import JobService
from holdfast_service.store.engine import Store
from holdfast_service.store.models import Incident
from holdfast_service.store.transaction import job_transaction


async def test_an_incident_is_told_once_it_is_stored(store: Store, jobs: JobService) -> None:
    job = (await jobs.submit({"name": "x"}))[0]
    told: list[tuple[str, Mapping[str, Any]]] = []
    store.on_incident_closed = lambda job_id, incident: told.append((job_id, incident))
    with pytest.raises(RuntimeError):
        async with job_transaction(store, job.id) as tx:
            tx.emit("incident.closed", {"incident": 1})
            tx.transition(State.STARTING)
            raise RuntimeError("rolled back")
    assert not told and not store.transitions
    async with job_transaction(store, job.id) as tx:
        tx.emit("incident.closed", {"incident": 1})
        tx.transition(State.STARTING)
        assert not told
    assert told == [(job.id, {"incident": 1})]
    assert store.transitions == {("QUEUED", "STARTING", ""): 1}


async def test_the_fleet_counts_each_incident_once(store: Store, jobs: JobService) -> None:
    job = (await jobs.submit({"name": "x"}))[0]
    fleet = Fleet(store)

    async def close(number: int, at: float) -> None:
        said = {"cause": "hang", "decision": "ignore", "steps_lost": 2, "phases_s": {"total": 0.3}}
        async with store.write() as session:
            session.add(
                Incident(job_id=job.id, number=number, opened_at=at - 1, closed_at=at, data=said)
            )

    await close(1, 1000.0)
    assert (await fleet.figures(2000.0)).lost_steps == 2
    await close(2, 990.0)  # stored later than one that closed after it
    for _ in range(2):
        figures = await fleet.figures(2000.0)
        assert figures.incidents == {("hang", "ignore"): 2}
        assert (figures.lost_steps, sum(figures.phases["total"].counts)) == (4, 2)
    assert figures.jobs == {"QUEUED": 1}
    assert figures.goodput is None
