"""A store without a server, for the tests of what lies below the routers."""

from __future__ import annotations

from tests.support.service.stores import postgres_template, settings, store

__all__ = ["postgres_template", "settings", "store"]
