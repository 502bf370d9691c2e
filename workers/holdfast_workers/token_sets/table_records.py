"""Records of Parquet and Arrow files: one column of strings, read in batches.

Memory: of Parquet, a page of the column and a batch of rows; of Arrow, one of the file's batches.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast_workers.checkpoint.storage import TransientStorageError
from holdfast_workers.token_sets import documents
from holdfast_workers.token_sets.documents import BATCH_BYTES, RecordBatch, is_too_long
from holdfast_workers.token_sets.file_kinds import FileKind
from holdfast_workers.token_sets.refusals import DataRefused, library, shortened

_MOST_ROWS = 1024
_MOST_COLUMNS = 20
_BUFFER_BYTES = 1 << 20
_END_OF_STREAM = bytes.fromhex("ffffffff00000000")
_FILE_MAGIC = b"ARROW1"


def row_group_sizes(name: str) -> list[int]:
    """Bytes of each row group of a Parquet file on this node. Raises DataRefused."""
    with _broken_file(name, FileKind.PARQUET), _parquet(Path(name)) as parquet:
        metadata = parquet.metadata
        groups = range(metadata.num_row_groups)
        return [metadata.row_group(group).total_byte_size for group in groups]


def parquet_records(
    name: str, path: Path, column: str, start: int, stop: int | None, *, nul_ends: bool
) -> Iterator[tuple[RecordBatch, float]]:
    """Records of the row groups from `start` to before `stop`, and the share that is done."""
    with _broken_file(name, FileKind.PARQUET), _parquet(path) as parquet:
        _check_column(name, parquet.schema_arrow, column)
        metadata = parquet.metadata
        last = metadata.num_row_groups if stop is None else stop
        row = 1 + sum(metadata.row_group(group).num_rows for group in range(start))
        rows = sum(metadata.row_group(group).num_rows for group in range(start, last))
        _try_first_row(parquet, column, start, last)
        _check_counts(name, metadata, _place_of(metadata, column))
        batches = parquet.iter_batches(
            batch_size=_rows_of_batch(parquet, column, start, last),
            row_groups=list(range(start, last)),
            columns=[column],
            use_threads=False,
        )
        done = 0
        for batch in batches:
            done += batch.num_rows
            yield _records(name, batch.column(0), row, nul_ends), done / rows
            row += batch.num_rows
        if done != rows:  # the reader takes the end of a file for the end of a column
            raise DataRefused(
                f"{name} is damaged or cut off: it has {done:,} of {rows:,} rows from row "
                f"{row - done:,} on: copy or write it again"
            )


def arrow_records(
    name: str, path: Path, column: str, *, nul_ends: bool
) -> Iterator[tuple[RecordBatch, float]]:
    """Records of a file in Arrow's stream or file format, and the share that is done."""
    arrow = library("pyarrow")
    with _broken_file(name, FileKind.ARROW), arrow.OSFile(str(path)) as stream:
        size = path.stat().st_size
        row = 1
        for batch in _arrow_batches(name, path, stream, column):
            step = _rows_of(batch.nbytes, batch.num_rows)
            for start in range(0, batch.num_rows, step):
                values = batch.column(0).slice(start, step)
                yield _records(name, values, row, nul_ends), stream.tell() / size
                row += len(values)


def _arrow_batches(name: str, path: Path, stream: Any, column: str) -> Iterator[Any]:
    ipc = library("pyarrow.ipc")
    with path.open("rb") as raw:
        magic = raw.read(len(_FILE_MAGIC))
        raw.seek(-min(len(_END_OF_STREAM), path.stat().st_size), os.SEEK_END)
        end = raw.read()
    if magic == _FILE_MAGIC:
        reader = ipc.open_file(stream)
        at = _check_column(name, reader.schema, column)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number).select([at])
        return
    if end != _END_OF_STREAM:  # the reader takes a stream that was cut off for a complete one
        raise DataRefused(f"{name} is cut off: it lacks its end: copy it again")
    reader = ipc.open_stream(stream)
    at = _check_column(name, reader.schema, column)
    for batch in reader:
        yield batch.select([at])
    if stream.tell() != path.stat().st_size:
        raise DataRefused(
            f"{name} goes on after its end at byte {stream.tell():,}: it is damaged, or several "
            "files were joined: copy or write it again"
        )


def _records(name: str, values: Any, row: int, nul_ends: bool) -> RecordBatch:
    """Arrow checks nothing of a file's offsets by itself: a damaged one would be read from memory
    that is not its own."""
    arrow = library("pyarrow")
    batch = RecordBatch()
    if arrow.types.is_dictionary(values.type):
        values.indices.validate(full=True)
        values = _as_bytes(values.dictionary).take(values.indices).view(arrow.large_string())
    try:
        values.validate(full=True)
    except arrow.ArrowInvalid:
        return _of_bytes(name, values, row, nul_ends)
    for number, text in enumerate(values.to_pylist()):
        if text is not None and is_too_long(text):
            raise _too_long(name, row + number)
        batch.add(row + number, text, nul_ends=nul_ends)
    return batch


