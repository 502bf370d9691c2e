"""The reconciler drives jobs on both databases, with a scripted cluster."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from sqlalchemy import update
from tests.support.service.databases import paced
from tests.support.service.fake_cluster import FakeCluster, FakeSupervisor, line, three_nodes
from tests.support.service.job_drives import (
    JOB,
    all_digests,
    kinds,
    reconciling,
    submitted,
    until,
    until_kind,
    until_released,
    until_state,
    until_waits,
)

from holdfast_service.job_model.lifecycle import START_WAIT, TERMINAL, State
from holdfast_service.job_model.log_filters import LogFilter
from holdfast_service.job_model.supervisor_protocol import (
    Capacity,
    Cursors,
    EventKind,
    JobPlan,
    LaunchRefused,
    LostAttempt,
    Phase,
    SupervisorReport,
)
from holdfast_service.reconcile import job_driver
from holdfast_service.reconcile.reconciler import Reconciler
from holdfast_service.services.fault_injection import InjectionService
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.models import Event, Intent, JobRecord
from holdfast_service.store.transaction import Effect


async def test_a_job_goes_from_the_queue_to_its_end(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        supervisor.run(1, 1, 300)
        supervisor.logs += [line(seq, f"line {seq}") for seq in range(1, 51)]
        await until_state(jobs, job_id, State.RUNNING)
        supervisor.end()
        job = await until_released(jobs, job_id)
    assert (job.state, job.progress.step, job.progress.attempt) == (State.SUCCEEDED, 300, 1)
    assert job.progress.tokens_per_second == pytest.approx(40960)
    assert not cluster.supervisors
    page = await jobs.history.events(job_id, limit=1000)
    assert [event.seq for event in page.items] == list(range(1, len(page.items) + 1))
    assert page.ended
    states = [event.data["to"] for event in page.items if event.kind == "job.state"]
    assert states == ["STARTING", "RUNNING", "SUCCEEDED"]
    assert len((await jobs.history.metrics(job_id, names=["loss"])).items) == 300
    assert await all_digests(jobs, job_id) == {step: f"d{step}" for step in range(1, 301)}
    assert (await jobs.log_reader.page(job_id, LogFilter())).items[-1].text == "line 50"
    (attempt,) = (await jobs.history.attempts(job_id)).items
    assert [member.pid for member in attempt.members] == [100, 101, 102, 103]


async def test_a_job_that_is_hardly_ever_polled_is_seen_to_run_and_end_at_once(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    cluster.tells = True
    rarely = paced(settings, reconcile_interval_s=300.0)

    async def first_step_is_stored() -> bool:
        return (await jobs.get(job_id)).progress.step == 1

    async with reconciling(store, cluster, rarely):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        await until_state(jobs, job_id, State.RUNNING)
        supervisor.run(1, 1, 1)
        await until(first_step_is_stored)
        supervisor.run(1, 2, 9)
        await asyncio.sleep(0.3)
        assert (await jobs.get(job_id)).progress.step == 1, "a further step is no news"
        supervisor.end()
        await until_released(jobs, job_id)
        page = await jobs.history.events(job_id, limit=1000)
    assert page.ended
    assert not any(task.get_name().startswith("news") for task in asyncio.all_tasks())


async def test_a_command_through_another_server_does_not_wait_for_a_poll(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    cluster.tells = True
    rarely = paced(settings, reconcile_interval_s=300.0)
    rarely = rarely.model_copy(update={"allow_fault_injection": True})
    async with reconciling(store, cluster, rarely):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        await until_state(jobs, job_id, State.RUNNING)
        for _ in range(2):  # `jobs` wakes no reconciler: it is as good as another server's
            await InjectionService(store, rarely).inject(job_id, {"kind": "kill", "rank": 1})
            await until(lambda: len(supervisor.wanted_faults) == 1, what="the fault")
            supervisor.wanted_faults.clear()
        await jobs.pause(job_id)
        await until_state(jobs, job_id, State.PAUSED)


async def test_a_job_without_room_waits_with_a_reason_and_starts_when_there_is_room(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        first = await submitted(jobs, cluster)
        second, _ = await jobs.submit(JOB)
        await until_waits(jobs, second.id, "nodes")
        assert second.id not in cluster.supervisors
        first.end()
        await until_state(jobs, second.id, State.STARTING)
    assert (await kinds(jobs, second.id)).count("waiting") == 1


async def test_a_silent_supervisor_is_requested_again_and_adopted(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        cluster.silent.add(job_id)
        await until(lambda: cluster.asked[job_id] == 2, what="a second request")
        cluster.silent.clear()
        supervisor.end()
        await until_released(jobs, job_id)
    assert cluster.starts[job_id] == 1


async def test_a_supervisor_that_finds_nothing_of_its_job_knows_which_attempt_was_lost(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, paced(settings, supervisor_deadline_s=0.03)):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        assert supervisor.launch.lost is None
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        supervisor.run(1, 1, 10)
        supervisor.emit(EventKind.INCIDENT_OPENED, incident=1, cause="worker_crash", attempt=1)
        await until_kind(jobs, job_id, "incident.opened")
        await until_state(jobs, job_id, State.RUNNING)
        cluster.supervisors.clear()
        await until(lambda: job_id in cluster.supervisors, what="another supervisor")
        launch = cluster.supervisors[job_id].launch
        assert (launch.last_incident, launch.lost) == (1, LostAttempt(1, world_size=4, step=10))
        cluster.supervisors[job_id].end()
        await until_released(jobs, job_id)


async def test_a_server_that_ends_stores_the_last_rows_of_its_jobs(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    """Its cluster may end with it; more than one report has them."""
    polls: list[Cursors] = []
    poll = FakeCluster.poll

    async def noted(job_id: str, cursors: Cursors) -> SupervisorReport:
        polls.append(cursors)
        return await poll(cluster, job_id, cursors)

    cluster.poll = noted  # type: ignore[method-assign]
    rarely = paced(settings, reconcile_interval_s=3600.0)
    async with reconciling(store, cluster, rarely) as reconciler:
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.train(155)
        reconciler.wake(job_id)
        await until_state(jobs, job_id, State.RUNNING)
        supervisor.run(1, 156, 400)
    assert len((await jobs.history.metrics(job_id, names=["loss"])).items) == 400
    assert polls[-1].fresh


async def test_a_server_ends_although_the_ranks_of_a_job_print_without_end(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    """So does a job that is cancelled by force."""
    usual, patience = cluster.poll, 300
    printed = 0

    async def poll(job_id: str, cursors: Cursors) -> SupervisorReport:
        nonlocal printed
        if cursors.fresh and printed < patience:
            printed += 1
            logs = cluster.supervisors[job_id].logs
            logs += [line(len(logs) + n, "again") for n in range(1, 101)]
        return await usual(job_id, cursors)

    cluster.poll = poll  # type: ignore[method-assign]
    settings = paced(settings, reconcile_interval_s=3600.0, drain_deadline_s=0.05)
    async with reconciling(store, cluster, settings) as reconciler:
        supervisor = await submitted(jobs, cluster)
        supervisor.train(5)
        reconciler.wake(supervisor.launch.job_id)
        await until_state(jobs, supervisor.launch.job_id, State.RUNNING)
    assert 0 < printed < patience


@pytest.mark.parametrize("is_gone", [True, False])
async def test_a_job_held_no_device_while_nothing_of_it_was_on_the_cluster(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings, is_gone: bool
) -> None:
    """A server comes back after 15 minutes. The ranks of a job that is there have trained."""
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.train(3)
        await until_state(jobs, job_id, State.RUNNING)
    away_s = 900.0
    async with store.write() as session:
        for column in (Event.at, JobRecord.told_at, JobRecord.held_since):
            moved = {column.key: column - away_s}
            await session.execute(update(column.class_).values(moved))
    if is_gone:
        del cluster.supervisors[job_id]
    else:
        cluster.silent.add(job_id)
    async with reconciling(store, cluster, paced(settings, supervisor_deadline_s=0.03)):
        await until(lambda: cluster.asked[job_id] == 2, what="a second request")
        events = cluster.supervisors[job_id].events
        cluster.supervisors[job_id].end()
        events[-1] = replace(events[-1], at=time.time())
        cluster.silent.clear()
        await until_released(jobs, job_id)
    goodput = await jobs.history.goodput(job_id)
    assert ("job.away" in await kinds(jobs, job_id)) == is_gone
    assert (goodput.held_s < away_s / 2) == is_gone


@pytest.mark.slow
async def test_a_supervisor_that_answers_late_is_followed_although_polls_are_rare(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    """It sends no news before the first answer."""
    cluster.tells = True
    rarely = paced(settings, reconcile_interval_s=3600.0, supervisor_deadline_s=3600.0)
    ensure = FakeCluster.ensure_supervisor

    async def starts_slowly(launch: JobPlan) -> bool:
        cluster.silent.add(launch.job_id)
        return await ensure(cluster, launch)

    cluster.ensure_supervisor = starts_slowly  # type: ignore[method-assign]
    async with reconciling(store, cluster, rarely):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        await until_waits(jobs, job_id, START_WAIT)  # a slow start is no fault
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        cluster.silent.clear()
        await until_state(jobs, job_id, State.RUNNING)
    assert cluster.asked[job_id] == 1


@pytest.mark.parametrize(
    ("told_at", "now", "is_new"),
    [
        (None, 1000.0 + 59.0, True),
        (990.0, 1000.0 + 59.0, True),  # that of the stay before a pause
        (1001.0, 1000.0 + 2.0, False),  # it has answered, and does not now
        (None, 1000.0 + 61.0, False),  # late: its wait names the error
    ],
)
def test_a_supervisor_that_starts_is_no_silent_one(
    told_at: float | None, now: float, is_new: bool
) -> None:
    start = Intent(job_id="j", name=Effect.START, at=1000.0, done_at=1000.5, times=1)
    assert job_driver._is_new(JobRecord(told_at=told_at), start, now) is is_new


async def test_a_supervisor_that_is_lost_too_often_ends_the_job(
    store: Store,
    jobs: JobService,
    cluster: FakeCluster,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_driver, "SUPERVISOR_STARTS", 3)
    hasty = paced(settings, supervisor_deadline_s=0.03)
    async with reconciling(store, cluster, hasty):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.form(1)
        supervisor.emit(EventKind.INCIDENT_OPENED, incident=1, cause="worker_crash", attempt=1)
        await until_kind(jobs, job_id, "incident.opened")
        cluster.silent.add(job_id)
        await until_state(jobs, job_id, State.FAILED)
        job = await until_released(jobs, job_id)
    assert job.outcome is not None
    assert job.outcome.code == "supervisor_lost"
    [incident] = (await jobs.history.incidents(job_id)).items
    assert incident.end_code == "supervisor_lost" and incident.closed_at == job.ended_at
    assert cluster.asked[job.id] == 3


async def test_an_unreachable_cluster_is_waited_for(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        await until_state(jobs, job_id, State.STARTING)
        cluster.unreachable = True
        await until_waits(jobs, job_id, "cluster")
        cluster.unreachable = False
        supervisor.end()
        await until_released(jobs, job_id)
    assert (await kinds(jobs, job_id)).count("waiting") == 1


async def test_a_job_that_cannot_be_driven_blocks_no_other_job(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    cluster.nodes = three_nodes(roomy=True)
    async with reconciling(store, cluster, settings):
        poisoned = await submitted(jobs, cluster)
        cluster.poison.add(poisoned.launch.job_id)
        healthy = await submitted(jobs, cluster)
        healthy.end()
        await until_released(jobs, healthy.launch.job_id)

        async def recorded() -> bool:
            waiting = (await jobs.get(poisoned.launch.job_id)).waiting
            return waiting is not None and "unexpected report" in waiting.reason

        await until(recorded)
        cluster.poison.clear()
        poisoned.end()
        await until_released(jobs, poisoned.launch.job_id)


async def test_a_launch_that_can_never_succeed_ends_the_job_instead_of_being_tried_for_ever(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    cluster.refusal = LaunchRefused("code_unreadable", "the code is not a readable zip file")
    async with reconciling(store, cluster, settings):
        job, _ = await jobs.submit(JOB)
        ended = await until_state(jobs, job.id, State.FAILED)
        assert ended.outcome is not None
        assert (ended.outcome.code, ended.outcome.message) == (
            "code_unreadable",
            "the code is not a readable zip file",
        )
        await until_released(jobs, job.id)
    assert cluster.asked[job.id] == 1


async def test_a_fault_that_cannot_be_delivered_does_not_block_its_job(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    faults = InjectionService(store, settings.model_copy(update={"allow_fault_injection": True}))
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.enter(Phase.RUNNING)
        cluster.refuses_faults = True
        await faults.inject(job_id, {"kind": "kill", "rank": 0})
        supervisor.run(1, 1, 3)

        async def stepped() -> bool:
            return (await jobs.get(job_id)).progress.step == 3

        await until(stepped)
        assert (await faults.list(job_id)).items[0].injected_at is None
        cluster.refuses_faults = False
        await until(lambda: bool(supervisor.wanted_faults))
        supervisor.end()
        await until_state(jobs, job_id, State.SUCCEEDED)
    assert [number for number, _ in supervisor.wanted_faults] == [1]
    assert (await kinds(jobs, job_id)).count("fault.injected") == 1
    assert cluster.starts[job_id] == 1


async def test_overdue_clean_up_is_reported_and_retried(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    hasty = paced(settings, release_deadline_s=0.1, error_retry_max_s=0.05)
    async with reconciling(store, cluster, hasty):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        cluster.sticky.add(job_id)
        supervisor.end()

        async def overdue() -> bool:
            return "release.overdue" in await kinds(jobs, job_id)

        await until(overdue)
        assert not (await jobs.get(job_id)).released
        cluster.sticky.clear()
        await until_released(jobs, job_id)


async def test_unknown_jobs_are_kept_without_the_operators_word(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    """A database that was restored from a backup does not know the newest jobs."""
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        cluster.supervisors["newer"] = FakeSupervisor(supervisor.launch)
        supervisor.end()
        await until_released(jobs, supervisor.launch.job_id)
        looks = cluster.looks
        await until(lambda: cluster.looks > looks + 3)
        assert set(cluster.supervisors) == {"newer"}


async def test_resources_of_ended_jobs_and_at_the_operators_word_of_unknown_ones_are_reaped(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    settings = settings.model_copy(update={"release_unknown_jobs": True})
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        supervisor.end()
        await until_released(jobs, supervisor.launch.job_id)
        # A reconciler that lost its lease may start a supervisor of an ended job.
        await cluster.ensure_supervisor(supervisor.launch)
        cluster.supervisors["stranger"] = FakeSupervisor(supervisor.launch)
        living = await submitted(jobs, cluster)
        await until(lambda: set(cluster.supervisors) == {living.launch.job_id})


@pytest.mark.parametrize("many", [2])
async def test_reconcilers_on_one_store_start_a_job_once(
    store: Store, jobs: JobService, settings: Settings, many: int
) -> None:
    cluster = FakeCluster(Capacity((), can_grow=False, unlimited=True))
    other = await Store.open(settings)
    try:
        async with reconciling(store, cluster, settings), reconciling(other, cluster, settings):
            submitted = [(await jobs.submit(JOB))[0].id for _ in range(8)]
            await until(lambda: len(cluster.supervisors) == 8)
            for supervisor in list(cluster.supervisors.values()):
                supervisor.run(1, 1, 20)
                supervisor.end()
            await asyncio.gather(*(until_released(jobs, job_id) for job_id in submitted))
    finally:
        await other.close()
    assert {cluster.asked[job_id] for job_id in submitted} == {1}
    for job_id in submitted:
        assert (await kinds(jobs, job_id)).count("supervisor.started") == 1


MANY, POLLS_PER_S = 20, 1.0
Polls = Counter[str]
"""The number of answered polls of each job."""


@pytest.fixture
async def many_running(
    store: Store,
    jobs: JobService,
    cluster: FakeCluster,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[Reconciler, FakeSupervisor, Polls]]:
    """A reconciler with more jobs than its poll rate allows, and one job's supervisor."""
    polls, report = Polls(), FakeSupervisor.report

    def counted(supervisor: FakeSupervisor, cursors: Cursors) -> SupervisorReport:
        polls[supervisor.launch.job_id] += 1
        return report(supervisor, cursors)

    monkeypatch.setattr(FakeSupervisor, "report", counted)
    cluster.nodes = three_nodes(roomy=True)
    slow = paced(settings, polls_per_s=POLLS_PER_S)
    async with reconciling(store, cluster, slow) as reconciler:
        for _ in range(MANY):
            supervisor = await submitted(jobs, cluster)
            supervisor.form(1)
            supervisor.enter(Phase.RUNNING)
            reconciler.wake(supervisor.launch.job_id)
            await until_state(jobs, supervisor.launch.job_id, State.RUNNING)
        yield reconciler, supervisor, polls


