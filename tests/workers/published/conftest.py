from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import Storage


@pytest.fixture
def root(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "job"))
