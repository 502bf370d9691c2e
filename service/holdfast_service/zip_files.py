"""Reading zip files that others have made: what a damaged one raises, and its members in pieces."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator

UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, LookupError),
    *(ValueError, NotImplementedError, RuntimeError, OSError),
)
"""Errors of reading a damaged or foreign archive; `RuntimeError` is that of an encrypted member."""
PIECE_BYTES = 1 << 20


def pieces(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Iterator[bytes]:
    """The content of a member, never much of it in memory. Raises UNREADABLE, at the end if the
    content differs from its checksum."""
    with archive.open(entry) as member:
        while piece := member.read(PIECE_BYTES):
            yield piece
