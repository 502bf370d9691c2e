"""Real gloo worlds on a small corpus, for the tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.ranks.corpora import small_corpus
from tests.support.ranks.rank_worlds import Worlds


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    with small_corpus(tmp_path_factory.mktemp("corpus")):
        yield Worlds(tmp_path_factory.mktemp("cache"))
