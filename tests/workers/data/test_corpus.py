"""A corpus is built once, whole or not at all, and named by its content."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from holdfast_workers.data.corpus import CorpusError, open_corpus, source_files
from holdfast_workers.spec import DataSpec


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_bytes(b"bbbb")
    (folder / "a.txt").write_bytes(b"aaa")
    (folder / "deep" / "c.txt").write_bytes(b"cc")
    return folder


def test_files_are_joined_in_the_order_of_their_names(texts: Path, tmp_path: Path) -> None:
    corpus = open_corpus(DataSpec(source=str(texts)), tmp_path / "cache", 2)
    assert corpus.tokens.tobytes() == b"aaa\0bbbb\0cc\0"


def test_a_glob_selects_its_matches(texts: Path, tmp_path: Path) -> None:
    corpus = open_corpus(DataSpec(source=f"{texts}/**/[bc].txt"), tmp_path / "cache", 2)
    assert corpus.tokens.tobytes() == b"bbbb\0cc\0"


def test_the_standard_library_source_excludes_its_tests() -> None:
    names = [name for name, _ in source_files("python-stdlib")]
    assert "json/decoder.py" in names
    assert not any("site-packages" in name or "/test/" in name for name in names)


def test_samples_are_windows_that_share_one_token(texts: Path, tmp_path: Path) -> None:
    corpus = open_corpus(DataSpec(source=str(texts)), tmp_path / "cache", 4)
    assert corpus.samples(4) == 2
    batch = corpus.batch(np.array([1, 0]), 4)
    assert batch.astype(np.uint8).tobytes() == b"bbbb\0" + b"aaa\0b"


def test_a_second_opening_builds_nothing(texts: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = open_corpus(DataSpec(source=str(texts)), cache, 2)
    before = {path: path.stat().st_mtime_ns for path in cache.glob("tokens-*")}
    second = open_corpus(DataSpec(source=str(texts)), cache, 2)
    assert second.fingerprint == first.fingerprint
    assert {path: path.stat().st_mtime_ns for path in cache.glob("tokens-*")} == before


def test_a_corpus_is_identified_by_its_text_not_its_location(texts: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = open_corpus(DataSpec(source=str(texts)), cache, 2).fingerprint
    (texts / "a.txt").write_bytes(b"xyz!")
    assert open_corpus(DataSpec(source=str(texts)), cache, 2).fingerprint != first
    (texts / "a.txt").write_bytes(b"aaa")
    texts.rename(tmp_path / "moved")
    moved = DataSpec(source=str(tmp_path / "moved"))
    assert open_corpus(moved, tmp_path / "other", 2).fingerprint == first


def test_a_lost_or_truncated_token_file_is_rebuilt(texts: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    whole = open_corpus(DataSpec(source=str(texts)), cache, 2).tokens.tobytes()
    (tokens,) = cache.glob("tokens-*")
    os.truncate(tokens, 3)
    assert open_corpus(DataSpec(source=str(texts)), cache, 2).tokens.tobytes() == whole
    tokens.unlink()
    assert open_corpus(DataSpec(source=str(texts)), cache, 2).tokens.tobytes() == whole


def test_concurrent_openings_leave_no_temporary_file(texts: Path, tmp_path: Path) -> None:
    cache, data = tmp_path / "cache", DataSpec(source=str(texts))
    with ThreadPoolExecutor(8) as pool:
        fingerprints = list(pool.map(lambda _: open_corpus(data, cache, 2).fingerprint, range(8)))
    assert len(set(fingerprints)) == 1
    assert not list(cache.glob("*.part"))


def test_missing_and_too_short_text_is_refused(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="matches no file"):
        open_corpus(DataSpec(source=str(tmp_path / "nowhere*")), tmp_path / "cache", 2)
    with pytest.raises(CorpusError, match="one sample needs 101"):
        open_corpus(DataSpec(source=str(texts)), tmp_path / "cache", 100)
