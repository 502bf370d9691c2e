"""Builds one flat token file from text files, once per node, and maps it into memory.

A corpus is named by the fingerprint of its content: two nodes train on the same data exactly if
their fingerprints are equal, and a changed source creates a new corpus beside the old one. Files
are joined in the order of their relative paths, with one NUL byte between them.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast_workers.node_cache.cached_file import cached_file, source_key
from holdfast_workers.spec import BYTE_VOCABULARY, DataSpec

_STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
_FORMAT = "1"


class CorpusError(Exception):
    """The source of the data cannot be read, or has too little to train on."""


class DataUnavailable(CorpusError):
    """A file of the data did not come to the node in time: it may come later."""


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
    key = source_key(f"{_FORMAT}/{data.tokenizer}", files)
    texts = (path.read_bytes() + b"\0" for _, path in files)
    file = cached_file(cache_dir, "tokens", key, texts)
    tokens = np.memmap(file.path, dtype=np.uint8, mode="r")
    corpus = Corpus(tokens=tokens, fingerprint=file.fingerprint)
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
