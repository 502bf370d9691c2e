from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a recipe keeps its corpus, tokenized; `tiny_spec` reads the corpus itself."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(3):
        (folder / f"part{index}.txt").write_text(" ".join(map(str, range(4000))))
    monkeypatch.setenv("HOLDFAST_TEST_CORPUS", str(folder))
    return tmp_path / "cache"
