"""Requests that are being answered, and those who let them finish first."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.service.store.test_sqlite import written

from holdfast_service.store import engine
from holdfast_service.store.engine import Store
from holdfast_service.store.request_priority import Serving


async def test_quiet_is_when_the_last_one_is_answered() -> None:
    serving = Serving()
    await serving.quiet(0.0)
    with serving.one():
        with serving.one():
            waiting = [asyncio.create_task(serving.quiet(30.0)) for _ in range(3)]
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not any(one.done() for one in waiting)
    await asyncio.wait_for(asyncio.gather(*waiting), 5.0)
    with serving.one():
        began = time.monotonic()
        await serving.quiet(0.05)  # as long as that, and no longer
        assert time.monotonic() - began >= 0.05


async def test_who_was_cancelled_while_it_waited_keeps_nobody_else_out(store: Store) -> None:
    watching = store.behind_users(watching=True)
    order: list[str] = []
    with store.serving.one():
        cut = [asyncio.create_task(written(watching, f"cut {n}", order)) for n in range(8)]
        await asyncio.sleep(0)
        for one in cut:
            one.cancel()
        await asyncio.gather(*cut, return_exceptions=True)
    await asyncio.wait_for(written(watching, "poll", order), 5.0)
    assert order == ["poll"]


async def test_a_poll_is_stored_after_the_request_that_is_being_answered(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_USERS_FIRST_S", 30.0)  # two writes may take longer than it is
    order: list[str] = []
    with store.serving.one():
        poll = asyncio.create_task(written(store.behind_users(watching=True), "poll", order))
        await asyncio.sleep(0)
        await written(store.behind_users(), "order", order)
        await written(store, "user", order)
    await poll
    assert order == ["order", "user", "poll"]
