"""A database with rows in every table, and empty ones to restore into."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Table, func, insert, select, text
from tests.support.service.databases import fast_settings, new_database

from holdfast_service.settings import JOB_KEY, SECRETS, Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.installation import check_key, load_or_create_key
from holdfast_service.store.models import (
    Base,
    CodePackage,
    InjectedFault,
    LeaseOwner,
    RankChunk,
    RankStates,
    RemovedJob,
)
from holdfast_workers.private_files import create_private

Databases = Callable[[str, str], Awaitable[Settings]]
JOB = "01900000-0000-7000-8000-000000000001"
SECRET = f"{SECRETS}/bucket.json"


@pytest.fixture
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Databases:
    """Settings of an empty database of a kind, in a folder of its own."""

    async def make(kind: str, folder: str) -> Settings:
        url = None
        if kind == "postgresql":
            url = await new_database(request.getfixturevalue("postgres_server"))
        return fast_settings(tmp_path / folder, url)

    return make


@pytest.fixture
def filled(empty: Databases) -> Databases:
    """The same with rows in every table, and keys."""

    async def make(kind: str, folder: str) -> Settings:
        settings = await empty(kind, folder)
        settings.data_dir.mkdir()
        await fill(settings)
        return settings

    return make


async def fill(settings: Settings) -> None:
    store = await Store.open(settings)
    key = load_or_create_key(settings.data_dir / JOB_KEY)
    create_private(settings.data_dir / SECRET, '{"bucket": "b"}')
    async with store.write() as session:
        await check_key(session, key, settings.job_key_file)
        for table in Base.metadata.sorted_tables:
            if not await session.scalar(select(func.count()).select_from(table)):
                await session.execute(insert(table).values(row_of(table)))
        session.add(CodePackage(id="sha256:ff", content=bytes(range(256)) * 9, used_at=1e308))
        session.add(LeaseOwner(id="dead", until=5.0))
        session.add(
            RemovedJob(
                id="01900000-0000-7000-8000-0000000000ff",
                removed_at=5e-324,
                answer={"text": "ä\u2028\U0001f600'\"\\", "big": 2**70, "x": [None, -0.0]},
                productive_s=0.1 + 0.2,
                held_s=float(2**53),
                incidents=[{"number": 1, "closed_at": 0.1, "cause": "hang"}],
            )
        )
        await session.merge(RankStates(job_id=JOB, at=1.0, attempt=2, seen={}))
        places = {"job_id": JOB, "place": 0, "width_s": 2**62, "ranks": 1, "counts": []}
        await session.merge(RankChunk(**places, steps=b"", compute=b"\0\xff"))
        session.add(
            InjectedFault(job_id=JOB, number=2**62, fault={}, request_digest="", requested_at=1.5)
        )
        await session.execute(text("UPDATE jobs SET lease_owner = 'dead', lease_token = 't'"))
    await store.close()


def row_of(table: Table) -> dict[str, Any]:
    """A value for every column that has no default."""
    values: dict[type, Any] = {str: "text", int: 7, float: 0.25, bool: True, bytes: b"\0\xff"}
    named = {"job_id": JOB, "state": "RUNNING", **({"id": JOB} if table.name == "jobs" else {})}
    columns = [column for column in table.columns if column.default is None]
    return {
        column.name: named.get(column.name, values.get(column.type.python_type, {"a": [None, 1]}))
        for column in columns
    }
