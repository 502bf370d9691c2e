"""Jobs after a restore: those that run are adopted, those that may have gone on are not started."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.service.databases import fast_settings, new_database
from tests.support.service.fake_cluster import FakeCluster, three_nodes
from tests.support.service.job_drives import (
    JOB,
    kinds,
    reconciling,
    submitted,
    until,
    until_state,
    until_waits,
)

from holdfast_service.backup.make import make_backup
from holdfast_service.backup.restore import restore
from holdfast_service.job_model.lifecycle import Desired, Phase, State
from holdfast_service.reconcile.restored_job import Sighting, Verdict, judge
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_workers.checkpoint.fence_objects import epoch_object

Back = Callable[[], Awaitable[tuple[JobService, Store, Settings]]]


@pytest.fixture
def saved(settings: Settings, tmp_path: Path) -> Callable[[], Awaitable[None]]:
    """Makes the backup."""

    async def save() -> None:
        path = tmp_path / "backup"
        await make_backup(settings, path, with_keys=True, replace=False)

    return save


@pytest.fixture
async def back(
    request: pytest.FixtureRequest, settings: Settings, cluster: FakeCluster, tmp_path: Path
) -> AsyncIterator[Back]:
    """Restores the backup into an empty database of the same kind, beside the former data."""
    opened = []

    async def bring_back() -> tuple[JobService, Store, Settings]:
        url = f"sqlite:///{tmp_path / 'restored.db'}"
        if settings.database_url is not None:
            url = await new_database(request.getfixturevalue("postgres_server"))
        restored = fast_settings(tmp_path, url)
        await restore(restored, tmp_path / "backup", check=False)
        store = await Store.open(restored)
        opened.append(store)
        return JobService(store, cluster, restored), store, restored

    yield bring_back
    for store in opened:
        await store.close()


async def reasons(jobs: JobService, job_id: str) -> list[str]:
    events = (await jobs.history.events(job_id, limit=1000)).items
    return [str(event.data.get("reason")) for event in events if event.kind == "job.state"]


async def steps(jobs: JobService, job_id: str) -> set[int]:
    return {digest.step for digest in (await jobs.history.digests(job_id)).items}


async def test_a_job_that_still_runs_is_adopted_and_lost_rows_are_reported(
    store: Store, settings: Settings, cluster: FakeCluster, jobs: JobService, saved: Any, back: Back
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.train(10)
        await until(lambda: stored(jobs, job_id, 10))
        await saved()
        supervisor.run(1, 11, 30)
        await until(lambda: stored(jobs, job_id, 30))
    del supervisor.rows[:20]  # the former server has stored them
    restored, new_store, new_settings = await back()
    assert (await restored.get(job_id)).progress.step == 10
    async with reconciling(new_store, cluster, new_settings):
        await until(lambda: stored(restored, job_id, 30))
        assert (await restored.get(job_id)).state is State.RUNNING
        supervisor.end()
        await until_state(restored, job_id, State.SUCCEEDED)
    assert cluster.starts[job_id] == 1
    assert await steps(restored, job_id) == {*range(1, 11), *range(21, 31)}
    lost = [
        e.data
        for e in (await restored.history.events(job_id, limit=1000)).items
        if e.kind == "rows.lost"
    ]
    assert lost == [{"attempt": 1, "after": 10, "before": 21}]


async def stored(jobs: JobService, job_id: str, step: int) -> bool:
    return step in await steps(jobs, job_id)


async def test_a_job_that_is_gone_is_paused_and_continues_only_when_it_is_resumed(
    store: Store, settings: Settings, cluster: FakeCluster, jobs: JobService, saved: Any, back: Back
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.train(10)
        await until(lambda: stored(jobs, job_id, 10))
        await saved()
        supervisor.end()
        await until_state(jobs, job_id, State.SUCCEEDED)
        await until(lambda: not cluster.supervisors)
    restored, new_store, new_settings = await back()
    async with reconciling(new_store, cluster, new_settings):
        await until_state(restored, job_id, State.PAUSED)
        assert (
            "resume continues from its newest checkpoint" in (await reasons(restored, job_id))[-1]
        )
        assert cluster.starts[job_id] == 1
        await restored.resume(job_id)
        await until(lambda: job_id in cluster.supervisors)
    assert cluster.supervisors[job_id].launch.last_attempt == 1


async def test_a_cluster_that_cannot_be_reached_says_nothing_about_a_job(
    store: Store, settings: Settings, cluster: FakeCluster, jobs: JobService, saved: Any, back: Back
) -> None:
    async with reconciling(store, cluster, settings):
        supervisor = await submitted(jobs, cluster)
        job_id = supervisor.launch.job_id
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        await until_state(jobs, job_id, State.RUNNING)
        await saved()
    restored, new_store, new_settings = await back()
    cluster.unreachable = True
    async with reconciling(new_store, cluster, new_settings):
        await until_waits(restored, job_id, "cluster")
        cluster.silent.add(job_id)  # its supervisor is being restarted
        cluster.unreachable = False
        await until_waits(restored, job_id, "supervisor")
        cluster.silent.clear()
        supervisor.run(1, 1, 5)
        await until(lambda: stored(restored, job_id, 5))
    assert (await restored.get(job_id)).state is State.RUNNING
    assert cluster.starts[job_id] == 1


@pytest.mark.parametrize("since", ["started", "ended", "never ran"])
async def test_a_queued_job_starts_only_if_it_has_not_run_since_the_backup(
    store: Store,
    settings: Settings,
    cluster: FakeCluster,
    jobs: JobService,
    saved: Any,
    back: Back,
    since: str,
) -> None:
    job_id = (await jobs.submit(JOB))[0].id
    await saved()
    if since != "never ran":
        async with reconciling(store, cluster, settings):
            await until(lambda: job_id in cluster.supervisors)
        cluster.supervisors[job_id].enter(Phase.RUNNING)
        fence = settings.job_dir(job_id) / "checkpoints" / "fence"
        fence.mkdir(parents=True)
        (fence / epoch_object(1)).touch()
    if since == "ended":
        del cluster.supervisors[job_id]
    restored, new_store, new_settings = await back()
    async with reconciling(new_store, cluster, new_settings):
        if since == "ended":
            await until_state(restored, job_id, State.PAUSED)
            assert "it has run since the backup" in (await reasons(restored, job_id))[-1]
            assert job_id not in cluster.supervisors
        else:
            await until(lambda: job_id in cluster.supervisors)
            cluster.supervisors[job_id].enter(Phase.RUNNING)
            await until_state(restored, job_id, State.RUNNING)
    assert cluster.starts[job_id] == 1
    assert "supervisor.started" in await kinds(restored, job_id) or since == "ended"


async def test_a_paused_job_that_was_resumed_since_is_adopted_and_an_unknown_job_is_kept(
    store: Store, settings: Settings, cluster: FakeCluster, jobs: JobService, saved: Any, back: Back
) -> None:
    cluster.nodes = three_nodes(roomy=True)
    paused = (await jobs.submit(JOB))[0].id
    await jobs.pause(paused)
    untouched = (await jobs.submit(JOB))[0].id
    await jobs.pause(untouched)
    await saved()
    await jobs.resume(paused)
    async with reconciling(store, cluster, settings):
        unknown = (await submitted(jobs, cluster)).launch.job_id
        await until(lambda: paused in cluster.supervisors)
    restored, new_store, new_settings = await back()
    async with reconciling(new_store, cluster, new_settings):
        cluster.supervisors[paused].enter(Phase.RUNNING)
        await until_state(restored, paused, State.RUNNING)
        looks = cluster.looks
        await until(lambda: cluster.looks > looks + 3)
        assert (await restored.get(untouched)).state is State.PAUSED
    assert unknown in cluster.supervisors and not cluster.releases[unknown]
    assert cluster.starts == {paused: 1, unknown: 1}


@given(
    st.sampled_from([state for state in State if not state.terminal]),
    st.sampled_from(Desired),
    st.builds(Sighting, st.booleans(), st.booleans(), st.booleans()),
    st.booleans(),
)
def test_nothing_is_started_that_may_have_gone_on(
    state: State, desired: Desired, seen: Sighting, patient: bool
) -> None:
    verdict = judge(state, desired, seen, patient=patient)
    here = seen.answers or seen.is_present
    if verdict is Verdict.PAUSE:
        assert not here
    if here and not state.on_cluster:
        assert verdict in (Verdict.ADOPT, Verdict.WAIT)
        assert verdict is Verdict.ADOPT or (patient and not seen.answers)
    if not here and state.on_cluster and desired is not Desired.CANCELLED:
        assert verdict is Verdict.PAUSE
    if not here and state is State.QUEUED:
        assert (verdict is Verdict.PAUSE) == seen.ran_since
