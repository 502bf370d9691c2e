"""Builds one flat token file from text files, once per node, and maps it into memory.

A corpus is named by the fingerprint of its content: two nodes train on the same data exactly if
their fingerprints are equal, and a changed source creates a new corpus beside the old one. A build
is atomic (temporary file, then rename) and done by one process per node; other processes wait.
Files are joined in the order of their relative paths, with one NUL byte between them.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast_workers.spec import VOCABULARIES, DataSpec

BYTE_VOCABULARY = VOCABULARIES["bytes"]
_STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
_FORMAT = "1"


class CorpusError(Exception):
    """The source has no readable text, or its text is too short to train on."""


@dataclass(frozen=True)
class Corpus:
    """Tokens on disk, mapped read-only."""

    tokens: NDArray[np.uint8]
    fingerprint: str
    vocabulary: int = BYTE_VOCABULARY

    def samples(self, sequence_length: int) -> int:
        """The number of samples of `sequence_length` + 1 tokens (neighbours share one token)."""
        return (len(self.tokens) - 1) // sequence_length

    def batch(self, samples: NDArray[np.int64], sequence_length: int) -> NDArray[np.int64]:
        """Tokens (len(samples), sequence_length + 1) of the given samples."""
        span = np.arange(sequence_length + 1, dtype=np.int64)
        taken: NDArray[np.uint8] = self.tokens[samples[:, None] * sequence_length + span]
        return taken.astype(np.int64)


def open_corpus(data: DataSpec, cache_dir: Path, sequence_length: int) -> Corpus:
    """The corpus of `data`, built below `cache_dir` if it does not exist yet.

    Raises CorpusError if the source has no text or too little text for one sample.
    """
    files = source_files(data.source)
    cache_dir.mkdir(parents=True, exist_ok=True)
    index = cache_dir / f"source-{_source_key(data, files)}.json"
    with _build_lock(cache_dir):
        fingerprint = _cached_fingerprint(index, cache_dir) or _build(files, cache_dir, index)
    tokens = np.memmap(_tokens_path(cache_dir, fingerprint), dtype=np.uint8, mode="r")
    corpus = Corpus(tokens=tokens, fingerprint=fingerprint)
    if corpus.samples(sequence_length) < 1:
        raise CorpusError(
            f"data.source {data.source!r} has {len(tokens)} tokens; "
            f"one sample needs {sequence_length + 1}"
        )
    return corpus


def source_files(source: str) -> list[tuple[str, Path]]:
    """(name, path) of every file of a source, in the order in which the files are joined."""
    if source == "python-stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [(n, p) for n, p in _files_under(root, _STDLIB_SKIPPED) if n.endswith(".py")]
    elif Path(source).is_dir():
        files = list(_files_under(Path(source), frozenset()))
    else:
        paths = (Path(match) for match in glob.glob(source, recursive=True))  # noqa: PTH207
        files = [(path.as_posix(), path) for path in paths if path.is_file()]
    if not files:
        raise CorpusError(f"data.source {source!r} matches no file on this node")
    return sorted(files)


def _files_under(root: Path, skipped: frozenset[str]) -> Iterator[tuple[str, Path]]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        for name in names:
            path = Path(folder, name)
            yield path.relative_to(root).as_posix(), path


def _source_key(data: DataSpec, files: list[tuple[str, Path]]) -> str:
    """A key that changes whenever a file's name, size or modification time changes."""
    key = xxhash.xxh3_128(f"{_FORMAT}/{data.tokenizer}".encode())
    for name, path in files:
        status = path.stat()
        key.update(f"\0{name}\0{path}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return str(key.hexdigest())


def _cached_fingerprint(index: Path, cache_dir: Path) -> str | None:
    try:
        entry = json.loads(index.read_text())
        nbytes = _tokens_path(cache_dir, entry["fingerprint"]).stat().st_size
    except (OSError, ValueError, KeyError):  # not built yet, or deleted: build it
        return None
    return str(entry["fingerprint"]) if nbytes == entry["bytes"] else None


def _build(files: list[tuple[str, Path]], cache_dir: Path, index: Path) -> str:
    digest = xxhash.xxh3_128()
    nbytes = 0
    part = cache_dir / f"building-{os.getpid()}.part"
    try:
        with part.open("wb") as out:
            for _, path in files:
                text = path.read_bytes() + b"\0"
                digest.update(text)
                nbytes += out.write(text)
            out.flush()
            os.fsync(out.fileno())
        fingerprint = str(digest.hexdigest())
        part.replace(_tokens_path(cache_dir, fingerprint))
    finally:
        part.unlink(missing_ok=True)
    entry = index.with_suffix(f".{os.getpid()}.part")
    entry.write_text(json.dumps({"fingerprint": fingerprint, "bytes": nbytes}))
    entry.replace(index)
    return fingerprint


@contextmanager
def _build_lock(cache_dir: Path) -> Iterator[None]:
    """Admits one builder per cache folder; the kernel releases the lock if the process dies."""
    with (cache_dir / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _tokens_path(cache_dir: Path, fingerprint: str) -> Path:
    return cache_dir / f"tokens-{fingerprint}.bin"
