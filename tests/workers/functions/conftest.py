"""Real gloo worlds for the tests of training functions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.ranks.rank_worlds import Worlds


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    yield Worlds(tmp_path_factory.mktemp("cache"))
