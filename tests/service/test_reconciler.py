"""The drive of jobs, on both databases, with a scripted cluster."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.service.drives import JOB, reconciling, until, until_released, until_state
from tests.service.fake_cluster import FakeCluster, FakeSupervisor, line, three_nodes

from holdfast_service.checkpoints import CheckpointService
from holdfast_service.injections import InjectionService
from holdfast_service.jobs import JobService
from holdfast_service.lifecycle import State
from holdfast_service.reports import Capacity, EventKind, Phase, StopKind
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store


async def started(jobs: JobService, cluster: FakeCluster, **changed: object) -> FakeSupervisor:
    job, _ = await jobs.submit({**JOB, **changed})
    await until(lambda: job.id in cluster.supervisors, what="a supervisor")
    return cluster.supervisors[job.id]


async def kinds(jobs: JobService, job_id: str) -> list[str]:
    return [event.kind for event in (await jobs.events(job_id, limit=1000)).events]


async def test_a_job_goes_from_the_queue_to_its_end(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await started(jobs, cluster)
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
    page = await jobs.events(job_id, limit=1000)
    assert [event.seq for event in page.events] == list(range(1, len(page.events) + 1))
    assert page.ended
    states = [event.data["to"] for event in page.events if event.kind == "job.state"]
    assert states == ["STARTING", "RUNNING", "SUCCEEDED"]
    assert len((await jobs.metrics(job_id, names=["loss"])).points) == 300
    assert (await jobs.digests(job_id)).digests == {step: f"d{step}" for step in range(1, 301)}
    assert [entry.text for entry in (await jobs.logs(job_id)).lines][-1] == "line 50"
    (attempt,) = await jobs.attempts(job_id)
    assert [member.pid for member in attempt.members] == [100, 101, 102, 103]


async def test_all_rows_are_there_when_a_job_is_seen_to_have_ended(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await started(jobs, cluster)
        supervisor.rows_per_poll = 7
        supervisor.form(1)
        supervisor.run(1, 1, 100)
        supervisor.end()
        await until_state(jobs, supervisor.launch.job_id, State.SUCCEEDED)
        assert len((await jobs.digests(supervisor.launch.job_id)).digests) == 100


async def test_a_fault_shows_as_an_incident_and_the_later_attempt_is_the_history(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await started(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        supervisor.run(1, 1, 10)
        await until_state(jobs, job_id, State.RUNNING)
        supervisor.say(EventKind.INCIDENT_OPENED, incident=1, cause="worker_crash", attempt=1)
        supervisor.enter(Phase.RECOVERING)
        await until_state(jobs, job_id, State.RECOVERING)
        supervisor.say(EventKind.ATTEMPT_ENDED, attempt=1, reason="rank 0 died", last_step=10)
        supervisor.form(2, restore_step=9)
        supervisor.say(
            EventKind.INCIDENT_CLOSED,
            incident=1,
            cause="worker_crash",
            decision="re-form",
            steps_lost=1,
            restored_step=9,
            phases_s={"total": 0.2},
        )
        supervisor.enter(Phase.RUNNING)
        supervisor.run(2, 10, 20)
        supervisor.end()
        await until_state(jobs, job_id, State.SUCCEEDED)
    points = (await jobs.metrics(job_id)).points
    assert [(point.step, point.attempt) for point in points] == [
        *((step, 1) for step in range(1, 10)),
        *((step, 2) for step in range(10, 21)),
    ]
    (incident,) = await jobs.incidents(job_id)
    assert (incident.decision, incident.steps_lost, incident.phases_s) == (
        "re-form",
        1,
        {"total": 0.2},
    )
    first, second = await jobs.attempts(job_id)
    assert (first.state, first.reason, second.state) == ("ended", "rank 0 died", "running")
    assert "digest.mismatch" not in await kinds(jobs, job_id)


async def test_a_step_computed_again_with_other_bits_is_reported(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await started(jobs, cluster)
        supervisor.run(1, 1, 3)
        await until(lambda: _has_digests(jobs, supervisor.launch.job_id, 3))
        supervisor.run(2, 3, 3)
        supervisor.digests[3] = "other"
        supervisor.end()
        await until_state(jobs, supervisor.launch.job_id, State.SUCCEEDED)
    events = (await jobs.events(supervisor.launch.job_id)).events
    (mismatch,) = [event.data for event in events if event.kind == "digest.mismatch"]
    assert mismatch == {"step": 3, "stored": "d3", "seen": "other", "attempt": 0}


async def _has_digests(jobs: JobService, job_id: str, count: int) -> bool:
    return len((await jobs.digests(job_id)).digests) == count


async def test_a_users_error_ends_the_job_with_its_traceback(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await started(jobs, cluster)
        supervisor.end("FAILED", "user_error", message="ValueError", traceback="Tr \0 \ud800")
        job = await until_state(jobs, supervisor.launch.job_id, State.FAILED)
    assert job.outcome is not None
    assert (job.outcome.code, job.outcome.traceback) == ("user_error", "Tr \ufffd ?")


async def test_a_job_without_room_waits_with_a_reason_and_starts_when_there_is_room(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        first = await started(jobs, cluster)
        second, _ = await jobs.submit(JOB)

        async def waits() -> bool:
            waiting = (await jobs.get(second.id)).waiting
            return waiting is not None and waiting.resource == "nodes"

        await until(waits)
        assert second.id not in cluster.supervisors
        first.end()
        await until_state(jobs, second.id, State.STARTING)
    assert (await kinds(jobs, second.id)).count("waiting") == 1


async def test_cancel_of_a_queued_job_needs_no_cluster(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    cluster.unreachable = True
    job, created = await jobs.submit(JOB)
    assert created
    assert (await jobs.cancel(job.id)).state is State.CANCELLED
    async with reconciling(store, cluster, settings):
        await until_released(jobs, job.id)
    assert not cluster.releases


async def test_cancel_of_a_running_job_ends_it_on_the_cluster(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await started(jobs, cluster)
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        await until_state(jobs, supervisor.launch.job_id, State.RUNNING)
        for _ in range(2):
            await jobs.cancel(supervisor.launch.job_id)
        job = await until_released(jobs, supervisor.launch.job_id)
    assert job.state is State.CANCELLED
    assert {order.kind for order in supervisor.orders} == {StopKind.CANCEL}
    assert (await kinds(jobs, job.id)).count("job.cancel_requested") == 1


async def test_a_cancel_that_nobody_obeys_takes_the_resources_away(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    hasty = settings.model_copy(update={"cancel_deadline_s": 0.2})
    job = {**JOB, "checkpoint": {"final_save_s": 0}}
    async with reconciling(store, cluster, hasty):
        supervisor = await started(jobs, cluster, **job)
        supervisor.obeys = False
        await jobs.cancel(supervisor.launch.job_id)
        await until_state(jobs, supervisor.launch.job_id, State.CANCELLED)
    assert not cluster.supervisors


async def test_a_paused_job_holds_nothing_and_is_resumed_with_its_history(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings) as reconciler:
        supervisor = await started(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        supervisor.run(1, 1, 10)
        await until_state(jobs, job_id, State.RUNNING)
        for _ in range(2):
            await jobs.pause(job_id)
        paused = await until_state(jobs, job_id, State.PAUSED)
        assert (paused.progress.step, paused.outcome) == (10, None)
        assert not cluster.supervisors
        assert (await kinds(jobs, job_id)).count("job.pause_requested") == 1

        await jobs.resume(job_id)
        reconciler.ring(job_id)
        await until(lambda: job_id in cluster.supervisors, what="another supervisor")
        again = cluster.supervisors[job_id]
        assert (again.launch.last_attempt, again.launch.last_event) == (1, len(supervisor.events))
        again.form(2, restore_step=10)
        again.run(2, 11, 20)
        again.end()
        job = await until_released(jobs, job_id)
    assert (job.state, job.progress.step) == (State.SUCCEEDED, 20)
    assert len((await jobs.digests(job_id)).digests) == 20


async def test_a_pause_that_is_undone_lets_the_job_run_on(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await started(jobs, cluster)
        supervisor.obeys = False
        supervisor.enter(Phase.RUNNING)
        job_id = supervisor.launch.job_id
        await until_state(jobs, job_id, State.RUNNING)
        await jobs.pause(job_id)
        await until_state(jobs, job_id, State.PAUSING)
        supervisor.say(EventKind.STOP_UNDONE, wanted="pause", reason="nothing is durable", step=3)
        job = await until_state(jobs, job_id, State.RUNNING)
        assert job.desired == "running"
        supervisor.obeys = True
        await jobs.pause(job_id)
        await until_state(jobs, job_id, State.PAUSED)


async def test_a_job_may_be_resumed_or_cancelled_while_it_pauses(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    cluster.nodes = three_nodes(can_grow=True)
    async with reconciling(store, cluster, settings):
        for last in (State.STARTING, State.CANCELLED):
            supervisor = await started(jobs, cluster)
            supervisor.obeys = False
            job_id = supervisor.launch.job_id
            await jobs.pause(job_id)
            await until_state(jobs, job_id, State.PAUSING)
            await (jobs.resume if last is State.STARTING else jobs.cancel)(job_id)
            supervisor.end("PAUSED", "paused", message="")
            await until_state(jobs, job_id, last)


async def test_a_cancel_at_once_says_so_to_the_supervisor(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await started(jobs, cluster)
        supervisor.obeys = False
        supervisor.enter(Phase.RUNNING)
        job_id = supervisor.launch.job_id
        await jobs.cancel(job_id)
        await until(lambda: bool(supervisor.orders))
        assert supervisor.orders[0].deadline > time.time()
        await jobs.cancel(job_id, now=True)
        await until(lambda: supervisor.orders[-1].deadline == 0.0)


async def test_attempts_whose_end_nobody_told_end_with_the_next_one(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await started(jobs, cluster)
        saved = {"step": 5, "attempt": 1, "uri": "/c/5", "nbytes": 7}
        supervisor.form(1)
        supervisor.say(EventKind.CHECKPOINT_SAVED, **saved)
        supervisor.form(2, restore_step=5)
        supervisor.say(EventKind.CHECKPOINT_SAVED, **{**saved, "nbytes": 0})
        supervisor.end()
        job = await until_state(jobs, supervisor.launch.job_id, State.SUCCEEDED)
    first, second = await jobs.attempts(job.id)
    assert (first.state, second.state) == ("ended", "running")
    (checkpoint,) = (await CheckpointService(store, settings).list(job.id)).remote
    assert checkpoint.nbytes == 7


async def test_chosen_intervals_are_shown_with_their_reasons(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await started(jobs, cluster)
        told = {"cost_s": 0.2, "mtbf_s": 1e6, "step_s": 0.1, "why": "a save costs 0.2 s"}
        for before, after in ((20, 40), (40, 500)):
            supervisor.say(
                EventKind.CHECKPOINT_INTERVAL,
                tier="remote",
                every_steps=after,
                before=before,
                **told,
            )
        supervisor.end()
        job = await until_state(jobs, supervisor.launch.job_id, State.SUCCEEDED)
    (chosen,) = job.intervals.items()
    assert chosen[0] == "remote"
    assert (chosen[1].every_steps, chosen[1].before) == (500, 40)
    assert chosen[1].why == "a save costs 0.2 s"


async def test_a_silent_supervisor_is_asked_for_anew_and_adopted(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await started(jobs, cluster)
        job_id = supervisor.launch.job_id
        cluster.silent.add(job_id)
        await until(lambda: cluster.asked[job_id] == 2, what="a second request")
        cluster.silent.clear()
        supervisor.end()
        await until_released(jobs, job_id)
    assert cluster.starts[job_id] == 1


async def test_a_supervisor_lost_again_and_again_ends_the_job(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    hasty = settings.model_copy(update={"supervisor_deadline_s": 0.03, "supervisor_starts": 3})
    async with reconciling(store, cluster, hasty):
        supervisor = await started(jobs, cluster)
        cluster.silent.add(supervisor.launch.job_id)
        job = await until_state(jobs, supervisor.launch.job_id, State.FAILED)
    assert job.outcome is not None
    assert job.outcome.code == "supervisor_lost"
    assert cluster.asked[job.id] == 3


async def test_an_unreachable_cluster_is_waited_for(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await started(jobs, cluster)
        job_id = supervisor.launch.job_id
        await until_state(jobs, job_id, State.STARTING)
        cluster.unreachable = True

        async def waits() -> bool:
            waiting = (await jobs.get(job_id)).waiting
            return waiting is not None and waiting.resource == "cluster"

        await until(waits)
        cluster.unreachable = False
        supervisor.end()
        await until_released(jobs, job_id)
    assert (await kinds(jobs, job_id)).count("waiting") == 1


async def test_a_job_that_cannot_be_driven_holds_up_no_other(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    cluster.nodes = three_nodes(can_grow=True)
    async with reconciling(store, cluster, settings):
        poisoned = await started(jobs, cluster)
        cluster.poison.add(poisoned.launch.job_id)
        healthy = await started(jobs, cluster)
        healthy.end()
        await until_released(jobs, healthy.launch.job_id)

        async def said() -> bool:
            waiting = (await jobs.get(poisoned.launch.job_id)).waiting
            return waiting is not None and "nobody foresaw" in waiting.reason

        await until(said)
        cluster.poison.clear()
        poisoned.end()
        await until_released(jobs, poisoned.launch.job_id)


async def test_a_fault_that_cannot_be_delivered_holds_up_nothing_but_itself(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    faults = InjectionService(store, settings.model_copy(update={"allow_fault_injection": True}))
    async with reconciling(store, cluster, settings):
        supervisor = await started(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.enter(Phase.RUNNING)
        cluster.refuses_faults = True
        await faults.inject(job_id, {"kind": "kill", "rank": 0})
        supervisor.run(1, 1, 3)

        async def stepped() -> bool:
            return (await jobs.get(job_id)).progress.step == 3

        await until(stepped)
        assert (await faults.list(job_id))[0].injected_at is None
        cluster.refuses_faults = False
        await until(lambda: bool(supervisor.wanted_faults))
        supervisor.end()
        await until_state(jobs, job_id, State.SUCCEEDED)
    assert [number for number, _ in supervisor.wanted_faults] == [1]
    assert (await kinds(jobs, job_id)).count("fault.injected") == 1
    assert cluster.starts[job_id] == 1


async def test_an_event_that_cannot_be_read_is_kept_and_passed_over(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await started(jobs, cluster)
        supervisor.say(EventKind.ATTEMPT_FORMING, attempt="one")
        supervisor.say(EventKind.CHECKPOINT_SAVED, uri="/x", step="many", attempt=1)
        supervisor.say(EventKind.PHASE, phase="SLEEPING")
        supervisor.form(1)
        supervisor.end()
        await until_state(jobs, supervisor.launch.job_id, State.SUCCEEDED)
    seen = await kinds(jobs, supervisor.launch.job_id)
    assert seen.count("event.unreadable") == 3
    assert len(await jobs.attempts(supervisor.launch.job_id)) == 1


async def test_clean_up_that_does_not_end_is_reported_and_tried_on(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    hasty = settings.model_copy(update={"release_deadline_s": 0.1, "error_retry_max_s": 0.05})
    async with reconciling(store, cluster, hasty):
        supervisor = await started(jobs, cluster)
        job_id = supervisor.launch.job_id
        cluster.sticky.add(job_id)
        supervisor.end()

        async def overdue() -> bool:
            return "release.overdue" in await kinds(jobs, job_id)

        await until(overdue)
        assert not (await jobs.get(job_id)).released
        cluster.sticky.clear()
        await until_released(jobs, job_id)


async def test_what_belongs_to_no_living_job_is_reaped(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await started(jobs, cluster)
        supervisor.end()
        await until_released(jobs, supervisor.launch.job_id)
        # As a reconciler that had lost its lease might: a supervisor of a job that is over.
        await cluster.ensure_supervisor(supervisor.launch)
        cluster.supervisors["stranger"] = FakeSupervisor(supervisor.launch)
        living = await started(jobs, cluster)
        await until(lambda: set(cluster.supervisors) == {living.launch.job_id})


@pytest.mark.parametrize("many", [2])
async def test_reconcilers_on_one_store_start_a_job_once(
    store: Store, jobs: JobService, settings: Settings, many: int
) -> None:
    cluster = FakeCluster(Capacity((), can_grow=True))
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
