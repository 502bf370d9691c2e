"""The store on PostgreSQL: connections that the server closes while they are idle."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import event, select, text
from sqlalchemy.exc import DBAPIError
from tests.support.service.databases import fast_settings, new_database
from tests.support.service.job_drives import until

from holdfast_service.store.engine import Store
from holdfast_service.store.models import NodeRow
from holdfast_service.store.statement import Statement


async def end_connections(url: str) -> None:
    """Make the server close all other connections to this database."""
    own = await asyncpg.connect(url)
    await own.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    await own.close()


async def test_closed_connections_are_replaced(
    postgres_server: Any, postgres_template: str, tmp_path: Path
) -> None:
    url = await new_database(postgres_server, postgres_template)
    store = await Store.open(fast_settings(tmp_path, url))
    used = []
    try:
        event.listen(
            store._engine.sync_engine,
            "checkout",
            lambda opened, _record, _proxy: used.append(opened.driver_connection),
        )
        await asyncio.gather(*(store.ping() for _ in range(5)))
        await end_connections(url)
        await until(lambda: all(connection.is_closed() for connection in used))
        async with store.read() as session:
            assert await session.scalar(text("SELECT 1")) == 1
        await asyncio.gather(*(store.ping() for _ in range(5)))
    finally:
        await store.close()


async def test_a_closed_connection_fails_its_statement_and_is_then_replaced(
    postgres_server: Any, postgres_template: str, tmp_path: Path
) -> None:
    url = await new_database(postgres_server, postgres_template)
    store = await Store.open(fast_settings(tmp_path, url))
    nodes = Statement(select(NodeRow.id))
    try:
        async with store.read() as session:
            assert await nodes.all(session) == []
            await end_connections(url)
            with pytest.raises(DBAPIError) as caught:
                for _ in range(1000):  # until the connection is closed
                    await nodes.all(session)
        assert caught.value.connection_invalidated
        async with store.read() as session:
            assert await nodes.all(session) == []
    finally:
        await store.close()
