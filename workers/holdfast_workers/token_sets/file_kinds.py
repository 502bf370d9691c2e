"""The kind of a source's file: told by its suffix, and checked by its first bytes."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from holdfast_workers.token_sets.refusals import DataRefused

HEAD_BYTES = 8
TEXT_SUFFIXES = frozenset(
    {
        *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".html", ".htm"),
        *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".java", ".kt"),
        *(".js", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".sh", ".sql", ".scala"),
        *(".swift", ".lua", ".pl", ".jl", ".hs", ".ml", ".css", ".yaml", ".yml", ".toml"),
    }
)
KNOWN = "text (.txt, .md, .py, ...), JSON lines (.jsonl, also .gz or .zst), Parquet or Arrow"


class FileKind(Enum):
    """Forms of files; the value is the word of messages."""

    TEXT = "text"
    LINES = "JSON lines"
    PARQUET = "Parquet"
    ARROW = "Arrow"


class Compression(Enum):
    """The value is the name that Arrow has for it."""

    NONE = ""
    GZIP = "gzip"
    ZSTD = "zstd"


class FileForm(NamedTuple):
    kind: FileKind
    compression: Compression


_KINDS = {
    **dict.fromkeys(TEXT_SUFFIXES, FileKind.TEXT),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), FileKind.LINES),
    **dict.fromkeys((".parquet", ".pq"), FileKind.PARQUET),
    **dict.fromkeys((".arrow", ".feather"), FileKind.ARROW),
}
_COMPRESSIONS = {".gz": Compression.GZIP, ".zst": Compression.ZSTD, ".zstd": Compression.ZSTD}
_ENCRYPTED_PARQUET = b"PARE"
_MAGIC = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    *((bytes([first]) + b"\x2a\x4d\x18", "zstd") for first in range(0x50, 0x60)),  # as of pzstd
    (b"PAR1", "Parquet"),
    (b"ARROW1", "Arrow"),
    (b"\xff\xff\xff\xff", "Arrow"),
    (b"PK\x03\x04", "zip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x89HDF", "HDF5"),
)


def form_of(name: str) -> FileForm | None:
    """The form that a file's name stands for; None: an unknown one."""
    stem, suffix = _split(name)
    compression = _COMPRESSIONS.get(suffix, Compression.NONE)
    if compression is not Compression.NONE:
        suffix = _split(stem)[1]
    kind = _KINDS.get(suffix)
    if kind is None or (compression is not Compression.NONE and kind in _TABLES):
        return None
    return FileForm(kind, compression)


def check_head(name: str, form: FileForm, head: bytes) -> None:
    """Raises DataRefused if the first bytes (up to HEAD_BYTES) are of another form."""
    if not head and form.compression is Compression.NONE and form.kind not in _TABLES:
        return
    expected = form.compression.value or (form.kind.value if form.kind in _TABLES else None)
    seen = next((word for magic, word in _MAGIC if head.startswith(magic)), None)
    if seen == expected:
        return
    if head.startswith(_ENCRYPTED_PARQUET):
        raise DataRefused(f"{name} is encrypted Parquet: write it without encryption")
    if not head:
        raise DataRefused(f"{name} is empty, no {expected} file: write it again, or remove it")
    if seen is None:
        raise DataRefused(
            f"{name} is no {expected} file: it begins with {head[:4]!r}: write it again, or give "
            "it the suffix of its kind"
        )
    named = expected or form.kind.value
    raise DataRefused(
        f"{name} is {named} by its name and {seen} by its content: give it the suffix of its "
        f"content; {KNOWN} can be read"
    )


_TABLES = (FileKind.PARQUET, FileKind.ARROW)


def _split(name: str) -> tuple[str, str]:
    """The name without its last suffix, and the suffix in lower case; "" without one."""
    base = name.rpartition("/")[2]
    stem, dot, suffix = base.rpartition(".")
    return (stem, f".{suffix.lower()}") if dot and stem else (base, "")
