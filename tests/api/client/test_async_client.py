"""The client for event loops, jobs as objects, and the exception types of error codes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest
from tests.support.service.fake_cluster import line
from tests.support.service.live_server import SPEC, LiveServer
from tests.support.waiting import DEADLINE_S

import holdfast
from holdfast import AsyncClient, Client, JobSpec, errors
from holdfast.client.job_names import resolve, short
from holdfast.client.retry import FIRST_PAUSE_S, MAX_PAUSE_S, RetrySchedule
from holdfast_service.errors import statuses
from holdfast_service.job_model.lifecycle import State
from holdfast_service.views.lists import JobRow


@pytest.fixture
async def remote(server: LiveServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address) as connected:
        yield connected


async def run(server: LiveServer, job_id: str) -> None:
    supervisor = await asyncio.to_thread(server.run_job, job_id, end=False)
    supervisor.logs.append(line(1, "hello"))
    supervisor.end()


@pytest.mark.seconds
async def test_a_job_from_submission_to_its_metrics(
    remote: AsyncClient, server: LiveServer
) -> None:
    job = await remote.jobs.submit(JobSpec(**SPEC))
    running = asyncio.create_task(run(server, job.id))
    kinds = [event.kind async for event in job.events(follow=True)]
    await running
    assert kinds[0] == "job.submitted"
    assert (await job.wait(DEADLINE_S, check=True, poll_s=0.02)).state is State.SUCCEEDED
    assert [log.text async for log in job.logs(follow=True)] == ["hello"]
    assert [log.text async for log in job.logs(grep="h.llo")] == ["hello"]
    assert [log.text async for log in job.logs(grep="nothing")] == []
    frame = await job.metrics(["loss"])
    assert list(frame.index) == [1, 2, 3, 4, 5]
    assert list(frame["loss"]) == [1.5] * 5
    assert await job.incidents() == []
    assert await job.digests() == {step: f"d{step}" for step in range(1, 6)}
    assert [listed.id async for listed in remote.jobs.list()] == [job.id]
    assert (await remote.jobs.get("tiny")).id == job.id
    with pytest.raises(errors.JobEnded):
        await job.cancel()


@pytest.mark.seconds
async def test_concurrent_requests_survive_a_server_restart(
    remote: AsyncClient, server: LiveServer
) -> None:
    job = await remote.jobs.submit(SPEC)
    await asyncio.to_thread(server.run_job, job.id, 2, end=False)
    later = (remote.jobs.submit({**SPEC, "name": f"j{number}"}) for number in range(5))
    jobs = [job, *await asyncio.gather(*later)]
    assert len({job.id for job in jobs}) == 6
    seen: list[int] = []
    first = asyncio.Event()

    async def follow() -> None:
        async for event in jobs[0].events(follow=True):
            seen.append(event.seq)
            first.set()

    following = asyncio.create_task(follow())
    await asyncio.wait_for(first.wait(), DEADLINE_S)
    await asyncio.to_thread(server.stop)
    asking = asyncio.create_task(jobs[1].refresh())
    await asyncio.to_thread(server.start)
    assert (await asking).name == "j0"
    server.cluster.supervisors[jobs[0].id].end()
    await asyncio.wait_for(following, DEADLINE_S)
    assert seen == list(range(1, len(seen) + 1))


@pytest.mark.seconds
def test_a_job_as_an_object(client: Client, server: LiveServer) -> None:
    job = client.jobs.submit(SPEC, idempotency_key="one")
    assert client.jobs.submit(SPEC, idempotency_key="one").id == job.id
    supervisor = server.run_job(job.id, end=False)
    supervisor.logs.append(line(1, "hello"))
    supervisor.end("FAILED", "user_error", message="it raised")
    assert job.wait(DEADLINE_S).state is State.FAILED
    assert [log.text for log in job.logs(follow=True)] == ["hello"]
    assert "FAILED" in repr(job)
    with pytest.raises(errors.JobFailed, match="it raised") as failed:
        job.wait(check=True)
    assert failed.value.code == "user_error"
    assert len(list(job.metrics()["loss"])) == 5
    assert next(event.kind for event in job.events()) == "job.submitted"
    assert job.checkpoints().items == ()


def test_every_error_code_of_the_server_has_an_exception_type(client: Client) -> None:
    kinds = {404: holdfast.NotFound, 409: holdfast.Conflict, 503: holdfast.ServerError}
    for code, status in statuses().items():
        error = errors.from_problem({"code": code, "status": status})
        assert isinstance(error, kinds.get(status, holdfast.ApiError)), code
        assert (error.code, type(error).code, type(error).status) == (code, code, status)
    assert type(errors.from_problem({"code": "new", "status": 409})) is holdfast.Conflict
    with pytest.raises(errors.JobNotFound):
        client.get("none")
    with pytest.raises(errors.UnknownMetric):
        list(client.metrics(client.submit(SPEC).id, ["nope"]))


def test_a_few_characters_that_end_an_id_name_no_job() -> None:
    ids = ("01a2030b-dc99-7512-b477-7477b5ce4248", "01a2030b-dc99-7512-b477-7478b5ce4243")
    rows = [cast(JobRow, SimpleNamespace(id=job_id, name="x", state="RUNNING")) for job_id in ids]
    assert resolve("b5ce4243", rows).id == ids[1]
    for few in ("3", "43", "5ce4243"):
        with pytest.raises(errors.JobNotFound):
            resolve(few, rows)


def test_short_ids_are_distinct() -> None:
    ids = ["01a2030b-dc99-7512-b477-7477b5ce4248", "01a2030b-dc99-7512-b477-7478b5ce4248"]
    assert short(ids[:1]) == ["b5ce4248"]
    assert short(ids) == ["7b5ce4248", "8b5ce4248"]


def test_the_retry_limit_counts_from_the_first_failure_in_a_row() -> None:
    schedule = RetrySchedule(10.0)
    assert schedule.pause_s(100.0) == FIRST_PAUSE_S
    assert schedule.pause_s(105.0) == 2 * FIRST_PAUSE_S
    schedule.succeeded()
    assert schedule.pause_s(200.0) == FIRST_PAUSE_S
    pauses = [schedule.pause_s(201.0) or 0.0 for _ in range(10)]
    assert max(pauses) == MAX_PAUSE_S
    assert schedule.pause_s(209.5) == 0.5
    assert schedule.pause_s(210.0) is None
