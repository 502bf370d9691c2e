"""For all tests: the quick ones first, so that a plain mistake is seen at once."""

from __future__ import annotations

import pytest

SLOW_MARKS = ("cluster", "chaos", "soak")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start or kill real processes go last; otherwise the order stays."""
    items.sort(key=lambda item: sum(mark in item.keywords for mark in SLOW_MARKS))
