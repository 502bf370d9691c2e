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
from tests.support.service.fake_cluster import FakeCluster
from tests.support.service.job_drives import until

from holdfast_service.services.jobs import JobService
from holdfast_service.store.engine import Store, UnsupportedDatabase
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


@pytest.mark.parametrize(
    "options",
    ["sslmode=disable", "sslmode=prefer&application_name=holdfast", "channel_binding=prefer"],
)
async def test_the_usual_urls_are_understood(
    postgres_server: Any, postgres_template: str, tmp_path: Path, options: str
) -> None:
    url = await new_database(postgres_server, postgres_template)
    store = await Store.open(fast_settings(tmp_path, _with_options(url, options)))
    await store.ping()
    await store.close()


@pytest.mark.parametrize("options", ["sslmode=require", "sslmode=nonsense", "host=/nowhere"])
async def test_a_database_that_cannot_be_opened_is_a_sentence(
    postgres_server: Any, postgres_template: str, tmp_path: Path, options: str
) -> None:
    url = await new_database(postgres_server, postgres_template)
    if options.startswith("host"):
        url = "postgresql:///x"
    elif "require" in options:  # over TCP: TLS is never used on a socket of the same machine
        url = "postgresql://user@127.0.0.1:1/x"
    with pytest.raises(UnsupportedDatabase) as refused:
        await Store.open(fast_settings(tmp_path, _with_options(url, options)))
    assert "cannot open the database" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("options", "prepares"), [("", True), ("pgbouncer=true", False)])
async def test_behind_a_pooler_no_statement_stays_prepared(
    postgres_server: Any, postgres_template: str, tmp_path: Path, options: str, prepares: bool
) -> None:
    """A pooler gives each transaction another connection, which lacks earlier statements."""
    url = await new_database(postgres_server, postgres_template)
    store = await Store.open(fast_settings(tmp_path, _with_options(url, options)))
    jobs = JobService(store, FakeCluster(), fast_settings(tmp_path))
    try:
        job, _ = await jobs.submit({"name": "x"})
        for _ in range(3):
            assert (await jobs.get(job.id)).name == "x"
            await jobs.history.events(job.id)
        async with store.read() as session:
            names = list(await session.scalars(text("SELECT name FROM pg_prepared_statements")))
        assert any(names) is prepares
    finally:
        await store.close()


def _with_options(url: str, options: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{options}" if options else url
