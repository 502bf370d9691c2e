"""Users' code: folders packed as zip files, each identified by the digest of its bytes.

The content behind a `sha256:...` reference never changes, so a restarted agent always gets the
same code. A package is kept while a job refers to it; without a reference for a day, it is deleted.
All packages together have a limit: for a new one, the longest unused ones are deleted that no
unfinished job refers to.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import stat
import time
import zipfile
from pathlib import PurePosixPath

from sqlalchemy import delete, exists, false, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.errors import CodeNotFound, CodeRefused
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


_ANY = exists().where(JobRecord.code == CodePackage.id)
_UNFINISHED = exists().where(JobRecord.code == CodePackage.id, JobRecord.cleaned == false())


async def touch(session: AsyncSession, code: str) -> bool:
    """Record that a job uses the package; False if there is none."""
    used = update(CodePackage).where(CodePackage.id == code).values(used_at=time.time())
    return bool((await session.execute(used.returning(CodePackage.id))).first())


async def collect_garbage(store: Store) -> None:
    """Delete the packages that have had no reference for long."""
    unused = (CodePackage.used_at < time.time() - UNREFERENCED_S, ~_ANY)
    async with store.read() as session:  # there is rarely one: avoid a write transaction
        if await session.scalar(select(CodePackage.id).where(*unused).limit(1)) is None:
            return
    async with store.write() as session:
        await session.execute(delete(CodePackage).where(*unused))


class CodeService:
    """Stores packages and returns their content."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._max_bytes = settings.max_code_bytes
        self._max_total_bytes = settings.max_code_total_bytes

    async def put(self, content: bytes) -> CodeView:
        """Store a package. Idempotent: the same content is the same package. Raises CodeRefused."""
        view = await asyncio.to_thread(inspect_package, content, self._max_bytes)
        now = time.time()
        async with self._store.write() as session:
            stored = await session.get(CodePackage, view.code)
            if stored is not None:
                stored.used_at = now
            else:
                await self._make_room(session, view)
                session.add(CodePackage(id=view.code, content=content, used_at=now))
        return view

    async def _make_room(self, session: AsyncSession, new: CodeView) -> None:
        """Raises CodeRefused."""
        size = func.length(CodePackage.content)
        present = await session.scalar(select(func.coalesce(func.sum(size), 0))) or 0
        surplus = present + new.bytes - self._max_total_bytes
        if surplus <= 0:
            return
        # By their last use alone: a package without any reference may have been sent just now.
        unneeded = select(CodePackage.id, size).where(~_UNFINISHED).order_by(CodePackage.used_at)
        removed = []
        for code, nbytes in await session.execute(unneeded):
            removed.append(code)
            surplus -= nbytes
            if surplus <= 0:
                await session.execute(delete(CodePackage).where(CodePackage.id.in_(removed)))
                return
        raise CodeRefused(
            f"the server keeps {self._max_total_bytes:,} bytes of code at most, and unfinished "
            "jobs use them: wait for one to end, or raise HOLDFAST_MAX_CODE_TOTAL_BYTES"
        )

    async def is_stored(self, code: str) -> bool:
        async with self._store.read() as session:
            rows = await session.execute(select(CodePackage.id).where(CodePackage.id == code))
            return rows.first() is not None

    async def require(self, code: str) -> None:
        """Raises CodeNotFound."""
        if not await self.is_stored(code):
            raise CodeNotFound(f"the server has no code {code}: send it with POST /api/v1/code")

    async def get(self, code: str) -> bytes:
        """Raises CodeNotFound."""
        await self.require(code)
        return await self.content(code) or b""

    async def content(self, code: str) -> bytes | None:
        async with self._store.read(long=True) as session:
            stored = await session.get(CodePackage, code)
            return None if stored is None else stored.content
