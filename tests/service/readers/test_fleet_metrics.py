"""Callbacks and statistics see a job's transaction only after it is stored."""

from __future__ import annotations

import pytest

from holdfast_service.job_model.events.incidents import IncidentClosedEvent, IncidentRecord
from holdfast_service.job_model.lifecycle import State
from holdfast_service.policy.quarantine import NodeStanding
from holdfast_service.readers.fleet_metrics import FleetReader, QueueWait
from holdfast_service.services.jobs import JobService
from holdfast_service.store.engine import Store
from holdfast_service.store.models import AttemptRow, IncidentRow, NodeRow
from holdfast_service.store.transaction import JobTransaction, job_transaction


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


async def test_what_is_open_and_waits_is_counted(store: Store, jobs: JobService) -> None:
    queued, running, ended = [(await jobs.submit({"name": name}))[0].id for name in "qre"]
    now = 5000.0
    node = {"host": "h", "cpus": 1.0, "gpus": 0.0, "first_seen": 0.0, "reason": "", "since": 0.0}
    node |= {"until": None, "strikes": 0, "findings": [], "measured": {}}
    async with store.write() as session:
        for name, seen, state in (("a", 4990.0, "ready"), ("b", 4990.0, "cordoned")):
            session.add(NodeRow(id=name, last_seen=seen, state=state, **node))
        session.add(NodeRow(id="gone", last_seen=4000.0, state="cordoned", **node))
    async with job_transaction(store, queued, now=4000.0) as tx:
        tx.job.queued_at = 4000.0
        tx.wait_for("nodes", "3 nodes are needed")
    async with job_transaction(store, running, now=4000.0) as tx:
        tx.wait_for("nodes", "a wait that is over")
        tx.transition(State.STARTING)
        _add_attempt(tx, attempt=1, state="ended", ranks=4)
        _add_attempt(tx, attempt=2, state="running", ranks=8)
    async with job_transaction(store, ended) as tx:
        tx.transition(State.CANCELLED)
    statistics = await FleetReader(store).statistics(now)
    assert statistics.waits == {"nodes": QueueWait(1, 1000.0)}
    assert statistics.ranks == 8
    assert statistics.nodes == {NodeStanding.READY: 1, NodeStanding.CORDONED: 1}
    assert statistics.unreleased_jobs == 1
    assert statistics.unsent_webhooks == 0


def _add_attempt(tx: JobTransaction, *, attempt: int, state: str, ranks: int) -> None:
    tx.job.attempt = attempt
    tx.session.add(
        AttemptRow(
            job_id=tx.job.id,
            number=attempt,
            state=state,
            mesh={},
            world_size=ranks,
            standbys=[],
            restore={},
            joined={},
            forming_at=1.0,
        )
    )


async def test_open_incidents_are_counted_by_cause_while_their_job_lives(
    store: Store, jobs: JobService
) -> None:
    living, ended = [(await jobs.submit({"name": name}))[0].id for name in "le"]
    async with store.write() as session:
        for job_id, number, closed_at in ((living, 1, None), (living, 2, 9.0), (ended, 1, None)):
            data = {"cause": "hang", "incident": number}
            session.add(
                IncidentRow(
                    job_id=job_id, number=number, opened_at=1.0, closed_at=closed_at, data=data
                )
            )
    async with job_transaction(store, ended) as tx:
        tx.transition(State.CANCELLED)
    assert (await FleetReader(store).statistics(100.0)).open_incidents == {"hang": 1}
