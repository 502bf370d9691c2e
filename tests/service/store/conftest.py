"""The statements and transactions of the store, on each kind of database."""

from __future__ import annotations

from tests.support.service.stores import on_each_database as settings

__all__ = ["settings"]
