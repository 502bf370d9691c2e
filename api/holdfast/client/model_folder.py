"""Unpacks the exported folder of a model, which appears whole or not at all.

The tar file is the server's, and still it decides nothing here: it has plain files with plain
names, side by side, and not a byte beside them. Anything else is refused.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tarfile
from pathlib import Path

from holdfast.client.http_answers import partial_file
from holdfast.errors import HoldfastError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PIECE = 1 << 20
_LAST = "config.json"
"""Without it, no program takes a folder for a model."""


class ExportDamaged(HoldfastError, code="export_damaged"):
    """The file of an export is not a folder of a model, as it should be."""


def folder_at(target: Path) -> Path:
    """`target` as an absolute path. Raises OSError if it is anything but an empty folder."""
    target = target.resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(errno.EEXIST, "it exists and is no empty folder: name a new one")
    return target


def packed_file(folder: Path) -> Path:
    """The path of the tar file while the folder is made: inside of it if it is there, as it may be
    the root of a disk."""
    name = f".{folder.name}.{os.getpid()}.tar"
    return folder / name if folder.exists() else folder.with_name(name)


def unpack(packed: Path, folder: Path) -> None:
    """A folder that is there stays the same one. It gets all files if it gets config.json, the
    last. Raises ExportDamaged; OSError if `folder` cannot be written, or has more than `packed`."""
    is_there = folder.exists()
    partial = partial_file(folder / folder.name if is_there else folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _unpack_into(partial, packed)
        if is_there:
            _move_out(partial, folder, {partial, packed})
        else:
            partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _move_out(partial: Path, folder: Path, own: set[Path]) -> None:
    """Move the files of `partial` to `folder`, whose only entries are `own`."""
    if set(folder.iterdir()) - own:
        raise OSError(errno.ENOTEMPTY, "it is not empty: name a new folder")
    moved: list[Path] = []
    try:
        for path in sorted(partial.iterdir(), key=lambda path: path.name == _LAST):
            moved.append(folder / path.name)
            path.rename(moved[-1])
        partial.rmdir()
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True)
        raise


def _unpack_into(folder: Path, packed: Path) -> None:
    end, names = 0, set[str]()
    try:
        with tarfile.open(packed, "r:") as tar:
            for member in tar:
                if member.type != tarfile.REGTYPE or not _NAME.fullmatch(member.name):
                    raise ExportDamaged(f"it has {member.name!r}, which is no plain file")
                if member.name in names or member.offset != end:
                    raise ExportDamaged(f"it has more than the file {member.name}")
                names.add(member.name)
                content = tar.extractfile(member)
                assert content is not None
                with content, (folder / member.name).open("xb") as file:
                    shutil.copyfileobj(content, file, _PIECE)
                end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    except (tarfile.TarError, ValueError) as error:  # of a number that no file has, too
        raise ExportDamaged(f"it is no tar file, or is cut off ({error})") from error
    if not names or packed.stat().st_size != end + 2 * tarfile.BLOCKSIZE:
        raise ExportDamaged("it is cut off, or has more than its files")
