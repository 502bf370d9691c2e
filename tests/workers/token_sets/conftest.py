from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.data.preparation import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))
