"""Sends the messages in the outbox to the configured webhook.

A message is stored in the transaction of its event. Any server may claim and send it; it is sent at
least once, with an id by which the receiver recognises repeats. A message of a job's end is sent
with the job's verdict as of that moment, or without one if it cannot be read: no message waits for
it.
"""

from __future__ import annotations

import asyncio
import time

import httpx
import structlog
from sqlalchemy import delete, select, update

from holdfast_service.errors import JobNotFound
from holdfast_service.services.overview import Overview
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.lease_holder import wait_until_set
from holdfast_service.store.models import Outbox
from holdfast_service.views.webhook_messages import body, is_end_of_job, signature

POLL_S = 1.0
BATCH_SIZE = 20
CLAIM_S = 60.0
"""A claim expires after this time, so that another server takes over from a dead server."""
FIRST_RETRY_S = 2.0
MAX_RETRY_S = 3600.0
MAX_TRIES = 30
RESPONSE_TIMEOUT_S = 10.0
SUMMARY_S = CLAIM_S / 6
SEND_S = CLAIM_S / 2

_log = structlog.get_logger()


class WebhookSender:
    """Sends the messages of all jobs to the one webhook that the settings name."""

    def __init__(self, store: Store, settings: Settings, overview: Overview) -> None:
        self._store = store
        self._overview = overview
        self._url = str(settings.webhook_url)
        self._format = settings.webhook_format
        secret = settings.webhook_secret
        self._secret = None if secret is None else secret.get_secret_value().encode()

    async def run(self, stopping: asyncio.Event) -> None:
        async with httpx.AsyncClient(timeout=RESPONSE_TIMEOUT_S) as client:
            while not stopping.is_set():
                try:
                    sent = await self.send_due(client, time.time())
                except Exception:  # the database may be unavailable for a while; no message is lost
                    _log.exception("cannot send the messages in the outbox")
                    sent = 0
                if sent < BATCH_SIZE:
                    await wait_until_set(stopping, POLL_S)

    async def send_due(self, client: httpx.AsyncClient, now: float) -> int:
        """Try up to BATCH_SIZE due messages at the same time, within their claim; returns their
        number."""
        claimed = await self._claim(now)
        async with asyncio.TaskGroup() as sending:
            for entry in claimed:
                sending.create_task(self._deliver(client, entry, now))
        return len(claimed)

    async def _deliver(self, client: httpx.AsyncClient, entry: Outbox, now: float) -> None:
        problem = await self._send(client, entry, now)
        await self._record_delivery(entry, problem, now)

    async def _claim(self, now: float) -> list[Outbox]:
        due = select(Outbox).where(Outbox.due_at <= now).order_by(Outbox.at).limit(BATCH_SIZE)
        async with (
            self._store.read() as session
        ):  # the outbox is usually empty: avoid a write transaction
            if (await session.scalars(due)).first() is None:
                return []
        async with self._store.write() as session:
            entries = list(await session.scalars(due.with_for_update(skip_locked=True)))
            for entry in entries:
                entry.due_at = now + CLAIM_S
                entry.tries += 1
            return entries

    async def _send(self, client: httpx.AsyncClient, entry: Outbox, now: float) -> str | None:
        """Send one message; returns the problem, or None on success."""
        summary = await self._summary(entry) if is_end_of_job(entry.message) else None
        content = body(entry.message, self._format, summary)
        headers = {"Content-Type": "application/json", "Holdfast-Delivery": entry.id}
        if self._secret is not None:
            headers["Holdfast-Signature"] = signature(self._secret, content, int(now))
        try:
            async with asyncio.timeout(SEND_S):  # the client's limits are for each read and write
                answer = await client.post(self._url, content=content, headers=headers)
        except (httpx.HTTPError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"
        return None if answer.is_success else f"the receiver answered {answer.status_code}"

    async def _summary(self, entry: Outbox) -> tuple[str, ...]:
        """What sums up the ended job; empty if the job was removed, or cannot be read in time."""
        try:
            async with asyncio.timeout(SUMMARY_S):
                return (await self._overview.verdict(entry.message["job"]["id"])).lines
        except JobNotFound:
            return ()
        except Exception:  # neither this message nor those claimed with it may wait for a summary
            _log.exception("the message of a job's end is sent without its summary", id=entry.id)
            return ()

    async def _record_delivery(self, entry: Outbox, problem: str | None, now: float) -> None:
        abandoned = problem is not None and entry.tries >= MAX_TRIES
        async with self._store.write() as session:
            if problem is None or abandoned:
                await session.execute(delete(Outbox).where(Outbox.id == entry.id))
            else:
                wait_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2 ** (entry.tries - 1))
                later = update(Outbox).where(Outbox.id == entry.id).values(due_at=now + wait_s)
                await session.execute(later)
        if problem is not None:
            _log.warning("a webhook failed", id=entry.id, problem=problem, abandoned=abandoned)
