from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder in real shared memory."""
    root = Path(tempfile.mkdtemp(prefix="holdfast-memory-test-", dir="/dev/shm"))
    yield root
    shutil.rmtree(root)
