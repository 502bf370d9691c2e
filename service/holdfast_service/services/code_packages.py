"""Users' code: folders as zip files, each known by the digest of its bytes.

What a spec names as `sha256:...` never changes, so every later life of an agent has the same code.
A package is kept while a job names it; one that no job has named for a day is let go.
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

from holdfast_service.job_model.job_errors import JobError
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.models import CodePackage, Job
from holdfast_service.views.jobs import CodeView

PREFIX = "sha256:"
MOST_FILES = 10_000
MOST_GROWTH = 20
"""So many times its own size a package may have once it is unpacked."""
UNNAMED_S = 86400.0


class CodeRefused(JobError):
    """The package is none that could be unpacked on a node."""

    code = "invalid_code"


def inspected(content: bytes, most_bytes: int) -> CodeView:
    """What is in a package. Raises CodeRefused. Pure."""
    if len(content) > most_bytes:
        raise CodeRefused(
            f"the code has {len(content):,} bytes when packed, {most_bytes:,} are allowed: leave "
            "out what training does not need by a .holdfastignore file, and bring data by "
            "other ways"
        )
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as package:
            files = [one for one in package.infolist() if not one.is_dir()]
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise CodeRefused(f"the code is no zip file: {error}") from error
    if not files:
        raise CodeRefused("the code is empty: there is no file in it")
    if len(files) > MOST_FILES:
        raise CodeRefused(f"the code has {len(files):,} files, {MOST_FILES:,} are allowed")
    for one in files:
        path = PurePosixPath(one.filename)
        kind = stat.S_IFMT(one.external_attr >> 16)
        if path.is_absolute() or ".." in path.parts or "\\" in one.filename or "\0" in one.filename:
            raise CodeRefused(f"{one.filename!r} leads out of the folder")
        if kind not in (0, stat.S_IFREG):
            raise CodeRefused(f"{one.filename!r} is no regular file")
    unpacked = sum(one.file_size for one in files)
    if unpacked > MOST_GROWTH * most_bytes:
        raise CodeRefused(f"the code has {unpacked:,} bytes when unpacked: that is too much")
    digest = hashlib.sha256(content).hexdigest()
    return CodeView(code=PREFIX + digest, bytes=len(content), files=len(files))


class CodeService:
    """Takes packages in, and gives them out."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._most_bytes = settings.max_code_bytes

    async def put(self, content: bytes) -> CodeView:
        """Keep a package; the same content again is the same package. Raises CodeRefused."""
        found = await asyncio.to_thread(inspected, content, self._most_bytes)
        now = time.time()
        async with self._store.write() as session:
            there = await session.get(CodePackage, found.code)
            if there is not None:
                there.used_at = now
            else:
                session.add(CodePackage(id=found.code, content=content, used_at=now))
            named = exists().where(Job.code == CodePackage.id)
            await session.execute(
                delete(CodePackage).where(CodePackage.used_at < now - UNNAMED_S, ~named)
            )
        return found

    async def is_there(self, code: str) -> bool:
        async with self._store.read() as session:
            found = await session.execute(select(CodePackage.id).where(CodePackage.id == code))
            return found.first() is not None

    async def content(self, code: str) -> bytes | None:
        async with self._store.read(long=True) as session:
            there = await session.get(CodePackage, code)
            return None if there is None else there.content
