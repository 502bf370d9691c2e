"""Sends what the outbox holds. A message is written with what it tells of, in one transaction; it
is sent at least once, by whichever server claims it, and bears an id by which repeats are known.
"""

from __future__ import annotations

import asyncio
import time

import httpx
import structlog
from sqlalchemy import delete, select, update

from holdfast_service.job_model.webhook_messages import body, signature
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.models import Outbox

POLL_S = 1.0
BATCH_SIZE = 20
CLAIM_S = 60.0
"""A server that dies while it sends leaves its messages to others after this."""
FIRST_RETRY_S = 2.0
MAX_RETRY_S = 3600.0
MAX_TRIES = 30
RESPONSE_TIMEOUT_S = 10.0

_log = structlog.get_logger()


class WebhookSender:
    """One receiver for all jobs, named in the settings."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._url = str(settings.webhook_url)
        self._format = settings.webhook_format
        secret = settings.webhook_secret
        self._secret = None if secret is None else secret.get_secret_value().encode()

    async def run(self, stopping: asyncio.Event) -> None:
        async with httpx.AsyncClient(timeout=RESPONSE_TIMEOUT_S) as client:
            while not stopping.is_set():
                try:
                    sent = await self.send_due(client, time.time())
                except Exception:  # the database may be away for a while; nothing is lost by it
                    _log.exception("the outbox could not be read")
                    sent = 0
                if sent < BATCH_SIZE:
                    await _pause(stopping, POLL_S)

    async def send_due(self, client: httpx.AsyncClient, now: float) -> int:
        """Try every message that is due, up to AT_ONCE; how many that were."""
        claimed = await self._claim(now)
        for item in claimed:
            problem = await self._send(client, item, now)
            await self._record_delivery(item, problem, now)
        return len(claimed)

    async def _claim(self, now: float) -> list[Outbox]:
        due = select(Outbox).where(Outbox.due_at <= now).order_by(Outbox.at).limit(BATCH_SIZE)
        async with self._store.read() as session:  # most often there is nothing to write
            if (await session.scalars(due)).first() is None:
                return []
        async with self._store.write() as session:
            found = list(await session.scalars(due.with_for_update(skip_locked=True)))
            for item in found:
                item.due_at = now + CLAIM_S
                item.tries += 1
            return found

    async def _send(self, client: httpx.AsyncClient, one: Outbox, now: float) -> str | None:
        """What went wrong; None if it was taken."""
        content = body(one.message, self._format)
        headers = {"Content-Type": "application/json", "Holdfast-Delivery": one.id}
        if self._secret is not None:
            headers["Holdfast-Signature"] = signature(self._secret, content, int(now))
        try:
            answer = await client.post(self._url, content=content, headers=headers)
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        return None if answer.is_success else f"it answered {answer.status_code}"

    async def _record_delivery(self, one: Outbox, problem: str | None, now: float) -> None:
        abandoned = problem is not None and one.tries >= MAX_TRIES
        async with self._store.write() as session:
            if problem is None or abandoned:
                await session.execute(delete(Outbox).where(Outbox.id == one.id))
            else:
                wait_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2 ** (one.tries - 1))
                later = update(Outbox).where(Outbox.id == one.id).values(due_at=now + wait_s)
                await session.execute(later)
        if problem is not None:
            _log.warning("a webhook failed", id=one.id, problem=problem, abandoned=abandoned)


async def _pause(stopping: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stopping.wait(), seconds)
    except TimeoutError:
        return
