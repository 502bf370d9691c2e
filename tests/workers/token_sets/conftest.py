from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.data.preparation import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"
