"""In-flight requests, and background work that yields to them."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.service.store.test_sqlite import written

from holdfast_service.store import engine
from holdfast_service.store.engine import Store
from holdfast_service.store.request_priority import ActiveRequests


async def test_idle_begins_when_the_last_request_ends() -> None:
    active_requests = ActiveRequests()
    await active_requests.wait_until_idle(0.0)
    with active_requests.request():
        with active_requests.request():
            waiting = [asyncio.create_task(active_requests.wait_until_idle(30.0)) for _ in range(3)]
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
    await asyncio.wait_for(asyncio.gather(*waiting), 5.0)
    with active_requests.request():
        began = time.monotonic()
        await active_requests.wait_until_idle(0.05)  # times out after that
        assert time.monotonic() - began >= 0.05


async def test_a_cancelled_waiter_does_not_block_other_writers(store: Store) -> None:
    polling = store.low_priority(polling=True)
    order: list[str] = []
    with store.active_requests.request():
        cut = [asyncio.create_task(written(polling, f"cut {n}", order)) for n in range(8)]
        await asyncio.sleep(0)
        for task in cut:
            task.cancel()
        await asyncio.gather(*cut, return_exceptions=True)
    await asyncio.wait_for(written(polling, "poll", order), 5.0)
    assert order == ["poll"]


async def test_a_polling_write_waits_for_the_active_request(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        engine, "_REQUESTS_FIRST_S", 30.0
    )  # the two writes may take longer than the default
    order: list[str] = []
    with store.active_requests.request():
        poll = asyncio.create_task(written(store.low_priority(polling=True), "poll", order))
        await asyncio.sleep(0)
        await written(store.low_priority(), "order", order)
        await written(store, "user", order)
    await poll
    assert order == ["order", "user", "poll"]
