from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from holdfast_workers import log_setup


@pytest.fixture
def logs_on_stderr() -> Iterator[None]:
    """Log events go to standard error, as in a process of an agent or worker."""
    log_setup.configure()
    yield
    structlog.reset_defaults()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for a recipe's tokenized corpus; `tiny_spec` reads the corpus itself."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(3):
        (folder / f"part{index}.txt").write_text(" ".join(map(str, range(4000))))
    monkeypatch.setenv("HOLDFAST_TEST_CORPUS", str(folder))
    return tmp_path / "cache"


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB in memory."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    folder = tmp_path / "shm"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
