"""`init_from`: the checkpoint it resolves to at submission, and how long that is protected."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoint.model_checkpoint import ALONE, save_model
from tests.support.service.fake_cluster import FakeCluster
from tests.support.service.job_drives import JOB, reconciling, until, until_released
from tests.support.waiting import DEADLINE_S

from holdfast_service.errors import IdempotencyConflict, InvalidSpec
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.services import init_sources, named_folder
from holdfast_service.services import jobs as job_service
from holdfast_service.services.init_sources import InitSources
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.models import Checkpoint, JobRecord
from holdfast_service.views.jobs import JobView
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.manifest import MANIFEST
from holdfast_workers.checkpoint.marks import marks_among
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import Storage, TransientStorageError
from holdfast_workers.protocol.messages import InitPart

SMALL = {"model": {"dim": 32, "layers": 2, "heads": 2, "sequence_length": 16}}
STEPS = (3, 6)


@pytest.fixture
async def source(store: Store, jobs: JobService, settings: Settings) -> JobView:
    """Job `a`, with checkpoints at two steps."""
    job, _ = await jobs.submit({**JOB, **SMALL, "name": "a"})
    for step in STEPS:
        made = save_model(_root(settings, job), step, JobSpec.model_validate(job.spec).training())
        async with store.write() as session:
            session.add(
                Checkpoint(
                    job_id=job.id,
                    uri=made.uri,
                    step=step,
                    attempt=1,
                    tier="remote",
                    nbytes=made.nbytes,
                    mesh=ALONE,
                    metrics={},
                    saved_at=time.time(),
                )
            )
    return job


def _root(settings: Settings, job: JobView) -> Storage:
    return open_storage(str(settings.job_dir(job.id) / "checkpoints"))


def _spec(init_from: Any, **changes: Any) -> dict[str, Any]:
    return {**JOB, **SMALL, "name": "b", "init_from": init_from, **changes}


async def _fault(jobs: JobService, init_from: Any, **changes: Any) -> str:
    with pytest.raises(InvalidSpec) as caught:
        await jobs.submit(_spec(init_from, **changes))
    (fault,) = caught.value.faults
    assert fault["path"] == "init_from"
    return fault["message"]


@pytest.mark.parametrize("step", [None, 3])
async def test_a_source_job_is_given_by_name_or_id_and_an_optional_step(
    jobs: JobService, source: JobView, settings: Settings, step: int | None
) -> None:
    for name in ("a", source.id):
        job, _ = await jobs.submit(_spec(f"{name}/{step}" if step else name))
        assert job.origin is not None
        expected = step or 6
        assert (job.origin.step, job.origin.what) == (expected, InitPart.EVERYTHING)
        assert job.origin.job == source.id
        storage = open_storage(job.origin.uri)
        assert job.origin.uri == f"{_root(settings, source).uri}/step-{expected:08d}.attempt-1"
        assert job.id in marks_among(storage.objects()).needed_by


async def test_validation_of_a_spec_sets_no_mark(
    jobs: JobService, source: JobView, settings: Settings
) -> None:
    await jobs.validate(_spec("a/3"))
    storage = open_storage(f"{_root(settings, source).uri}/step-00000003.attempt-1")
    assert not marks_among(storage.objects()).needed_by
    with pytest.raises(InvalidSpec, match="init_from"):
        await jobs.validate(_spec("a/4"))


async def test_a_job_with_only_the_model_starts_at_step_0(
    jobs: JobService, source: JobView
) -> None:
    job, _ = await jobs.submit(_spec({"from": "a/6", "what": "model"}, train={"seed": 8}))
    assert job.origin is not None
    assert (job.origin.step, job.origin.what) == (0, InitPart.MODEL)


async def test_a_missing_source_is_a_fault(
    jobs: JobService, source: JobView, settings: Settings, tmp_path: Path
) -> None:
    assert "no job 'x'" in await _fault(jobs, "x")
    assert "it has steps 3, 6" in await _fault(jobs, "a/4")
    assert "JOB/STEP" in await _fault(jobs, "a/b/c")
    assert "not a complete checkpoint" in await _fault(jobs, str(tmp_path))
    assert "use an absolute path" in await _fault(jobs, "http://host/x")
    assert ".metadata" in await _fault(jobs, f"dcp:{tmp_path}")
    fresh, _ = await jobs.submit({**JOB, "name": "fresh"})
    assert "no remote checkpoint" in await _fault(jobs, fresh.name)
    manifest = Path(_root(settings, source).uri) / "step-00000006.attempt-1" / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 6', b'"step": 7'))
    assert "own digest" in await _fault(jobs, "a/6")
    manifest.unlink()
    assert "no manifest" in await _fault(jobs, "a/6")


async def test_a_folder_with_more_than_a_checkpoint_is_refused_before_it_is_looked_through(
    jobs: JobService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_folder, "MOST_ENTRIES", 20)
    folder = tmp_path / "home"
    for number in range(15):
        (folder / f"folder{number}" / "inner").mkdir(parents=True)
    for marker in ("", ".metadata"):
        if marker:
            (folder / marker).write_text("{}")
        fault = await _fault(jobs, str(folder))
        assert "more than 20 entries: name the folder of one checkpoint" in fault
    monkeypatch.setattr(named_folder, "MOST_ENTRIES", 1000)
    monkeypatch.setattr(named_folder, "LOOK_S", 0.0)
    assert "took more than 0 s" in await _fault(jobs, str(folder))


def test_a_folder_that_vanishes_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "entry").touch()
    scan = os.scandir
    vanished: list[str] = []

    def one_vanishes(folder: Path) -> Any:
        if folder != tmp_path and not vanished:
            vanished.append(folder.name)
            shutil.rmtree(folder)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", one_vanishes)
    found = named_folder.names_within(tmp_path)
    others = set("abc") - set(vanished)
    assert found == set("abc") | {f"{name}/entry" for name in others}


async def test_folders_that_hang_do_not_keep_jobs_from_starting_from_other_jobs(
    jobs: JobService, source: JobView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proceed = threading.Event()

    def hangs(folder: Path) -> set[str]:
        assert proceed.wait(DEADLINE_S)
        return set()

    monkeypatch.setattr(init_sources, "names_within", hangs)
    async with asyncio.TaskGroup() as looking:
        waiting = [
            looking.create_task(_fault(jobs, str(tmp_path / f"{number}"))) for number in range(20)
        ]
        job, _ = await jobs.submit(_spec("a/3"))
        proceed.set()
    assert job.origin is not None and job.origin.step == 3
    assert all("not a complete checkpoint" in task.result() for task in waiting)


async def test_a_pipe_in_place_of_a_manifest_is_refused_at_once(
    jobs: JobService, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / MANIFEST)
    assert "no regular file" in await _fault(jobs, str(tmp_path))


async def test_a_source_that_does_not_fit_is_a_fault(jobs: JobService, source: JobView) -> None:
    wider = {"model": {**SMALL["model"], "dim": 64}}
    assert "embedding.weight has shape (256, 32) in the checkpoint" in await _fault(
        jobs, "a", **wider
    )
    assert "train.seed is 7 in the checkpoint, 8 in this spec" in await _fault(
        jobs, "a", train={"seed": 8}
    )
    with pytest.raises(InvalidSpec) as caught:
        await jobs.submit(_spec({"from": "dcp:/x", "what": "everything"}))
    assert "only the model can be loaded" in str(caught.value)


async def test_the_source_is_checked_again_once_the_vocabulary_is_known(
    store: Store, settings: Settings, jobs: JobService, source: JobView
) -> None:
    data = {"sources": [{"path": "s3://lab/a"}]}
    job, _ = await jobs.submit(_spec({"from": "a", "what": "model"}, data=data))
    async with store.read() as session:
        origin = (await session.get_one(JobRecord, job.id)).origin
    sources = InitSources(store, settings)

    def known(vocabulary: int) -> JobSpec:
        facts = {
            "uri": "/sets/a",
            "origin": "a",
            "digest": "a" * 32,
            "vocabulary": vocabulary,
            "tokens": 9,
        }
        return JobSpec.model_validate(
            {**job.spec, "data": {**job.spec["data"], "prepared": [facts]}}
        )

    await sources.check_again(known(256), origin)
    await sources.check_again(known(300), None)
    with pytest.raises(InvalidSpec, match="256 tokens in the checkpoint, 300 in this spec"):
        await sources.check_again(known(300), origin)


async def test_a_torch_checkpoint_folder_is_recognised_by_its_metadata(
    jobs: JobService, tmp_path: Path
) -> None:
    folder = tmp_path / "stock"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"a pickle that the service never opens")
    for named in (str(folder), f"dcp:{folder}"):
        job, _ = await jobs.submit(_spec(named))
        assert job.origin is not None
        assert job.origin.uri == f"dcp:{folder}"
        assert (job.origin.step, job.origin.what) == (0, InitPart.MODEL)


@pytest.mark.parametrize(
    ("folder", "beside"), [("step-00000006.attempt-1", "__0_0.distcp"), ("copy", "removing.mark")]
)
async def test_the_remains_of_a_holdfast_checkpoint_are_not_taken_for_a_torch_checkpoint(
    jobs: JobService, tmp_path: Path, folder: str, beside: str
) -> None:
    left = tmp_path / folder
    left.mkdir()
    for name in (".metadata", beside):
        (left / name).write_bytes(b"of a checkpoint that was never finished, or is half removed")
    assert "it has no manifest" in await _fault(jobs, str(left))


async def test_a_damaged_or_unreadable_source_is_a_fault(
    jobs: JobService,
    source: JobView,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damaged = Path(_root(settings, source).uri) / "step-00000006.attempt-1"
    (damaged / MANIFEST).write_bytes(b"{}")
    assert "damaged" in await _fault(jobs, str(damaged))

    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr(Path, "is_file", denied)
    assert "Permission denied" in await _fault(jobs, f"dcp:{tmp_path}")
    monkeypatch.setattr(Path, "read_bytes", denied)
    assert "Permission denied" in await _fault(jobs, str(damaged))


async def test_the_source_is_marked_until_the_job_has_its_own_checkpoint(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings, source: JobView
) -> None:
    await jobs.cancel(source.id)
    job, _ = await jobs.submit(_spec("a/6"))
    assert job.origin is not None
    storage = open_storage(job.origin.uri)
    async with reconciling(store, cluster, settings):
        await until(lambda: job.id in cluster.supervisors, what="a supervisor")
        supervisor = cluster.supervisors[job.id]
        assert supervisor.launch.origin is not None
        assert supervisor.launch.origin.uri == job.origin.uri
        supervisor.form(1, restore_step=6)
        supervisor.run(1, 7, 8)
        await until(lambda: _at_step(jobs, job.id, 8), what="its rows")
        assert marks_among(storage.objects()).needed_by == (job.id,)
        supervisor.emit(EventKind.CHECKPOINT_SAVED, step=7, attempt=1, uri="/own/step-7")
        supervisor.emit(EventKind.CHECKPOINT_BAD, step=7, uri="/own/step-7", message="damaged")
        await until(lambda: _is_bad(store, job.id), what="the bad checkpoint to be known")
        assert marks_among(storage.objects()).needed_by == (job.id,)
        supervisor.emit(EventKind.CHECKPOINT_SAVED, step=8, attempt=1, uri="/own/step-8")
        await until(lambda: not marks_among(storage.objects()), what="the mark to go")


async def test_a_job_that_ends_early_releases_its_source(
    store: Store, jobs: JobService, cluster: FakeCluster, settings: Settings, source: JobView
) -> None:
    job, _ = await jobs.submit(_spec("a/6"))
    assert job.origin is not None
    storage = open_storage(job.origin.uri)
    await jobs.cancel(job.id)
    await jobs.cancel(source.id)
    async with reconciling(store, cluster, settings):
        await until_released(jobs, job.id)
    assert not marks_among(storage.objects())


async def _at_step(jobs: JobService, job_id: str, step: int) -> bool:
    return (await jobs.get(job_id)).progress.step == step


async def _is_bad(store: Store, job_id: str) -> bool:
    async with store.read() as session:
        row = await session.get(Checkpoint, (job_id, "/own/step-7"))
    return row is not None and row.bad is not None


async def test_a_mark_that_cannot_be_removed_does_not_hold_nodes(
    store: Store,
    jobs: JobService,
    cluster: FakeCluster,
    settings: Settings,
    source: JobView,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: LocalStorage, name: str) -> None:
        raise TransientStorageError(self.uri, f"{name} cannot be removed")

    await jobs.cancel(source.id)
    job, _ = await jobs.submit(_spec("a/6"))
    async with reconciling(store, cluster, settings):
        await until(lambda: job.id in cluster.supervisors, what="a supervisor")
        monkeypatch.setattr(LocalStorage, "delete", fails)
        cluster.supervisors[job.id].end()
        await until(lambda: job.id not in cluster.supervisors, what="its release")
        second, _ = await jobs.submit({**JOB, "name": "second"})
        await until(lambda: second.id in cluster.supervisors, what="the nodes to be free")
        assert not (await jobs.get(job.id)).released
        monkeypatch.undo()


async def test_a_job_that_was_not_stored_leaves_no_mark(
    jobs: JobService, source: JobView, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    storage = _root(settings, source).below("step-00000006.attempt-1")
    await jobs.submit(JOB, "key")
    find_by_key = JobService._find_by_key
    unseen = [None]

    async def sees_it_late(self: JobService, key: str, digest: str) -> JobView | None:
        return unseen.pop() if unseen else await find_by_key(self, key, digest)

    monkeypatch.setattr(JobService, "_find_by_key", sees_it_late)
    with pytest.raises(IdempotencyConflict):
        await jobs.submit(_spec("a/6"), "key")
    assert not marks_among(storage.objects())

    def breaks(*_: object) -> None:
        raise RuntimeError("an unexpected error")

    monkeypatch.setattr(job_service, "_submitted_event", breaks)
    with pytest.raises(RuntimeError, match="unexpected error"):
        await jobs.submit(_spec("a/6"))
    assert not marks_among(storage.objects())


async def test_a_silent_storage_does_not_block_the_driver(
    store: Store,
    jobs: JobService,
    cluster: FakeCluster,
    settings: Settings,
    source: JobView,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called, answer = asyncio.Event(), asyncio.Event()
    release = InitSources.release

    async def silent(self: InitSources, job: JobRecord) -> None:
        called.set()
        await answer.wait()
        await release(self, job)

    monkeypatch.setattr(InitSources, "release", silent)
    await jobs.cancel(source.id)
    job, _ = await jobs.submit(_spec("a/6"))
    async with reconciling(store, cluster, settings):
        await until(lambda: job.id in cluster.supervisors, what="a supervisor")
        supervisor = cluster.supervisors[job.id]
        supervisor.form(1, restore_step=6)
        supervisor.run(1, 7, 7)
        supervisor.emit(EventKind.CHECKPOINT_SAVED, step=7, attempt=1, uri="/own/step-7")
        await asyncio.wait_for(called.wait(), DEADLINE_S)
        supervisor.run(1, 8, 9)
        await until(lambda: _at_step(jobs, job.id, 9), what="rows during the release")
        answer.set()
