"""Records of JSON lines, and of files of text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from holdfast_workers.token_sets import documents
from holdfast_workers.token_sets.documents import RecordBatch, Unusable, not_utf8
from holdfast_workers.token_sets.refusals import DataRefused
from holdfast_workers.token_sets.source_access import ByteStream

_READ_BYTES = 1 << 18
_BOM = b"\xef\xbb\xbf"
_MOST_KEYS = 8


def text_records(name: str, stream: ByteStream, *, nul_ends: bool) -> Iterator[RecordBatch]:
    """The whole content as one document."""
    pieces: list[bytes] = []
    size = 0
    while piece := stream.read(_READ_BYTES):
        pieces.append(piece)
        size += len(piece)
        if size > documents.MOST_DOCUMENT_BYTES:
            raise DataRefused(
                f"{name} is one document of over {documents.MOST_DOCUMENT_BYTES:,} bytes: divide "
                "it, or write its documents as JSON lines"
            )
    batch = RecordBatch()
    batch.add_bytes(1, b"".join(pieces).removeprefix(_BOM), nul_ends=nul_ends)
    yield batch


def line_records(
    name: str, lines: Iterable[bytes], key: str, *, at_start: bool, nul_ends: bool
) -> Iterator[RecordBatch]:
    """Documents of JSON lines; blank lines are none. Rows are counted from the first of `lines`;
    `at_start`: it is the file's first."""
    batch = RecordBatch()
    size = 0
    for row, line in enumerate(lines, 1):
        if row == 1 and at_start:
            line = line.removeprefix(_BOM)  # noqa: PLW2901
            _refuse_array(name, line)
        _add_line(batch, row, line, key, nul_ends)
        size += len(line)
        if size > documents.BATCH_BYTES:
            yield batch
            batch, size = RecordBatch(), 0
    yield batch


def lines_of(name: str, stream: ByteStream, start: int, stop: int | None) -> Iterator[bytes]:
    """Each line that begins in [start, stop); the stream begins one byte
    before `start` unless that is 0."""
    at = max(start - 1, 0)
    skipping = start > 0
    pieces: list[bytes] = []
    size = 0
    for piece in iter(lambda: stream.read(_READ_BYTES), b""):
        *whole, rest = piece.split(b"\n")
        for end in whole:
            line = b"".join([*pieces, end]) if pieces else end
            pieces, size = [], 0
            if not skipping:
                yield line
            skipping = False
            at += len(line) + 1
            if stop is not None and at >= stop:
                return
        if rest:
            pieces.append(rest)
            size += len(rest)
            if size > documents.MOST_DOCUMENT_BYTES:
                raise DataRefused(
                    f"{name} has a line of over {documents.MOST_DOCUMENT_BYTES:,} bytes at byte "
                    f"{at:,}: write one object per line, and divide larger documents"
                )
    if pieces and not skipping:
        yield b"".join(pieces)


def _add_line(batch: RecordBatch, row: int, line: bytes, key: str, nul_ends: bool) -> None:
    if not line.strip():
        return
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        why = not_utf8(error)
    except json.JSONDecodeError as error:
        why = f"it is no JSON: {error.msg} at character {error.colno}"
    except (ValueError, RecursionError) as error:
        why = f"it cannot be read as JSON: {error}"
    else:
        if isinstance(record, dict) and key in record:
            batch.add(row, record[key], nul_ends=nul_ends)
            return
        why = "it is no JSON object: write one object per line"
        if isinstance(record, dict):
            why = f"it has no key {key!r}, but {_some_keys(list(record))}"
    batch.unusable.append(Unusable(row, why))


def _refuse_array(name: str, line: bytes) -> None:
    if line.lstrip().startswith(b"["):
        raise DataRefused(
            f"{name} is a JSON array, not JSON lines: write one object per line, such as by "
            "jq -c '.[]'"
        )


def _some_keys(keys: list[str]) -> str:
    shown = ", ".join(repr(key) for key in keys[:_MOST_KEYS])
    return f"{shown or 'none'}{', ...' if len(keys) > _MOST_KEYS else ''}"
