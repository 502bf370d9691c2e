"""Pure: whether a package of code can be unpacked on every node, found out before it is stored.

Every member is read to its end once: a package that is accepted fails on no node. Memory and time
are bounded by the limits below, whatever the archive says about itself.
"""

from __future__ import annotations

import hashlib
import io
import stat
import unicodedata
import zipfile
from collections.abc import Iterable
from pathlib import PurePosixPath

from holdfast_service.errors import CodeRefused
from holdfast_service.views.jobs import CodeView
from holdfast_service.zip_files import UNREADABLE, pieces

PREFIX = "sha256:"
MAX_FILES = 10_000
"""Files and folders of a package."""
MAX_UNPACKED_RATIO = 20
"""Limit of the unpacked size, as a multiple of the largest packed size."""
MAX_OWN_RATIO = 50
"""Limit of the unpacked size, as a multiple of the package's own size: code shrinks to a fifth,
repeated text to a thirtieth. It counts above `ANY_RATIO_BYTES`."""
ANY_RATIO_BYTES = 64 << 20
MAX_PATH_BYTES, MAX_NAME_BYTES = 1024, 255
"""Longest path below the folder of a node's packages, and longest name of its parts."""
_SIGNATURE = b"PK\x01\x02"
"""Begins the record of each member in the directory of an archive."""
_MAX_SIGNATURES = 10 * MAX_FILES
"""Most signatures of members in a package; some may be those of an archive within it."""
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1
_SHOWN = 100


def inspect_package(content: bytes, max_bytes: int) -> CodeView:
    """Digest, size and number of files of a package. Raises CodeRefused."""
    if len(content) > max_bytes:
        raise CodeRefused(
            f"the code has {len(content):,} bytes when packed, {max_bytes:,} are allowed: exclude "
            "what training does not need in a .holdfastignore file, and do not send data as code"
        )
    if content.count(_SIGNATURE) > _MAX_SIGNATURES:  # each would take memory to read
        raise _too_many("more than " + format(_MAX_SIGNATURES, ","))
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as package:
            entries = package.infolist()
            files = _check_names(entries)
            _check_sizes(entries, len(content), max_bytes)
            for entry in entries:
                _check_content(package, entry)
    except UNREADABLE as error:
        why = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
        raise CodeRefused(f"the code is not a readable zip file: {why}") from error
    digest = hashlib.sha256(content).hexdigest()
    return CodeView(code=PREFIX + digest, bytes=len(content), files=files)


def _check_names(entries: list[zipfile.ZipInfo]) -> int:
    """The number of files, all of which can be there at the same time."""
    if len(entries) > MAX_FILES:
        raise _too_many(format(len(entries), ","))
    files, folders = set[PurePosixPath](), set[PurePosixPath]()
    for entry in entries:
        name = entry.orig_filename  # zipfile cuts the other one at a NUL
        path = PurePosixPath(name)
        _check_path(name, path)
        if path in files:
            raise CodeRefused(f"{_shown(name)} is in the zip file twice: pack it once")
        folders.update(path.parents)
        (folders if name.endswith("/") else files).add(path)
    if not files:
        raise CodeRefused("the code is empty: the zip file has no files")
    for both in files & folders:
        raise CodeRefused(f"{_shown(str(both))} is both a file and a folder: rename one of them")
    return len(files)


def _check_path(name: str, path: PurePosixPath) -> None:
    if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
        raise CodeRefused(
            f"{_shown(name)} leads out of the code folder: use relative paths without '..'"
        )
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        raise CodeRefused(f"{_shown(name)} has a control character in its name: rename it")
    longest = max(map(_nbytes, path.parts))
    if longest > MAX_NAME_BYTES or _nbytes(name) > MAX_PATH_BYTES:
        raise CodeRefused(
            f"{_shown(name)} has too long a name: a node allows {MAX_NAME_BYTES} bytes in a name "
            f"and {MAX_PATH_BYTES:,} in a path"
        )


def _check_sizes(entries: Iterable[zipfile.ZipInfo], packed: int, max_bytes: int) -> None:
    unpacked = sum(entry.file_size for entry in entries)
    for allowed, limit in (
        (MAX_UNPACKED_RATIO * max_bytes, "are allowed"),
        (max(ANY_RATIO_BYTES, MAX_OWN_RATIO * packed), f"are allowed for {packed:,} bytes packed"),
    ):
        if unpacked > allowed:
            raise CodeRefused(
                f"the code has {unpacked:,} bytes when unpacked, {allowed:,} {limit}: exclude what "
                "training does not need in a .holdfastignore file"
            )


def _check_content(package: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Raises CodeRefused, UNREADABLE."""
    name, kind = _shown(entry.orig_filename), stat.S_IFMT(entry.external_attr >> 16)
    is_folder = entry.orig_filename.endswith("/")
    if not is_folder and kind not in (0, stat.S_IFREG):
        raise CodeRefused(f"{name} is not a regular file: exclude it, or replace it by a copy")
    if entry.flag_bits & _ENCRYPTED:
        raise CodeRefused(f"{name} is encrypted: pack it without a password")
    if entry.compress_type not in _METHODS:
        raise CodeRefused(
            f"{name} is packed by method {entry.compress_type}, which not every node can unpack: "
            "pack it by deflate, as zip does by default"
        )
    if is_folder and entry.file_size:
        raise CodeRefused(f"{name} is a folder and has content: pack its files by their own names")
    if sum(map(len, pieces(package, entry))) != entry.file_size:
        raise CodeRefused(f"{name} is shorter than the zip file says: pack the code again")


def _too_many(number: str) -> CodeRefused:
    return CodeRefused(f"the code has {number} files and folders, {MAX_FILES:,} are allowed")


def _nbytes(name: str) -> int:
    return len(name.encode("utf-8", "surrogatepass"))


def _shown(name: str) -> str:
    shown = repr(name)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}...'"
