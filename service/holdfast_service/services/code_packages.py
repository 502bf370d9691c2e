"""Users' code: folders packed as zip files, each identified by the digest of its bytes.

The content behind a `sha256:...` reference never changes, so a restarted agent always gets the
same code. A package is kept while a job refers to it; without a reference for a day, it is deleted.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import stat
import time
import zipfile
from pathlib import PurePosixPath

from sqlalchemy import delete, exists, select

from holdfast_service.errors import CodeRefused
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.models import CodePackage, JobRecord
from holdfast_service.views.jobs import CodeView

PREFIX = "sha256:"
MAX_FILES = 10_000
MAX_UNPACKED_RATIO = 20
"""Limit of the unpacked size, as a multiple of the largest packed size."""
UNREFERENCED_S = 86400.0
"""Time without a reference after which a package is deleted."""


def inspect_package(content: bytes, max_bytes: int) -> CodeView:
    """Digest, size and number of files of a package. Raises CodeRefused. Pure."""
    if len(content) > max_bytes:
        raise CodeRefused(
            f"the code has {len(content):,} bytes when packed, {max_bytes:,} are allowed: exclude "
            "what training does not need in a .holdfastignore file, and do not send data as code"
        )
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as package:
            files = [entry for entry in package.infolist() if not entry.is_dir()]
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise CodeRefused(f"the code is not a readable zip file: {error}") from error
    if not files:
        raise CodeRefused("the code is empty: the zip file has no files")
    if len(files) > MAX_FILES:
        raise CodeRefused(f"the code has {len(files):,} files, {MAX_FILES:,} are allowed")
    for file in files:
        path = PurePosixPath(file.filename)
        kind = stat.S_IFMT(file.external_attr >> 16)
        escapes = path.is_absolute() or ".." in path.parts
        if escapes or "\\" in file.filename or "\0" in file.filename:
            raise CodeRefused(
                f"{file.filename!r} leads out of the code folder: use relative paths without '..'"
            )
        if kind not in (0, stat.S_IFREG):
            raise CodeRefused(
                f"{file.filename!r} is not a regular file: exclude it, or replace it by a copy"
            )
    unpacked = sum(file.file_size for file in files)
    if unpacked > MAX_UNPACKED_RATIO * max_bytes:
        raise CodeRefused(
            f"the code has {unpacked:,} bytes when unpacked, {MAX_UNPACKED_RATIO * max_bytes:,} "
            "are allowed: exclude what training does not need in a .holdfastignore file"
        )
    digest = hashlib.sha256(content).hexdigest()
    return CodeView(code=PREFIX + digest, bytes=len(content), files=len(files))


class CodeService:
    """Stores packages and returns their content."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._max_bytes = settings.max_code_bytes

    async def put(self, content: bytes) -> CodeView:
        """Store a package. Idempotent: the same content is the same package. Raises CodeRefused."""
        view = await asyncio.to_thread(inspect_package, content, self._max_bytes)
        now = time.time()
        async with self._store.write() as session:
            stored = await session.get(CodePackage, view.code)
            if stored is not None:
                stored.used_at = now
            else:
                session.add(CodePackage(id=view.code, content=content, used_at=now))
            referenced = exists().where(JobRecord.code == CodePackage.id)
            await session.execute(
                delete(CodePackage).where(CodePackage.used_at < now - UNREFERENCED_S, ~referenced)
            )
        return view

    async def is_stored(self, code: str) -> bool:
        async with self._store.read() as session:
            rows = await session.execute(select(CodePackage.id).where(CodePackage.id == code))
            return rows.first() is not None

    async def content(self, code: str) -> bytes | None:
        async with self._store.read(long=True) as session:
            stored = await session.get(CodePackage, code)
            return None if stored is None else stored.content
