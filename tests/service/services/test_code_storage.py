"""Stored code: kept while it is needed, within a limit for all of it."""

from __future__ import annotations

import hashlib
import io
import zipfile

import pytest
from sqlalchemy import select, update

from holdfast_service.errors import CodeNotFound, CodeRefused, InvalidSpec
from holdfast_service.services.code_packages import (
    UNREFERENCED_S,
    CodeService,
    collect_garbage,
)
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.models import CodePackage, JobRecord
from holdfast_service.views.jobs import JobView


def package(text: str) -> bytes:
    """The same bytes for the same text, whenever it is made."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as made:
        made.writestr(zipfile.ZipInfo("mine.py"), text)
    return target.getvalue()


@pytest.fixture
def code(store: Store, settings: Settings) -> CodeService:
    return CodeService(store, settings)


async def submit(jobs: JobService, code: str) -> tuple[JobView, bool]:
    return await jobs.submit({"name": "x", "function": "mine:main", "code": code})


async def age_all(store: Store, seconds: float) -> None:
    async with store.write() as session:
        await session.execute(update(CodePackage).values(used_at=CodePackage.used_at - seconds))


async def stored(store: Store) -> set[str]:
    async with store.read() as session:
        return set(await session.scalars(select(CodePackage.id)))


async def test_a_submission_keeps_its_code_from_being_collected(
    store: Store, jobs: JobService, code: CodeService
) -> None:
    used, unused = await code.put(package("used")), await code.put(package("unused"))
    await age_all(store, UNREFERENCED_S + 1)
    job, _ = await submit(jobs, used.code)
    async with store.write() as session:  # the reference goes, the time of the use counts
        await session.execute(update(JobRecord).values(code=None))
    await collect_garbage(store)
    assert await stored(store) == {used.code}
    assert job.spec["code"] == used.code
    with pytest.raises(InvalidSpec):
        await submit(jobs, unused.code)


async def test_the_longest_unused_code_makes_room_but_never_that_of_unfinished_jobs(
    store: Store, jobs: JobService, settings: Settings
) -> None:
    size = len(package("0"))
    code = CodeService(store, settings.model_copy(update={"max_code_total_bytes": 3 * size}))
    views = []
    for text in "012":
        views.append(await code.put(package(text)))
        await age_all(store, 10.0)
    needed, ended, unreferenced = (view.code for view in views)
    await submit(jobs, needed)
    job, _ = await submit(jobs, ended)
    async with store.write() as session:
        await session.execute(update(JobRecord).where(JobRecord.id == job.id).values(cleaned=True))
    third = (await code.put(package("3"))).code
    assert await stored(store) == {needed, ended, third}, unreferenced
    await submit(jobs, third)
    fourth = (await code.put(package("4"))).code
    assert await stored(store) == {needed, third, fourth}
    await submit(jobs, fourth)
    with pytest.raises(CodeRefused, match="unfinished jobs"):
        await code.put(package("5"))
    assert await stored(store) == {needed, third, fourth}
    await code.put(package("4"))  # it is there already


async def test_code_that_was_just_sent_outlasts_the_code_of_ended_jobs(
    store: Store, jobs: JobService, settings: Settings
) -> None:
    """Its job comes with the next request, and is refused without it."""
    size = len(package("0"))
    code = CodeService(store, settings.model_copy(update={"max_code_total_bytes": 2 * size}))
    ended = (await code.put(package("0"))).code
    job, _ = await submit(jobs, ended)
    async with store.write() as session:
        await session.execute(update(JobRecord).where(JobRecord.id == job.id).values(cleaned=True))
    await age_all(store, 3600.0)
    sent = [(await code.put(package(text))).code for text in "12"]
    assert await stored(store) == set(sent)
    await submit(jobs, sent[0])


async def test_stored_code_can_be_fetched(code: CodeService) -> None:
    content = package("x")
    view = await code.put(content)
    assert await code.get(view.code) == content
    missing = "sha256:" + hashlib.sha256(b"").hexdigest()
    with pytest.raises(CodeNotFound):
        await code.get(missing)
    with pytest.raises(CodeNotFound):
        await code.require(missing)
