"""The records of one piece, whatever the form of its file."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_workers.token_sets.documents import RecordBatch
from holdfast_workers.token_sets.file_kinds import FileKind
from holdfast_workers.token_sets.line_records import line_records, lines_of, text_records
from holdfast_workers.token_sets.plan import Piece
from holdfast_workers.token_sets.source_access import SourceAccess
from holdfast_workers.token_sets.table_records import arrow_records, parquet_records

_READ_BYTES = 1 << 20


class PieceRecords:
    """Reads a piece once."""

    def __init__(self, access: SourceAccess, piece: Piece, column: str, *, nul_ends: bool) -> None:
        """`nul_ends`: whether a NUL in a text is a document's end."""
        self._access = access
        self._piece = piece
        self._column = column
        self._nul_ends = nul_ends
        self._rows_before: int | None = None

    def batches(self) -> Iterator[tuple[RecordBatch, int]]:
        """The records, and how many bytes of the piece are read then. Raises DataRefused, and
        errors of the storage."""
        if self._piece.form.kind in (FileKind.PARQUET, FileKind.ARROW):
            yield from self._of_table()
        else:
            yield from self._of_stream()

    def row_in_file(self, row: int) -> int:
        """The row, from 1, of a record that has `row` in a batch. Reads the beginning of the file
        when it is first needed."""
        if self._piece.form.kind is not FileKind.LINES or not self._piece.start:
            return row
        if self._rows_before is None:
            self._rows_before = self._lines_begun_before(self._piece.start)
        return self._rows_before + row

    def _of_table(self) -> Iterator[tuple[RecordBatch, int]]:
        piece, name = self._piece, self._piece.file.name
        with self._access.on_disk(piece.file, piece.form) as path:
            if piece.form.kind is FileKind.ARROW:
                records = arrow_records(name, path, self._column, nul_ends=self._nul_ends)
            else:
                records = parquet_records(
                    name, path, self._column, piece.start, piece.stop, nul_ends=self._nul_ends
                )
            for batch, share in records:
                yield batch, int(piece.nbytes * share)

    def _of_stream(self) -> Iterator[tuple[RecordBatch, int]]:
        piece, name = self._piece, self._piece.file.name
        with self._access.opened(piece.file, piece.form, max(piece.start - 1, 0)) as packed:
            stream = packed.unpacked()
            if piece.form.kind is FileKind.TEXT:
                records = text_records(name, stream, nul_ends=self._nul_ends)
            else:
                records = line_records(
                    name,
                    lines_of(name, stream, piece.start, piece.stop),
                    self._column,
                    at_start=not piece.start,
                    nul_ends=self._nul_ends,
                )
            for batch in records:
                yield batch, min(packed.taken, piece.nbytes)

    def _lines_begun_before(self, start: int) -> int:
        """Lines of the file that begin before the byte `start`."""
        lines, left, last = 0, start, b"\n"
        with self._access.opened(self._piece.file, self._piece.form) as stream:
            while left and (content := stream.read(min(left, _READ_BYTES))):
                left -= len(content)
                lines += content.count(b"\n")
                last = content[-1:]
        return lines + (last != b"\n")
