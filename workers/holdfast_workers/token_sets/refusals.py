"""Errors of a user's data, and the libraries that read it.

Each message says what is wrong, where (file, then row, column or key), and what to do.
"""

from __future__ import annotations

import errno
import importlib
import os
from types import ModuleType

from holdfast_workers.checkpoint.storage import TransientStorageError
from holdfast_workers.errors import WorkersError

_USERS = frozenset(
    {
        *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP),
        errno.ENAMETOOLONG,
    }
)
"""Errors of which the user is the cause, by a path or its permissions."""


class DataRefused(WorkersError):
    """The data, its tokenizer or their settings cannot be used; a retry does not help."""


class SourceChanged(DataRefused):
    """A file is not the one that was listed when the preparation began."""


class LibraryMissing(DataRefused):
    """A node lacks a library that reads data, or has another version of it."""


def library(name: str) -> ModuleType:
    """A module of the extra `data`, loaded late: ranks and servers need none. Raises
    LibraryMissing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        root = name.partition(".")[0]
        raise LibraryMissing(
            f"this node has no {root} ({error}): pip install 'holdfast-train[data]' on each node"
        ) from error


def unreadable(what: str, error: OSError) -> WorkersError:
    """The error of a path on this node that cannot be read: a DataRefused, or with a fault of the
    file system, which may pass, a TransientStorageError."""
    if error.errno not in _USERS:
        return TransientStorageError(what, error.strerror or str(error))
    return DataRefused(
        f"{what}: {error.strerror}: the nodes must be able to read it, as user {os.getuid()}"
    )


def shortened(error: BaseException, most: int = 200) -> str:
    """The first line of a library's message."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return line if len(line) <= most else line[: most - 1] + "…"
