"""The stored results of supervisor reports, on both databases."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tests.support.service.fake_cluster import FakeCluster, row
from tests.support.service.job_drives import (
    all_digests,
    kinds,
    reconciling,
    submitted,
    until,
    until_state,
)

from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.supervisor_protocol import EventKind, Phase, SupervisorEvent
from holdfast_service.services.checkpoints import CheckpointService
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_workers.protocol.metrics import METRICS


async def test_all_rows_are_stored_before_a_job_is_seen_as_ended(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        supervisor.rows_per_poll = 7
        supervisor.form(1)
        supervisor.run(1, 1, 100)
        supervisor.end()
        await until_state(jobs, supervisor.launch.job_id, State.SUCCEEDED)
        assert len(await all_digests(jobs, supervisor.launch.job_id)) == 100


async def test_step_0_of_a_program_is_a_step(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    """The job starts again from the beginning; its goodput is known from the first step on."""
    program = {"command": "python train.py", "parallel": {"dp_shard": 4}}
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster, **program)
        job_id = supervisor.launch.job_id
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        job = await until_state(jobs, job_id, State.RUNNING)
        assert job.progress.step is None
        assert (await jobs.history.goodput(job_id)).goodput is None
        supervisor.run(1, 0, 0)

        async def has_row() -> bool:
            return bool((await jobs.history.metrics(job_id)).items)

        await until(has_row)
        assert (await jobs.get(job_id)).progress.step == 0
        assert (await jobs.history.goodput(job_id)).goodput is not None
        supervisor.form(2)
        supervisor.run(2, 0, 3)
        supervisor.end()
        await until_state(jobs, job_id, State.SUCCEEDED)
    for points in (None, 16):
        page = await jobs.history.metrics(job_id, points=points, discarded=True)
        assert [(point.step, point.attempt) for point in page.items] == [
            (step, 2) for step in range(4)
        ]
        assert [len(each.points) for each in page.discarded] == [1]
    goodput = await jobs.history.goodput(job_id)
    assert (goodput.steps, goodput.steps_replayed) == (4, 1)


async def test_a_fault_becomes_an_incident_and_the_later_attempt_is_the_history(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        supervisor.run(1, 1, 10)
        await until_state(jobs, job_id, State.RUNNING)
        supervisor.emit(EventKind.INCIDENT_OPENED, incident=1, cause="worker_crash", attempt=1)
        supervisor.enter(Phase.RECOVERING)
        await until_state(jobs, job_id, State.RECOVERING)
        supervisor.emit(EventKind.ATTEMPT_ENDED, attempt=1, reason="rank 0 died", last_step=10)
        supervisor.form(2, restore_step=9)
        supervisor.emit(
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
    points = (await jobs.history.metrics(job_id)).items
    assert [(point.step, point.attempt) for point in points] == [
        *((step, 1) for step in range(1, 10)),
        *((step, 2) for step in range(10, 21)),
    ]
    assert points[0].values == {
        name: getattr(row(1, 1), name)
        for name, metric in METRICS.items()
        if not metric.derived_from
    } | {"tokens_per_second": 40960.0}
    (incident,) = (await jobs.history.incidents(job_id)).items
    assert (incident.decision, incident.steps_lost, incident.phases_s) == (
        "re-form",
        1,
        {"total": 0.2},
    )
    first, second = (await jobs.history.attempts(job_id)).items
    assert (first.state, first.reason, second.state) == ("ended", "rank 0 died", "running")
    assert "digest.mismatch" not in await kinds(jobs, job_id)


async def test_a_recomputed_step_with_different_bits_is_reported(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        supervisor.run(1, 1, 3)
        await until(lambda: _has_digests(jobs, supervisor.launch.job_id, 3))
        supervisor.run(2, 3, 3)
        supervisor.digests[3] = "other"
        supervisor.end()
        await until_state(jobs, supervisor.launch.job_id, State.SUCCEEDED)
    events = (await jobs.history.events(supervisor.launch.job_id)).items
    (mismatch,) = [event.data for event in events if event.kind == "digest.mismatch"]
    assert mismatch == {"step": 3, "stored": "d3", "seen": "other", "attempt": 0}


async def test_other_bits_of_a_recomputed_step_are_no_event_where_bits_do_not_repeat(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster, train={"deterministic": "fast"})
        supervisor.run(1, 1, 3)
        await until(lambda: _has_digests(jobs, supervisor.launch.job_id, 3))
        supervisor.run(2, 3, 3)
        supervisor.digests[3] = "other"
        supervisor.end()
        await until_state(jobs, supervisor.launch.job_id, State.SUCCEEDED)
    assert "digest.mismatch" not in await kinds(jobs, supervisor.launch.job_id)


async def test_a_step_that_is_computed_again_on_another_mesh_has_the_digest_of_that_mesh(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.form(1)
        supervisor.run(1, 1, 10)
        await until(lambda: _has_digests(jobs, job_id, 10))
        supervisor.form(2, restore_step=4, mesh={"dp_shard": 1, "tp": 2})
        supervisor.digests.clear()
        supervisor.run(2, 5, 12)
        supervisor.digests |= {step: f"other{step}" for step in range(5, 13)}
        supervisor.end()
        await until_state(jobs, job_id, State.SUCCEEDED)
    found = await all_digests(jobs, job_id)
    assert found == {s: f"d{s}" if s <= 4 else f"other{s}" for s in range(1, 13)}
    assert "digest.mismatch" not in await kinds(jobs, job_id)


async def test_a_return_behind_the_last_change_of_the_mesh_forgets_the_digests_after_it(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    mesh = {"dp_shard": 1, "tp": 2}
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.form(1)
        supervisor.run(1, 1, 6)
        supervisor.form(2, restore_step=6, mesh=mesh)
        supervisor.run(2, 7, 10)
        await until(lambda: _has_digests(jobs, job_id, 10))
        supervisor.form(3, restore_step=4, mesh=mesh)  # steps 5 and 6 on this mesh, too
        supervisor.digests.clear()
        supervisor.run(3, 5, 12)
        supervisor.digests |= {step: f"other{step}" for step in range(5, 13)}
        supervisor.end()
        await until_state(jobs, job_id, State.SUCCEEDED)
    found = await all_digests(jobs, job_id)
    assert found == {s: f"d{s}" if s <= 4 else f"other{s}" for s in range(1, 13)}
    assert "digest.mismatch" not in await kinds(jobs, job_id)


async def _has_digests(jobs: JobService, job_id: str, count: int) -> bool:
    return len(await all_digests(jobs, job_id)) == count


async def test_a_user_error_ends_the_job_with_its_traceback(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        supervisor.end("FAILED", "user_error", message="ValueError", traceback="Tr \0 \ud800")
        job = await until_state(jobs, supervisor.launch.job_id, State.FAILED)
    assert job.outcome is not None
    assert (job.outcome.code, job.outcome.traceback) == ("user_error", "Tr \ufffd ?")


async def test_an_attempt_without_a_reported_end_ends_with_the_next(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        saved: dict[str, Any] = {"step": 5, "attempt": 1, "uri": "/c/5", "nbytes": 7}
        supervisor.form(1)
        supervisor.emit(EventKind.CHECKPOINT_SAVED, **saved)
        supervisor.form(2, restore_step=5)
        supervisor.emit(EventKind.CHECKPOINT_SAVED, **{**saved, "nbytes": 0})
        supervisor.end()
        job = await until_state(jobs, supervisor.launch.job_id, State.SUCCEEDED)
    first, second = (await jobs.history.attempts(job.id)).items
    assert (first.state, second.state) == ("ended", "running")
    (checkpoint,) = (await CheckpointService(store, settings).list(job.id)).items
    assert checkpoint.nbytes == 7


async def test_chosen_intervals_are_shown_with_their_reasons(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        measured: dict[str, Any] = {
            "cost_s": 0.2,
            "mtbf_s": 1e6,
            "step_s": 0.1,
            "why": "a save costs 0.2 s",
        }
        for before, after in ((20, 40), (40, 500)):
            supervisor.emit(
                EventKind.CHECKPOINT_INTERVAL,
                tier="remote",
                every_steps=after,
                before=before,
                **measured,
            )
        supervisor.end()
        job = await until_state(jobs, supervisor.launch.job_id, State.SUCCEEDED)
    (chosen,) = job.intervals.items()
    assert chosen[0] == "remote"
    assert (chosen[1].every_steps, chosen[1].before) == (500, 40)
    assert chosen[1].why == "a save costs 0.2 s"


async def test_an_unreadable_end_still_ends_the_job(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        supervisor.form(1)
        supervisor.end(step="the last")
        job = await until_state(jobs, supervisor.launch.job_id, State.FAILED)
    assert job.outcome is not None
    assert "EndedEvent: step" in job.outcome.message
    seen = await kinds(jobs, job.id)
    assert seen[seen.index("ended") + 1] == "event.unreadable"


async def test_kinds_and_fields_of_a_newer_supervisor_are_stored_as_they_came(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        supervisor.form(1)
        seq = supervisor.events[-1].seq + 1
        supervisor.events.append(SupervisorEvent(seq, 2000.0, "rank.renamed", {"rank": 3}))
        incident: dict[str, Any] = {
            "incident": 1,
            "cause": "gamma_ray",
            "attempt": 1,
            "planet": "earth",
        }
        supervisor.emit(EventKind.INCIDENT_OPENED, **incident)
        supervisor.end()
        job = await until_state(jobs, supervisor.launch.job_id, State.SUCCEEDED)
    stored = {event.kind: event.data for event in (await jobs.history.events(job.id)).items}
    assert stored["rank.renamed"] == {"rank": 3}
    assert stored["incident.opened"] == incident
    assert "event.unreadable" not in stored
    (shown,) = (await jobs.history.incidents(job.id)).items
    assert shown.cause == "gamma_ray"


async def test_a_gap_in_the_events_of_a_supervisor_is_reported(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        supervisor.form(1)
        known = len(supervisor.events)
        last = supervisor.events[-1].seq
        supervisor.end()
        later = [replace(event, seq=event.seq + 3) for event in supervisor.events[known:]]
        supervisor.events[known:] = later
        await until_state(jobs, supervisor.launch.job_id, State.SUCCEEDED)
    events = (await jobs.history.events(supervisor.launch.job_id)).items
    lost = [event.data for event in events if event.kind == "events.lost"]
    assert lost == [{"after": last, "before": last + 4}]


async def test_a_gap_in_the_rows_of_a_job_is_reported(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        supervisor.run(1, 1, 10)
        supervisor.form(2, restore_step=8)
        supervisor.run(2, 9, 12)  # the same steps again are no gap
        supervisor.form(3, restore_step=14)  # the rows of steps 13 and 14 are in no agent
        supervisor.run(3, 15, 20)
        supervisor.end()
        await until_state(jobs, job_id, State.SUCCEEDED)
    events = (await jobs.history.events(job_id)).items
    lost = [event.data for event in events if event.kind == "rows.lost"]
    assert lost == [{"attempt": 3, "after": 12, "before": 15}]


PROGRAM = {"recipe": "pretrain", "parallel": {"dp_shard": 4}, "command": "trainer"}


async def test_a_program_may_report_any_step_and_any_metric(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster, **PROGRAM)
        job_id = supervisor.launch.job_id
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        supervisor.rows += [
            replace(row(1, 10, loss=3.0), grad_norm=math.nan, lr=math.nan, tokens=0),
            replace(row(1, 20, loss=math.nan), grad_norm=math.nan, lr=math.nan, tokens=0),
        ]
        supervisor.step = 20
        await until_step(jobs, job_id, 20)
        job = await jobs.get(job_id)
        supervisor.end()
        await until_state(jobs, job_id, State.SUCCEEDED)
    assert (job.progress.step, job.progress.steps) == (20, None)
    assert (job.progress.loss, job.progress.tokens_per_second) == (3.0, None)
    assert "rows.lost" not in await kinds(jobs, job_id)
    for page in (await jobs.history.metrics(job_id), await jobs.history.metrics(job_id, points=50)):
        first, second = page.items
        assert (first.step, first.values["loss"]) == (10, 3.0)
        assert (second.step, second.values["loss"], second.values["lr"]) == (20, None, None)
        assert second.values["tokens_per_second"] is None


async def test_the_level_of_a_program_follows_its_newest_event(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster, **PROGRAM)
        job_id = supervisor.launch.job_id
        queued = await jobs.get(job_id)
        assert (queued.brings, queued.level, queued.next_level) == ("command", None, None)
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        await until_state(jobs, job_id, State.RUNNING)
        launched = await jobs.get(job_id)
        assert (launched.level, launched.integration) == (0, None)
        assert launched.next_level is not None and launched.next_level.level == 1
        supervisor.emit(EventKind.PROGRAM_ATTACHED, attempt=1, level=1, integration="lightning")
        supervisor.end()
        await until_state(jobs, job_id, State.SUCCEEDED)
    assert (await jobs.history.goodput(job_id)).goodput is None, "it has reported no step"
    attached = await jobs.get(job_id)
    assert (attached.level, attached.integration) == (1, "lightning")
    assert attached.gives is not None and attached.gives.startswith("Holdfast also sees every step")


async def until_step(jobs: JobService, job_id: str, step: int) -> None:
    async def reached() -> bool:
        return ((await jobs.get(job_id)).progress.step or 0) >= step

    await until(reached)