@pytest.mark.slow
async def test_a_pausing_job_is_polled_at_the_urgent_rate(
    many_running: tuple[Reconciler, FakeSupervisor, Polls], jobs: JobService
) -> None:
    reconciler, chosen, polls = many_running
    job_id = chosen.launch.job_id
    chosen.obeys = False
    await jobs.pause(job_id)
    reconciler.wake(job_id)
    await until_state(jobs, job_id, State.PAUSING)
    await asyncio.sleep(0.3)  # it was polled since, and the next poll is due
    chosen.end("PAUSED", "paused", message="")
    before = polls.total() - polls[job_id]
    await until_state(jobs, job_id, State.PAUSED)
    assert polls.total() - polls[job_id] - before < MANY / 2, "it has waited for its turn"


async def test_a_job_that_is_given_back_for_lack_of_nodes_is_queued_and_started_again(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings) as reconciler:
        job, _ = await jobs.submit(JOB)
        reconciler.wake(job.id)
        await until(lambda: job.id in cluster.supervisors, what="a supervisor")
        first = cluster.supervisors[job.id]
        first.form(1)
        first.enter(Phase.RUNNING)
        await until_state(jobs, job.id, State.RUNNING)
        first.enter(Phase.RECOVERING)
        first.end("PAUSED", "no_nodes", message="no node for rank 1 within 60 s; step 7 is saved")
        await until(
            lambda: cluster.supervisors.get(job.id) not in (None, first), what="a new supervisor"
        )
        events = (await jobs.history.events(job.id, limit=1000)).items
        states = [event.data for event in events if event.kind == "job.state"]
        reasons = [data["reason"] for data in states if data["to"] in ("PAUSING", "QUEUED")]
        assert "no node for rank 1 within 60 s; step 7 is saved" in reasons
        assert "it was given back" in reasons


