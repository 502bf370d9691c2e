"""The identity of an installation: a database with the servers that use it.

Its id is part of every name on a Ray cluster, so that servers with another database neither adopt
nor end its jobs. A copy of the database has the same id: it must not be used on the same cluster.

Its key is a file (`Settings.job_key_file`), from which every job's secret is derived. The database
has the key's fingerprint only: all servers of an installation must have the same key, or they could
not take over each other's jobs.
"""

from __future__ import annotations

import errno
import hashlib
import secrets
from pathlib import Path
from uuid import uuid4

from sqlalchemy import Dialect, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.store.models import Installation
from holdfast_workers.private_files import PrivateFileRefused, create_private, read_private

ID_DIGITS = 12
KEY_BYTES = 32
_NOT_OURS = (errno.EPERM, errno.EACCES, errno.EROFS)
"""Errors of a mode that cannot be changed: another user's file, or a read-only mount."""


class WrongKey(Exception):
    """The key of this server is not the installation's, or not secret; the message says what to
    do."""


async def ensure_id(session: AsyncSession, dialect: Dialect) -> str:
    """The installation's id, chosen at the database's first use."""
    insert = (postgresql.insert if dialect.name == "postgresql" else sqlite.insert)(Installation)
    first = insert.values(one=1, id=uuid4().hex[:ID_DIGITS])
    await session.execute(first.on_conflict_do_nothing())
    return str((await session.scalars(select(Installation.id))).one())


async def check_key(session: AsyncSession, key: bytes, path: Path) -> None:
    """Raises WrongKey unless `key`, read from `path`, is the installation's. The first server's key
    becomes the installation's."""
    fingerprint = fingerprint_of(key)
    first = update(Installation).where(Installation.key_fingerprint.is_(None))
    await session.execute(first.values(key_fingerprint=fingerprint))
    if await session.scalar(select(Installation.key_fingerprint)) != fingerprint:
        raise WrongKey(
            f"{path} is not the key of the installation that this database belongs to: copy the "
            f"file from another server of it. If that key is lost and no job runs: "
            "UPDATE installation SET key_fingerprint = NULL"
        )


def fingerprint_of(key: bytes) -> str:
    return hashlib.sha256(b"holdfast job-secrets.key" + key).hexdigest()


def load_or_create_key(path: Path) -> bytes:
    """The key in `path`, created if missing, and made readable by its owner only where that is
    possible. Raises WrongKey, also if others can read it (`private_files`)."""
    create_private(path, secrets.token_bytes(KEY_BYTES))
    try:
        path.chmod(0o600)
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise
    try:
        key = read_private(path)
    except PrivateFileRefused as error:
        raise WrongKey(str(error)) from error
    if len(key) != KEY_BYTES:
        raise WrongKey(f"{path} does not hold a key of {KEY_BYTES} bytes: remove it")
    return key
