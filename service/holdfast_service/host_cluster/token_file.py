"""The file with the cluster's token. The token lets its holder run any code on every machine."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from holdfast_service.host_cluster.errors import HostClusterError
from holdfast_workers.private_files import PrivateFileRefused, read_private, write_private


def read_token(path: Path) -> str:
    """The token. Raises HostClusterError, also if other users can read the file
    (`private_files`)."""
    try:
        token = read_private(path).decode().strip()
    except PrivateFileRefused as error:
        raise HostClusterError(f"the token file {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise HostClusterError(
            f"cannot read the token file {path}: {error}; copy the file that `holdfast cluster up` "
            "named on the head"
        ) from error
    if not token or len(token.split()) != 1:
        raise HostClusterError(
            f"the token file {path} has no token in it: copy the file from the head again"
        )
    return token


def read_or_make_token(path: Path) -> str:
    """The token of an earlier start of this head, or a new one in a file of mode 0600."""
    if path.exists():
        return read_token(path)
    token = secrets.token_hex(32)
    write_private(path, token)
    return token


@contextlib.contextmanager
def keeping_token(path: Path, token: str) -> Iterator[None]:
    """Keep a copy for the node's processes: the file that the user named may go. If the block,
    which starts the node, fails, the former token is kept instead."""
    former = path.read_text() if path.exists() else token
    write_private(path, token)
    try:
        yield
    except BaseException:
        write_private(path, former)
        raise
