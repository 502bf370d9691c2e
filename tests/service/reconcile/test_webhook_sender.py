"""Webhook messages are stored with their event, signed, and sent until they are accepted."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import re
from dataclasses import asdict

import httpx
import pytest
from pydantic import SecretStr
from sqlalchemy import func, select
from tests.support.waiting import DEADLINE_S
from tests.support.web.seed_events import store_events

from holdfast_service.job_model.events.attempts import AttemptEndedEvent
from holdfast_service.job_model.events.codec import AnyEvent
from holdfast_service.job_model.events.incidents import (
    IncidentClosedEvent,
    IncidentOpenedEvent,
    IncidentRecord,
)
from holdfast_service.job_model.events.kinds import EventKind
from holdfast_service.job_model.events.progress import JobStateEvent
from holdfast_service.job_model.lifecycle import State
from holdfast_service.reconcile.webhook_sender import (
    CLAIM_S,
    FIRST_RETRY_S,
    MAX_TRIES,
    WebhookSender,
)
from holdfast_service.services.jobs import JobService
from holdfast_service.services.overview import Overview
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.models import Outbox
from holdfast_service.store.transaction import job_transaction
from holdfast_service.views import webhook_messages
from holdfast_service.views.timeline import VerdictView

INCIDENT = IncidentRecord(
    incident=1,
    cause="hang",
    decision="restart_worker",
    steps_lost=0,
    closed_at=5.0,
    phases_s={"total": 0.25},
)


class Receiver:
    def __init__(self) -> None:
        self.status = 200
        self.requests: list[httpx.Request] = []

    def client(self) -> httpx.AsyncClient:
        def answer(request: httpx.Request) -> httpx.Response:
            self.requests.append(request)
            return httpx.Response(self.status)

        return httpx.AsyncClient(transport=httpx.MockTransport(answer))


@pytest.fixture
def webhook_settings(settings: Settings) -> Settings:
    changes = {"webhook_url": "http://example.test/hook", "webhook_secret": SecretStr("key")}
    return settings.model_copy(update=changes)


async def outbox_size(store: Store) -> int:
    async with store.read() as session:
        return await session.scalar(select(func.count()).select_from(Outbox)) or 0


async def emit_incident(store: Store, jobs: JobService) -> str:
    store.sends_webhooks = True
    job = (await jobs.submit({"name": "x"}))[0]
    async with job_transaction(store, job.id) as tx:
        tx.emit(AttemptEndedEvent(attempt=1))  # causes no message
        tx.emit(IncidentClosedEvent(record=INCIDENT), at=1000.0)
    return job.id


async def test_a_message_is_stored_in_the_transaction_of_its_event(
    store: Store, jobs: JobService
) -> None:
    job_id = await emit_incident(store, jobs)
    assert await outbox_size(store) == 1
    with pytest.raises(RuntimeError):
        async with job_transaction(store, job_id) as tx:
            tx.emit(IncidentOpenedEvent(record=INCIDENT))
            raise RuntimeError("rolled back")
    assert await outbox_size(store) == 1
    store.sends_webhooks = False  # no webhook is configured
    async with job_transaction(store, job_id) as tx:
        tx.emit(IncidentOpenedEvent(record=INCIDENT))
    assert await outbox_size(store) == 1


async def test_an_accepted_message_is_signed_and_sent_once(
    store: Store, jobs: JobService, overview: Overview, webhook_settings: Settings
) -> None:
    job_id = await emit_incident(store, jobs)
    receiver, hooks = Receiver(), WebhookSender(store, webhook_settings, overview)
    async with receiver.client() as client:
        assert [await hooks.send_due(client, 2000.0 + n) for n in range(2)] == [1, 0]
    (request,) = receiver.requests
    stamp, _, signed = request.headers["Holdfast-Signature"].partition(",v1=")
    assert stamp == "t=2000"
    wanted = hmac.new(b"key", b"2000." + request.content, hashlib.sha256).hexdigest()
    assert hmac.compare_digest(signed, wanted)
    content = json.loads(request.content)
    assert content["id"] == request.headers["Holdfast-Delivery"]
    assert (content["job"]["id"], content["cause"]) == (job_id, "hang")
    assert await outbox_size(store) == 0


async def test_a_failed_message_is_retried_under_the_same_id_and_finally_abandoned(
    store: Store, jobs: JobService, overview: Overview, webhook_settings: Settings
) -> None:
    await emit_incident(store, jobs)
    receiver, hooks, now = Receiver(), WebhookSender(store, webhook_settings, overview), 2000.0
    receiver.status = 503
    async with receiver.client() as client:
        await hooks.send_due(client, now)
        assert await hooks.send_due(client, now + FIRST_RETRY_S / 2) == 0
        for _ in range(MAX_TRIES - 1):
            now += 3601.0
            assert await hooks.send_due(client, now) == 1
    assert len({request.headers["Holdfast-Delivery"] for request in receiver.requests}) == 1
    assert len(receiver.requests) == MAX_TRIES
    assert await outbox_size(store) == 0


async def test_a_message_claimed_by_a_dead_server_is_sent_by_another_server(
    store: Store, jobs: JobService, overview: Overview, webhook_settings: Settings
) -> None:
    await emit_incident(store, jobs)
    await WebhookSender(store, webhook_settings, overview)._claim(2000.0)  # and dies
    receiver, hooks = Receiver(), WebhookSender(store, webhook_settings, overview)
    async with receiver.client() as client:
        assert await hooks.send_due(client, 2000.0 + CLAIM_S / 2) == 0
        assert await hooks.send_due(client, 2000.0 + CLAIM_S + 1) == 1
    assert await outbox_size(store) == 0


async def test_messages_are_sent_over_http_until_the_server_stops(
    store: Store, jobs: JobService, overview: Overview, settings: Settings
) -> None:
    received: asyncio.Queue[str] = asyncio.Queue()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):  # the sender has ended
            while head := (await reader.readuntil(b"\r\n\r\n")).lower():
                (length,) = re.findall(rb"content-length: (\d+)", head)
                content = json.loads(await reader.readexactly(int(length)))
                received.put_nowait(content["job"]["id"])
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    receiver = await asyncio.start_server(answer, "127.0.0.1")
    url = f"http://127.0.0.1:{receiver.sockets[0].getsockname()[1]}/hook"
    changed = settings.model_copy(update={"webhook_url": url})
    sender = WebhookSender(store, changed, overview)
    stopping = asyncio.Event()
    running = asyncio.create_task(sender.run(stopping))
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(2):  # the second one is stored while the sender waits
            job_id = await emit_incident(store, jobs)
            assert await received.get() == job_id
        while await outbox_size(store):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        stopping.set()
        await running
    receiver.close()


@pytest.mark.parametrize("is_slack", [False, True])
async def test_the_message_of_an_end_sums_up_the_job_as_its_verdict_does(
    store: Store, jobs: JobService, overview: Overview, webhook_settings: Settings, is_slack: bool
) -> None:
    store.sends_webhooks = True
    job_id = (await jobs.submit({"name": "x"}))[0].id
    await store_events(store, job_id, [(5.0, EventKind.INCIDENT_CLOSED, asdict(INCIDENT))])
    await end(store, job_id)
    if is_slack:
        webhook_settings = webhook_settings.model_copy(update={"webhook_format": "slack"})
    receiver, hooks = Receiver(), WebhookSender(store, webhook_settings, overview)
    async with receiver.client() as client:
        assert await hooks.send_due(client, 2000.0) == 2
    lines = list((await overview.verdict(job_id)).lines)
    assert len(lines) == 3 and lines[1].startswith("It survived 1 fault, which took 0.2 s")
    incident, ended = sorted(map(json.loads, received(receiver)), key=lambda each: len(str(each)))
    if is_slack:
        assert ended["text"].splitlines()[1:] == lines
    else:
        assert ended["summary"] == lines and "summary" not in incident


async def test_an_end_that_cannot_be_summed_up_is_sent_without_and_holds_up_no_other(
    store: Store,
    jobs: JobService,
    overview: Overview,
    webhook_settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, broken, removed = [await emit_incident(store, jobs) for _ in range(3)]
    for job_id in (whole, broken, removed):
        await end(store, job_id)
    verdict = overview.verdict

    async def read(job_id: str) -> VerdictView:
        if job_id == broken:
            raise ValueError("a stored incident cannot be read")
        return await verdict("gone" if job_id == removed else job_id)

    monkeypatch.setattr(overview, "verdict", read)
    receiver, hooks = Receiver(), WebhookSender(store, webhook_settings, overview)
    async with receiver.client() as client:
        assert await hooks.send_due(client, 2000.0) == 6
    ends = [content for content in map(json.loads, received(receiver)) if "summary" in content]
    found = {content["job"]["id"]: len(content["summary"]) for content in ends}
    assert found == {whole: 3, broken: 0, removed: 0}
    assert await outbox_size(store) == 0


async def end(store: Store, job_id: str) -> None:
    async with job_transaction(store, job_id) as tx:
        tx.end(State.FAILED, "user_error", "ValueError: 3")


def received(receiver: Receiver) -> list[bytes]:
    return [request.content for request in receiver.requests]


def test_slack_receives_text_with_a_mark() -> None:
    def line(event: AnyEvent) -> str:
        content = webhook_messages.message("id", "llm", 3, 1.0, event)
        return str(json.loads(webhook_messages.body(content, "slack"))["text"])

    closed, opened = IncidentClosedEvent(record=INCIDENT), IncidentOpenedEvent(record=INCIDENT)
    assert line(opened) == (
        ":warning: *llm*: Incident 1 was opened, because a rank stopped making progress."
    )
    assert line(closed) == (
        ":anchor: *llm*: Incident 1 was closed after 250 ms; the decision was to restart worker; "
        "0 steps lost."
    )
    ended = JobStateEvent(old=State.RUNNING, new=State.FAILED, reason="<!channel> & co")
    assert line(ended) == (
        ":x: *llm*: The state changed from RUNNING to FAILED: &lt;!channel&gt; &amp; co."
    )
    assert not webhook_messages.is_sent(JobStateEvent(old=State.STARTING, new=State.RUNNING))


async def test_the_messages_of_a_claim_are_sent_at_the_same_time(
    store: Store, jobs: JobService, overview: Overview, webhook_settings: Settings
) -> None:
    """One after the other, slow answers would outlast the claim: all are sent twice."""
    for _ in range(5):
        await emit_incident(store, jobs)
    waiting, together = 0, asyncio.Event()

    async def answer(_request: httpx.Request) -> httpx.Response:
        nonlocal waiting
        waiting += 1
        if waiting == 5:
            together.set()
        await asyncio.wait_for(together.wait(), DEADLINE_S)
        return httpx.Response(200)

    hooks = WebhookSender(store, webhook_settings, overview)
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        assert await hooks.send_due(client, 2000.0) == 5
    assert await outbox_size(store) == 0
