"""Stored code: kept while it is needed, within a limit for all of it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile

import pytest
from sqlalchemy import select, text, update
from tests.support.service.job_drives import until

from holdfast_service.errors import CodeNotFound, CodeRefused, CodeStoreFull, InvalidSpec
from holdfast_service.services.code_packages import (
    KEPT_S,
    UNREFERENCED_S,
    CodeService,
    collect_garbage,
    touch,
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


def limited(store: Store, settings: Settings, packages: int) -> CodeService:
    """With room for so many."""
    room = packages * len(package("0"))
    return CodeService(store, settings.model_copy(update={"max_code_total_bytes": room}))


async def end(store: Store, job: JobView) -> None:
    async with store.write() as session:
        await session.execute(update(JobRecord).where(JobRecord.id == job.id).values(cleaned=True))


async def test_the_longest_unused_code_makes_room_but_never_that_of_unfinished_jobs(
    store: Store, jobs: JobService, settings: Settings
) -> None:
    code = limited(store, settings, 3)
    views = []
    for name in "012":
        views.append(await code.put(package(name)))
        await age_all(store, 10.0)
    needed, ended, unreferenced = (view.code for view in views)
    await submit(jobs, needed)
    job, _ = await submit(jobs, ended)
    await end(store, job)
    await age_all(store, KEPT_S)
    third = (await code.put(package("3"))).code
    assert await stored(store) == {needed, ended, third}, unreferenced
    await submit(jobs, third)
    await age_all(store, KEPT_S)
    fourth = (await code.put(package("4"))).code
    assert await stored(store) == {needed, third, fourth}
    await submit(jobs, fourth)
    await age_all(store, KEPT_S)
    with pytest.raises(CodeStoreFull, match="unfinished jobs"):
        await code.put(package("5"))
    assert await stored(store) == {needed, third, fourth}
    await code.put(package("4"))  # it is there already


async def test_code_that_was_just_sent_outlasts_what_others_send(
    store: Store, jobs: JobService, settings: Settings
) -> None:
    """Its job comes with the next request, and is refused without it."""
    code = limited(store, settings, 2)
    sent = [(await code.put(package(name))).code for name in "01"]
    with pytest.raises(CodeStoreFull, match="sent within the last 10 minutes: send it again later"):
        await code.put(package("2"))
    assert await stored(store) == set(sent)
    await age_all(store, KEPT_S)
    await code.keep(sent[0])  # a client asks whether it has to be sent
    third = (await code.put(package("2"))).code
    assert await stored(store) == {sent[0], third}
    await submit(jobs, sent[0])
    with pytest.raises(CodeNotFound):
        await code.keep(sent[1])


async def test_code_that_never_fits_is_refused_before_anything_is_deleted(
    store: Store, code: CodeService, settings: Settings
) -> None:
    first = (await code.put(package("0"))).code
    await age_all(store, KEPT_S)
    with pytest.raises(CodeRefused, match="or raise HOLDFAST_MAX_CODE_TOTAL_BYTES"):
        await limited(store, settings, 1).put(package("0" * 500))
    assert await stored(store) == {first}


EACH_DATABASE = ["sqlite", pytest.param("postgresql", marks=pytest.mark.database)]


@pytest.mark.parametrize("settings", EACH_DATABASE, indirect=True)
async def test_no_upload_deletes_the_code_of_a_job_that_is_being_stored(
    store: Store, jobs: JobService, settings: Settings
) -> None:
    code = limited(store, settings, 1)
    old = (await code.put(package("0"))).code
    await age_all(store, KEPT_S)
    async with store.write() as session:  # as a submission does
        assert await touch(session, old)
        sending = asyncio.create_task(code.put(package("1")))
        await until(lambda: waits_for_a_lock(store))
    with pytest.raises(CodeStoreFull):
        await sending
    assert await stored(store) == {old}


@pytest.mark.parametrize("settings", EACH_DATABASE, indirect=True)
async def test_the_same_code_may_be_sent_twice_at_once(store: Store, settings: Settings) -> None:
    code = limited(store, settings, 3)
    first, second = await asyncio.gather(*(code.put(package("0")) for _ in range(2)))
    assert first == second


async def waits_for_a_lock(store: Store) -> bool:
    if not store.postgres:
        return True  # one writer at a time
    async with store.read() as session:
        waiting = await session.scalar(text("SELECT count(*) FROM pg_locks WHERE NOT granted"))
        return bool(waiting)


async def test_stored_code_can_be_fetched(code: CodeService) -> None:
    content = package("x")
    view = await code.put(content)
    assert await code.get(view.code) == content
    missing = "sha256:" + hashlib.sha256(b"").hexdigest()
    with pytest.raises(CodeNotFound):
        await code.get(missing)
    with pytest.raises(CodeNotFound):
        await code.keep(missing)
