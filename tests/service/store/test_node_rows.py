"""Rows of nodes that several servers see for the first time at once."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.store import nodes
from holdfast_service.store.engine import Store


async def test_a_node_that_another_server_added_first_is_that_servers_row(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store.write() as session:
        await nodes._get_or_add_node(session, "n1", "first", 1.0)

    async def not_yet_there(*_: Any, **__: Any) -> None:
        return None

    monkeypatch.setattr(AsyncSession, "get", not_yet_there)
    async with store.write() as session:
        node = await nodes._get_or_add_node(session, "n1", "second", 2.0)
        assert (node.id, node.host, node.first_seen) == ("n1", "first", 1.0)
