"""Documents of text, and records that are none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

MOST_DOCUMENT_BYTES = 16_000_000
"""Longest record, since its encoding takes 100 to 220 times as much memory; a longer one is a fault
of its file."""
BATCH_BYTES = 1 << 20
"""Text that is read before it is turned into tokens, unless one record is longer."""


class Document(NamedTuple):
    row: int
    text: str


class Unusable(NamedTuple):
    """A record that is left out."""

    row: int
    why: str


@dataclass
class RecordBatch:
    """Some consecutive records of a piece. Only this room changes it."""

    documents: list[Document] = field(default_factory=list)
    unusable: list[Unusable] = field(default_factory=list)

    def add(self, row: int, value: object, *, nul_ends: bool) -> None:
        """Take a record by the value of its text; `nul_ends`: a NUL is a document's end."""
        fault = _fault_of(value, nul_ends)
        if fault is None:
            assert isinstance(value, str)
            self.documents.append(Document(row, value))
        else:
            self.unusable.append(Unusable(row, fault))

    def add_bytes(self, row: int, value: bytes, *, nul_ends: bool) -> None:
        try:
            self.add(row, value.decode(), nul_ends=nul_ends)
        except UnicodeDecodeError as error:
            self.unusable.append(Unusable(row, not_utf8(error)))


def is_too_long(text: str) -> bool:
    """Whether it has over MOST_DOCUMENT_BYTES."""
    most = MOST_DOCUMENT_BYTES
    return len(text) > most or (len(text) > most // 4 and len(text.encode()) > most)


def not_utf8(error: UnicodeDecodeError) -> str:
    return f"its byte {error.start + 1:,} is not UTF-8: write the file in UTF-8"


def _fault_of(value: object, nul_ends: bool) -> str | None:
    if value is None:
        return "its text is null"
    if not isinstance(value, str):
        return f"its text is no string but {_kind(value)}"
    if not value:
        return "its text is empty"
    if nul_ends and "\0" in value:
        return "its text has a NUL byte, which ends documents with the tokenizer `bytes`"
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return "its text has half of a surrogate pair, which is no character"
    return None


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", bool: "a truth value"}
    return kinds.get(type(value), "a number")
