"""Users' code: folders packed as zip files, each identified by the digest of its bytes.

The content behind a `sha256:...` reference never changes, so a restarted agent always gets the
same code. A package is kept while a job refers to it; without a reference for a day, it is deleted.
All packages together have a limit: for a new one, the longest unused ones are deleted that no
unfinished job refers to, but none that was sent or submitted less than `KEPT_S` ago: its job may
come with the next request.

A submission renews `used_at` of its package in the transaction that stores the job. Every deletion
locks the rows that it chose and reads their `used_at` again, so none takes the package of a job
that is being stored.
"""

from __future__ import annotations

import asyncio
import time

from sqlalchemy import delete, exists, false, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_service.errors import CodeNotFound, CodeRefused, CodeStoreFull
from holdfast_service.services.code_inspection import inspect_package
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.models import CodePackage, JobRecord
from holdfast_service.views.jobs import CodeView

UNREFERENCED_S = 86400.0
"""Time without a reference after which a package is deleted."""
KEPT_S = 600.0
"""Time after its last upload or submission for which a package stays in any case."""
_LOCK = 0x436F6465  # "Code": one upload or deletion at a time

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
        await _lock(store, session)
        await session.execute(delete(CodePackage).where(*unused))


async def _lock(store: Store, session: AsyncSession) -> None:
    """Lock the stored packages on PostgreSQL; SQLite allows one writer at a time anyway."""
    if store.postgres:
        await session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


class CodeService:
    """Stores packages and returns their content."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._max_bytes = settings.max_code_bytes
        self._max_total_bytes = settings.max_code_total_bytes

    async def put(self, content: bytes) -> CodeView:
        """Store a package, and keep it for `KEPT_S`. Idempotent: the same content is the same
        package. Raises CodeRefused, CodeStoreFull."""
        view = await asyncio.to_thread(inspect_package, content, self._max_bytes)
        async with self._store.write() as session:
            await _lock(self._store, session)
            if not await touch(session, view.code):
                await self._make_room(session, view)
                session.add(CodePackage(id=view.code, content=content, used_at=time.time()))
        return view

    async def _make_room(self, session: AsyncSession, new: CodeView) -> None:
        """Raises CodeRefused, CodeStoreFull."""
        limit = f"the server keeps {self._max_total_bytes:,} bytes of code at most"
        if new.bytes > self._max_total_bytes:
            raise CodeRefused(
                f"the code has {new.bytes:,} bytes when packed, and {limit}: exclude what training "
                "does not need in a .holdfastignore file, or raise HOLDFAST_MAX_CODE_TOTAL_BYTES"
            )
        size = func.length(CodePackage.content)
        present = await session.scalar(select(func.coalesce(func.sum(size), 0))) or 0
        surplus = present + new.bytes - self._max_total_bytes
        if surplus <= 0:
            return
        unneeded = (CodePackage.used_at < time.time() - KEPT_S, ~_UNFINISHED)
        oldest = select(CodePackage.id, size).where(*unneeded).order_by(CodePackage.used_at)
        removed = []
        for code, nbytes in await session.execute(oldest.with_for_update(of=CodePackage)):
            removed.append(code)
            surplus -= nbytes
            if surplus <= 0:
                await session.execute(delete(CodePackage).where(CodePackage.id.in_(removed)))
                return
        raise CodeStoreFull(
            f"{limit}, and unfinished jobs need them, or they were sent within the last "
            f"{KEPT_S / 60:g} minutes: send it again later, or raise HOLDFAST_MAX_CODE_TOTAL_BYTES"
        )

    async def keep(self, code: str) -> None:
        """Keep a package for `KEPT_S`: who asks for it may be about to submit a job with it.
        Raises CodeNotFound."""
        async with self._store.write() as session:
            if not await touch(session, code):
                raise _not_found(code)

    async def is_stored(self, code: str) -> bool:
        async with self._store.read() as session:
            rows = await session.execute(select(CodePackage.id).where(CodePackage.id == code))
            return rows.first() is not None

    async def get(self, code: str) -> bytes:
        """Raises CodeNotFound."""
        content = await self.content(code)
        if content is None:
            raise _not_found(code)
        return content

    async def content(self, code: str) -> bytes | None:
        async with self._store.read(long=True) as session:
            stored = await session.get(CodePackage, code)
            return None if stored is None else stored.content


def _not_found(code: str) -> CodeNotFound:
    return CodeNotFound(f"the server has no code {code}: send it with POST /api/v1/code")
