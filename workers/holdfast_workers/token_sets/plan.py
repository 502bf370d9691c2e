"""The plan of a preparation: its parts, each made by one task, and the key of its token set.

The shards depend on the plan alone, whatever tasks carry it out. Pure, apart from the footers of
Parquet files on this node.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from holdfast_workers.data.token_set import FORMAT, TokenizerFacts, shard_digest
from holdfast_workers.spec.train import DataSpec, SourceSpec
from holdfast_workers.token_sets.file_kinds import Compression, FileForm, FileKind, form_of
from holdfast_workers.token_sets.refusals import DataRefused
from holdfast_workers.token_sets.source_files import SCHEME, SourceFile
from holdfast_workers.token_sets.table_records import row_group_sizes

PART_BYTES = 64_000_000
MOST_PIECES = 1000
SHARD_BYTES = 32_000_000
"""A shard closes before its tokens and the ends of its documents exceed this; a longer document has
a shard of its own."""


@dataclass(frozen=True)
class Piece:
    """A file, or a range of one."""

    file: SourceFile
    nbytes: int
    """Share of the file's bytes; those of all pieces add up to the file's."""
    start: int = 0
    stop: int | None = None
    """Bytes of lines, row groups of Parquet; the whole file with None. A line belongs to the range
    in which it begins."""

    @property
    def form(self) -> FileForm:
        form = form_of(self.file.name)
        assert form is not None  # `list_source` refuses other files
        return form


@dataclass(frozen=True)
class Part:
    """What one task makes shards of."""

    index: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class PreparePlan:
    """What a token set is made of, and how."""

    key: str
    """Names the set's folder: another one for each change of files, tokenizer or settings."""
    source: SourceSpec
    tokenizer: TokenizerFacts
    bad_records: float
    """Greatest share of the records that may be unusable. What was made stands with another."""
    files: int
    source_bytes: int
    parts: tuple[Part, ...]
    held_out_share: float = 0.0
    """Share of the documents that is kept from training."""

    @property
    def text(self) -> str:
        """The column with the text; "" if all files are text."""
        pieces = (piece for part in self.parts for piece in part.pieces)
        tables = any(piece.form.kind is not FileKind.TEXT for piece in pieces)
        return self.source.text if tables else ""


def plan_parts(
    source: SourceSpec,
    files: Sequence[SourceFile],
    tokenizer: TokenizerFacts,
    data: DataSpec,
    part_bytes: int = PART_BYTES,
) -> PreparePlan:
    """Divide the files into parts of about `part_bytes`, in order.

    Small files share a part. JSON lines and Parquet on this node are divided; compressed files,
    Arrow files and objects of a bucket are not. Raises DataRefused.
    """
    if not files:
        raise DataRefused("it has no files: check the path")
    pieces = (piece for file in files for piece in _pieces(file, part_bytes))
    parts = tuple(
        Part(index, tuple(group)) for index, group in enumerate(_groups(pieces, part_bytes))
    )
    return PreparePlan(
        key=_key(source, files, tokenizer, data, part_bytes),
        source=source,
        tokenizer=tokenizer,
        bad_records=data.bad_records,
        files=len(files),
        source_bytes=sum(file.nbytes for file in files),
        parts=parts,
        held_out_share=data.held_out_share,
    )


def _pieces(file: SourceFile, part_bytes: int) -> Iterator[Piece]:
    whole = Piece(file, file.nbytes)
    form = whole.form
    if file.nbytes <= part_bytes or file.name.startswith(SCHEME):
        yield whole
    elif form == (FileKind.LINES, Compression.NONE):
        for start in range(0, file.nbytes, part_bytes):
            stop = min(start + part_bytes, file.nbytes)
            yield Piece(file, stop - start, start, stop)
    elif form.kind is FileKind.PARQUET:
        yield from _row_groups(file, part_bytes)
    else:
        yield whole


def _row_groups(file: SourceFile, part_bytes: int) -> Iterator[Piece]:
    sizes = row_group_sizes(file.name)
    total = max(sum(sizes), 1)
    ends = [file.nbytes * passed // total for passed in accumulate(sizes)]
    start = begun = 0
    for number in range(1, len(ends)):
        if ends[number] - begun > part_bytes:
            yield Piece(file, ends[number - 1] - begun, start, number)
            start, begun = number, ends[number - 1]
    yield Piece(file, file.nbytes - begun, start, len(sizes))


def _groups(pieces: Iterable[Piece], part_bytes: int) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and (size + piece.nbytes > part_bytes or len(group) == MOST_PIECES):
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.nbytes
    yield group


def _key(
    source: SourceSpec,
    files: Sequence[SourceFile],
    tokenizer: TokenizerFacts,
    data: DataSpec,
    part_bytes: int,
) -> str:
    origin: dict[str, Any] = {
        "format": FORMAT,
        "tokenizer": {**asdict(tokenizer), "name": ""},
        "text": source.text,
        "part_bytes": part_bytes,
        "shard_bytes": SHARD_BYTES,
        "files": [asdict(file) for file in files],
    }
    if data.held_out_share:
        origin["held_out_share"] = data.held_out_share
    return shard_digest(json.dumps(origin, sort_keys=True).encode())