def _of_bytes(name: str, values: Any, row: int, nul_ends: bool) -> RecordBatch:
    """Records of which some are not UTF-8. Raises ArrowInvalid if that is not all."""
    batch = RecordBatch()
    for number, text in enumerate(_as_bytes(values).to_pylist()):
        if text is None:
            batch.add(row + number, None, nul_ends=nul_ends)
        elif len(text) > documents.MOST_DOCUMENT_BYTES:
            raise _too_long(name, row + number)
        else:
            batch.add_bytes(row + number, text, nul_ends=nul_ends)
    return batch


def _as_bytes(values: Any) -> Any:
    """Strings, UTF-8 or not, as binary. Raises ArrowInvalid if their offsets are damaged."""
    arrow = library("pyarrow")
    if arrow.types.is_string(values.type):
        content = values.view(arrow.binary())
    elif arrow.types.is_large_string(values.type):
        content = values.view(arrow.large_binary())
    else:
        content = values.view(arrow.binary_view())
    content.validate(full=True)
    return content.cast(arrow.large_binary())


def _too_long(name: str, row: int) -> DataRefused:
    return DataRefused(
        f"{name}, row {row:,}: its text has over {documents.MOST_DOCUMENT_BYTES:,} bytes: divide it"
    )


def _try_first_row(parquet: Any, column: str, start: int, stop: int) -> None:
    """Of an encrypted column, this raises ArrowException; a question for its size would end the
    process."""
    groups = list(range(start, stop))[:1]
    next(parquet.iter_batches(1, groups, [column], use_threads=False), None)


def _check_counts(name: str, metadata: Any, at: int) -> None:
    """Raises DataRefused if the counts of a file's rows differ: the reader believes the count of a
    row group, however many values of the column it has."""
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    rows, values = [g.num_rows for g in groups], [g.column(at).num_values for g in groups]
    if rows != values or sum(rows) != metadata.num_rows:
        raise DataRefused(
            f"{name} is damaged: its end says that it has {metadata.num_rows:,} rows, "
            f"{sum(rows):,} in row groups, and {sum(values):,} of the column: copy or write it "
            "again"
        )


def _place_of(metadata: Any, column: str) -> int:
    """Among the columns without inner ones."""
    columns = range(metadata.num_columns)
    return [metadata.schema.column(leaf).path for leaf in columns].index(column)


def _rows_of_batch(parquet: Any, column: str, start: int, stop: int) -> int:
    """Rows whose text is about BATCH_BYTES long."""
    at = _place_of(parquet.metadata, column)
    groups = [parquet.metadata.row_group(group) for group in range(start, stop)]
    nbytes: int = sum(group.column(at).total_uncompressed_size for group in groups)
    rows: int = sum(group.num_rows for group in groups)
    return _rows_of(nbytes, rows)


def _rows_of(nbytes: int, rows: int) -> int:
    return max(1, min(_MOST_ROWS, BATCH_BYTES * rows // max(nbytes, 1)))


def _check_column(name: str, schema: Any, column: str) -> int:
    """The column's index. Raises DataRefused unless it is one of strings."""
    arrow = library("pyarrow")
    names: list[str] = list(schema.names)
    if names.count(column) > 1:
        raise DataRefused(f"{name} has several columns {column!r}: write it with one of each name")
    if column not in names:
        near = difflib.get_close_matches(column, names, 1, 0.5)
        advice = f"did you mean {near[0]!r}? " if near else ""
        shown = ", ".join(map(repr, names[:_MOST_COLUMNS])) or "none"
        more = ", ..." if len(names) > _MOST_COLUMNS else ""
        raise DataRefused(
            f"{name} has no column {column!r}; its columns: {shown}{more}: {advice}set `text` of "
            "the source to the column with the documents"
        )
    kind = schema.field(column).type
    value = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if arrow.types.is_nested(value):
        raise DataRefused(
            f"{name}: the column {column!r} is nested ({_of(kind)}): set `text` of the source to a "
            "column of strings, or write such a column"
        )
    checks = ("is_string", "is_large_string", "is_string_view")
    if not any(getattr(arrow.types, check, _never)(value) for check in checks):
        raise DataRefused(
            f"{name}: the column {column!r} has the type {_of(kind)}, not string: set `text` of "
            "the source to a column of strings, or write such a column"
        )
    return names.index(column)


def _never(_kind: Any) -> bool:
    return False


def _of(kind: Any) -> str:
    text = str(kind)
    return text if len(text) < 60 else f"{text[:59]}…"


def _parquet(path: Path) -> Any:
    parquet = library("pyarrow.parquet")
    # The buffer keeps a row group's column from being read into memory at once.
    return parquet.ParquetFile(
        str(path),
        buffer_size=_BUFFER_BYTES,
        pre_buffer=False,
        page_checksum_verification=True,  # of pages that have one
    )


@contextlib.contextmanager
def _broken_file(name: str, kind: FileKind) -> Iterator[None]:
    arrow = library("pyarrow")
    try:
        yield
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:  # of a column's name
        if isinstance(error, OSError) and error.errno is not None:
            raise TransientStorageError(name, error.strerror or str(error)) from error
        encrypted = kind is FileKind.PARQUET
        raise DataRefused(
            f"{name} is damaged or cut off{', or encrypted' if encrypted else ''}: it cannot be "
            f"read as {kind.value} ({shortened(error)}): copy or write it again"
            f"{', without encryption' if encrypted else ''}"
        ) from error