@pytest.mark.parametrize("has_trained", [False, True])
async def test_a_job_that_is_given_back_before_it_trains_keeps_its_age_in_the_queue(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings, has_trained: bool
) -> None:
    async def queued_at(job_id: str) -> float:
        async with store.read() as session:
            return (await session.get_one(JobRecord, job_id)).queued_at

    async with reconciling(store, cluster, settings):
        first = await submitted(jobs, cluster)
        job_id = first.launch.job_id
        came = await queued_at(job_id)
        if has_trained:
            first.train(5)
            await until_state(jobs, job_id, State.RUNNING)
            assert await queued_at(job_id) == 0.0
        first.end("PAUSED", "no_nodes", message="its nodes were taken")
        await until(lambda: cluster.supervisors.get(job_id) not in (None, first), what="a new one")
        assert (await queued_at(job_id) == came) == (not has_trained)


async def test_a_job_that_is_resumed_by_its_user_has_no_age_in_the_queue(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    """Also if it had not trained, and was still to be paused."""
    async with reconciling(store, cluster, settings):
        first = await submitted(jobs, cluster)
        job_id, first.obeys = first.launch.job_id, False
        async with store.read() as session:
            came = (await session.get_one(JobRecord, job_id)).queued_at
        await jobs.pause(job_id)
        await until_state(jobs, job_id, State.PAUSING)
        await jobs.resume(job_id)
        first.end("PAUSED", "paused", message="its user has paused it")
        await until(lambda: cluster.supervisors.get(job_id) not in (None, first), what="a new one")
        async with store.read() as session:
            assert (await session.get_one(JobRecord, job_id)).queued_at > came


@pytest.mark.seconds
async def test_an_earlier_end_does_not_shorten_the_wait_for_the_outcome(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    settings = paced(settings, drain_deadline_s=1.0)
    async with reconciling(store, cluster, settings):
        first = await submitted(jobs, cluster)
        job_id = first.launch.job_id
        first.train(5)
        await until_state(jobs, job_id, State.RUNNING)
        first.end("PAUSED", "no_nodes", message="no node for rank 1; step 5 is saved")
        await until(
            lambda: cluster.supervisors.get(job_id) not in (None, first), what="a new supervisor"
        )
        second = cluster.supervisors[job_id]
        second.form(2, restore_step=5)
        second.enter(Phase.RUNNING)
        await until_state(jobs, job_id, State.RUNNING)
        await asyncio.sleep(settings.pace.drain_deadline_s)
        second.run(2, 6, 10)
        second.enter(Phase.ENDED)  # its last rows are collected before the outcome is reported
        await asyncio.sleep(0.3)
        second.end()
        assert (await until_state(jobs, job_id, *TERMINAL)).state is State.SUCCEEDED


@pytest.mark.seconds
async def test_the_last_lines_of_an_ended_job_are_stored_as_long_as_they_come(
    store: Store,
    jobs: JobService,
    cluster: FakeCluster,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = cluster.poll

    async def poll(job_id: str, cursors: Cursors) -> SupervisorReport:
        report = await usual(job_id, cursors)
        if report.phase is Phase.ENDED:
            await asyncio.sleep(0.15)
        return replace(report, logs=report.logs[:1])

    monkeypatch.setattr(cluster, "poll", poll)
    settings = paced(settings, drain_deadline_s=1.0)
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.train(5)
        await until_state(jobs, job_id, State.RUNNING)
        first = len(supervisor.logs)
        texts = [f"last line {number}" for number in range(1, 13)]  # they take 1.8 s
        supervisor.logs += [line(first + n, text) for n, text in enumerate(texts, 1)]
        supervisor.end()
        await until_state(jobs, job_id, State.SUCCEEDED)
        found = [item.text for item in (await jobs.log_reader.page(job_id, LogFilter())).items]
        assert found[first:] == texts


@pytest.mark.slow
async def test_a_watched_job_is_polled_at_the_urgent_rate(
    many_running: tuple[Reconciler, FakeSupervisor, Polls], jobs: JobService, store: Store
) -> None:
    _, chosen, polls = many_running
    job_id = chosen.launch.job_id
    await asyncio.sleep(0.3)
    chosen.run(1, 1, 5)
    store.watched_jobs.start_watching(job_id)
    for last in (5, 10):

        async def there(step: int = last) -> bool:
            return (await jobs.get(job_id)).progress.step == step

        before = polls.total() - polls[job_id]
        await until(there, what=f"step {last}")
        assert polls.total() - polls[job_id] - before < MANY / 2, "it has waited for its turn"
        chosen.run(1, last + 1, last + 5)
    store.watched_jobs.stop_watching(job_id)
    assert not store.watched_jobs.is_watched(job_id)
