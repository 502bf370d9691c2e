"""Databases and settings for tests of the control plane."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg

from holdfast_service.settings import Settings


async def new_database(server: Any) -> str:
    """A fresh database; its URL."""
    name = f"holdfast_{uuid4().hex}"
    connection = await asyncpg.connect(server.get_uri())
    try:
        await connection.execute(f"CREATE DATABASE {name}")
    finally:
        await connection.close()
    return str(server.get_uri(database=name))


def fast_settings(data_dir: Path, database_url: str | None = None, **changed: Any) -> Settings:
    times = {
        "reconcile_interval_s": 0.02,
        "claim_interval_s": 0.02,
        "queue_retry_s": 0.05,
        "cluster_retry_s": 0.05,
        "error_retry_s": 0.05,
        "release_retry_s": 0.02,
        "event_poll_s": 0.02,
        "supervisor_deadline_s": 0.3,
        "drain_deadline_s": 5.0,
        "reap_interval_s": 0.1,
        "node_look_s": 0.05,
        "lease_s": 5.0,
    }
    return Settings(data_dir=data_dir, database_url=database_url, **{**times, **changed})
