"""A database of every released version is read, shown and continued by this version."""

from __future__ import annotations

import json
import sqlite3
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest
from sqlalchemy import create_engine, select
from tests.support.service.fake_cluster import FakeCluster, FakeSupervisor, three_nodes
from tests.support.service.job_drives import reconciling, until
from tests.support.simulation.simulated_network import START
from tests.support.upgrade.answers import NOW, answers, in_present_shapes, losses
from tests.support.upgrade.fixture import (
    ANSWERS,
    DATABASE,
    TRAINED,
    Written,
    schema_of,
    upgrade_to,
)

from holdfast_service.job_model.events.codec import UnknownEvent, decode
from holdfast_service.job_model.lifecycle import TERMINAL, State, StopKind
from holdfast_service.job_model.supervisor_protocol import JobLaunch
from holdfast_service.reconcile.webhook_sender import WebhookSender
from holdfast_service.services.checkpoints import CheckpointService
from holdfast_service.services.jobs import JobService
from holdfast_service.services.nodes import NodeService
from holdfast_service.services.overview import Overview
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.listing import Filters
from holdfast_service.store.models import Event, JobRecord, Outbox
from holdfast_service.views.event_text import event_text
from holdfast_workers.checkpoint import manifest

STOPPING = {"pausing": StopKind.PAUSE, "cancelling": StopKind.CANCEL}


@pytest.mark.seconds
async def test_every_answer_about_every_job_is_as_before(
    written: Written, settings: Settings, store: Store
) -> None:
    before = in_present_shapes(written.json(ANSWERS, settings.data_dir))
    with patch("time.time", lambda: NOW):
        now = await answers(store, settings)
    assert list(losses(before, now)) == []


async def test_every_event_has_its_type_and_its_sentence(store: Store) -> None:
    async with store.read() as session:
        events = list(await session.scalars(select(Event)))
    assert len(events) > 100
    for event in events:
        assert not isinstance(decode(event.kind, event.data), UnknownEvent), event.kind
        assert event_text(event.kind, event.data)


async def test_every_incident_is_described(settings: Settings, store: Store) -> None:
    jobs = JobService(store, FakeCluster(), settings)
    described = 0
    for job in (await Overview(store, NodeService(store), settings).rows()).items:
        for incident in (await jobs.history.incidents(job.id)).items:
            text = " ".join(part.text for part in incident.text)
            assert "Evidence: " in text
            assert ("still open" in text) == (incident.closed_at is None)
            described += 1
    assert described >= 3


async def test_a_reconciler_takes_over_every_live_job(settings: Settings, store: Store) -> None:
    async with store.read() as session:
        found = await session.scalars(select(JobRecord).where(JobRecord.state.not_in(TERMINAL)))
        live = {job.name: job for job in found if job.state != State.PAUSED}
    assert {job.state for job in live.values()} == set(State) - TERMINAL - {
        State.PAUSED,
        State.RESIZING,
    }
    cluster = FakeCluster(three_nodes(roomy=True))
    for name in STOPPING:  # their supervisors are still there
        job = live[name]
        launch = JobLaunch(job.id, name, job.spec, "", job.cursor_event, job.attempt)
        cluster.supervisors[job.id] = FakeSupervisor(launch, obeys=False)
    started = time.monotonic()
    with patch("time.time", lambda: START + 10 + time.monotonic() - started):
        async with reconciling(store, cluster, settings):
            for name, job in live.items():
                await until(partial(cluster.supervisors.__contains__, job.id), what=name)
            supervisors = {name: cluster.supervisors[job.id] for name, job in live.items()}
            for name in STOPPING:
                await until(partial(_has_orders, supervisors[name]), what=f"orders for {name}")
    for name, kind in STOPPING.items():
        assert supervisors[name].orders[0].kind is kind
    launches = {name: supervisors[name].launch for name in live.keys() - STOPPING.keys()}
    for name, launch in launches.items():
        known = live[name]
        assert (launch.last_event, launch.last_attempt) == (known.cursor_event, known.attempt)
        assert "n3" in launch.avoid, "the cordoned node"
    queued = launches["queued"]
    assert queued.package is not None
    assert queued.origin is not None and queued.origin.step == 12


async def test_a_paused_job_is_resumed_and_restarts_from_its_checkpoint(
    settings: Settings, store: Store
) -> None:
    cluster = FakeCluster(three_nodes(roomy=True))
    jobs = JobService(store, cluster, settings)
    overview = Overview(store, NodeService(store), settings)
    [paused] = (await overview.rows(Filters(states=frozenset({State.PAUSED})))).items
    await jobs.resume(paused.id)
    async with reconciling(store, cluster, settings):
        await until(lambda: paused.id in cluster.supervisors)
    assert cluster.supervisors[paused.id].launch.last_attempt == paused.attempt > 0


async def test_a_remote_checkpoint_is_listed_with_its_marks_and_verified(
    written: Written, settings: Settings, store: Store
) -> None:
    job = written.json(TRAINED, settings.data_dir)["job"]
    service = CheckpointService(store, settings)
    listed = {row.step: row for row in (await service.list(job)).items if row.deleted_at is None}
    [newest] = listed.values()
    assert newest.pinned and len(newest.needed_by or ()) == 1
    found = await service.find(job, newest.step)
    manifest.verify(found.storage)


async def test_queued_webhook_messages_are_sent(settings: Settings, store: Store) -> None:
    received = []

    def receive(request: httpx.Request) -> httpx.Response:
        received.append(json.loads(request.content))
        return httpx.Response(200)

    async with store.read() as session:
        waiting = {entry.id for entry in await session.scalars(select(Outbox))}
    sender = WebhookSender(
        store, settings.model_copy(update={"webhook_url": "http://receiver.test/"})
    )
    async with httpx.AsyncClient(transport=httpx.MockTransport(receive)) as client:
        while await sender.send_due(client, time.time()):
            pass
    assert {message["id"] for message in received} == waiting
    assert {message["kind"] for message in received} >= {"incident.opened", "job.state"}


def test_a_released_migration_still_makes_the_released_schema(
    written: Written, data_dir: Path, tmp_path: Path
) -> None:
    """Schema changes are new migrations: a released one is never edited."""
    left = sqlite3.connect(data_dir / DATABASE)
    [(revision,)] = left.execute("SELECT version_num FROM alembic_version")
    made = tmp_path / "made.db"
    engine = create_engine(f"sqlite:///{made}")
    with engine.begin() as connection:
        upgrade_to(connection, revision)
    assert schema_of(sqlite3.connect(made)) == schema_of(left)


@pytest.mark.parametrize(
    ("before", "now", "lost"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, []),
        ({"a": 1}, {}, [".a is missing"]),
        ({"a": [1, 2]}, {"a": [1]}, [".a: [1, 2] became [1]"]),
        ([{"a": 1}], [{"a": None}], ["[0].a: 1 became None"]),
    ],
)
def test_only_further_fields_are_no_loss(before: object, now: object, lost: list[str]) -> None:
    assert list(losses(before, now)) == lost


def _has_orders(supervisor: FakeSupervisor) -> bool:
    return bool(supervisor.orders)
