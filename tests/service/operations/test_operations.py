"""Operations outlive the server that carries them out: each effect happens once, or not at all."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import tarfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, load_file
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError
from tests.support.checkpoint.model_checkpoint import save_model
from tests.support.checkpoint.saved_worlds import global_state, save_world
from tests.support.service.job_drives import until
from tests.support.service.saved_checkpoints import MESH, spoil
from tests.support.waiting import DEADLINE_S

from holdfast_service.crash_points import CrashHook, CrashPoint, never_crash
from holdfast_service.errors import (
    ContentGone,
    NoContent,
    OperationEnded,
    OperationNotFound,
)
from holdfast_service.job_model.model_memory import shapes_of
from holdfast_service.job_model.operations import (
    ExportedWeights,
    ExportForm,
    OperationKind,
    OperationState,
    ParameterNames,
)
from holdfast_service.operations import runner as runner_module
from holdfast_service.operations.export_files import ExportFiles
from holdfast_service.operations.runner import MAX_STARTS, OperationRunner
from holdfast_service.operations.service import OperationService
from holdfast_service.services.checkpoints import CheckpointService
from holdfast_service.services.job_removal import JobRemoval
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store import leases
from holdfast_service.store.engine import Store
from holdfast_service.store.lease_holder import LeaseHolder
from holdfast_service.store.models import Checkpoint, Event, JobRecord, LeaseOwner, Operation
from holdfast_service.views.operations import OperationView
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.manifest import MANIFEST, Manifest
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.retention import quarantine
from holdfast_workers.checkpoint.storage import Storage
from holdfast_workers.models.llama_parameters import hugging_face_name
from holdfast_workers.published.kept_tokenizer import keep_tokenizer
from holdfast_workers.published.weight_set import digest_of
from holdfast_workers.spec import (
    DataSpec,
    ModelSpec,
    PreparedSpec,
    SourceSpec,
    TrainingSpec,
    TrainSpec,
)

STEP = 4
POINTS = (CrashPoint.OPERATION_CLAIMED, CrashPoint.OPERATION_WORKED, CrashPoint.OPERATION_ENDED)


class Killed(BaseException):
    """Ends a task as a SIGKILL ends a process: nothing cleans up."""


@dataclass
class World:
    """A job with a checkpoint, and what users and servers do with it."""

    store: Store
    settings: Settings
    job: str
    folder: Path

    def __post_init__(self) -> None:
        self.checkpoints = CheckpointService(self.store, self.settings)
        self.files = ExportFiles(self.settings.data_dir / "exports")
        self.service = OperationService(
            self.store, self.checkpoints, self.files, self.settings, lambda: None
        )

    @asynccontextmanager
    async def runner(self, hook: CrashHook = never_crash) -> AsyncIterator[OperationRunner]:
        runner = OperationRunner(self.store, self.checkpoints, self.files, self.settings, hook)
        running = asyncio.create_task(runner.run())
        try:
            yield runner
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def ended(self, operation: OperationView) -> OperationView:
        async def has_ended() -> bool:
            return (await self.service.get(operation.id)).state.ended

        await until(has_ended)
        return await self.service.get(operation.id)

    async def perform(self, operation: OperationView) -> OperationView:
        async with self.runner():
            return await self.ended(operation)

    async def let_leases_expire(self) -> None:
        held = LeaseOwner.id.in_(select(Operation.lease_owner))
        async with self.store.write() as session:
            await session.execute(update(LeaseOwner).where(held).values(until=0.0))

    async def events(self) -> Counter[str]:
        async with self.store.read() as session:
            kinds = await session.scalars(select(Event.kind).where(Event.job_id == self.job))
            return Counter(kind for kind in kinds if kind.startswith("checkpoint."))

    async def report(self, made: Manifest) -> None:
        row = Checkpoint(
            job_id=self.job,
            uri=made.uri,
            step=made.step,
            attempt=1,
            tier="remote",
            nbytes=made.nbytes,
            mesh=made.mesh,
            metrics=made.metrics,
            saved_at=time.time(),
        )
        async with self.store.write() as session:
            session.add(row)

    def exported(self) -> list[Path]:
        return sorted((self.settings.data_dir / "exports").glob("*"))


@pytest.fixture
async def world(store: Store, settings: Settings, jobs: JobService) -> World:
    job, _ = await jobs.submit({"name": "saved"})
    root = settings.job_dir(job.id) / "checkpoints"
    made = save_world(open_storage(str(root)), STEP, 1, MESH, STEP, {"loss": 1.0})
    world = World(store, settings, job.id, Path(made.uri))
    await world.report(made)
    return world


def requested(world: World, kind: OperationKind) -> Awaitable[OperationView]:
    if kind is OperationKind.VERIFY:
        return world.service.verify(world.job, STEP)
    return world.service.export(world.job, STEP, ExportForm())


@pytest.mark.parametrize("kind", list(OperationKind))
@pytest.mark.parametrize("point", POINTS)
async def test_a_server_that_dies_is_replaced_and_each_effect_happens_once(
    world: World, kind: OperationKind, point: CrashPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = asyncio.Event()

    async def die(reached: CrashPoint) -> None:
        if reached is point:
            died.set()
            raise Killed

    async def expire(holder: LeaseHolder, within_s: float) -> None:
        """Instead of leaving."""

    operation = await requested(world, kind)
    with monkeypatch.context() as killed:
        killed.setattr(LeaseHolder, "leave", expire)
        async with world.runner(die):
            await asyncio.wait_for(died.wait(), DEADLINE_S)
    left = await world.service.get(operation.id)
    assert left.state.ended == (point is CrashPoint.OPERATION_ENDED)
    async with world.runner() as other:
        await asyncio.sleep(0.1)
        assert (await world.service.get(operation.id)).state == left.state, "its lease is alive"
        await world.let_leases_expire()
        done = await world.ended(operation)
        await other._expire()  # removes what the dead server left
    assert done.state is OperationState.SUCCEEDED
    assert done.done_bytes == done.total_bytes
    if kind is OperationKind.VERIFY:
        assert await world.events() == {"checkpoint.verified": 1}
    else:
        assert len(world.exported()) == 1
        with (await world.service.content(operation.id)).file as file:
            loaded = load_file(f"/proc/self/fd/{file.fileno()}")
        assert np.array_equal(loaded["norm"], global_state(STEP)["model.norm"])


async def test_a_server_that_ends_in_order_hands_its_operations_on_at_once(
    world: World, slow: Callable[[], None]
) -> None:
    operation = await requested(world, OperationKind.EXPORT)
    async with world.runner():
        await until(lambda: is_in(world, operation, OperationState.RUNNING))
    assert (await world.service.get(operation.id)).state is OperationState.PENDING
    slow()
    assert (await world.perform(operation)).state is OperationState.SUCCEEDED
    async with world.store.read() as session:
        assert (await session.get_one(Operation, operation.id)).starts == 1


async def test_an_operation_that_ends_its_servers_is_given_up(world: World) -> None:
    operation = await requested(world, OperationKind.VERIFY)
    async with world.store.write() as session:
        await session.execute(update(Operation).values(starts=MAX_STARTS))
    failed = await world.perform(operation)
    assert failed.state is OperationState.FAILED
    assert failed.error is not None and failed.error["code"] == "operation_abandoned"


@pytest.mark.parametrize("kind", list(OperationKind))
async def test_a_cancelled_operation_leaves_nothing(
    world: World, kind: OperationKind, slow: Callable[[], None]
) -> None:
    operation = await requested(world, kind)
    async with world.runner() as runner:
        await until(lambda: is_in(world, operation, OperationState.RUNNING))
        cancelled = await world.service.cancel(operation.id)
        assert cancelled.state is OperationState.CANCELLED
        slow()
        await until(lambda: not runner._leases.tasks)
        await runner._expire()
    assert await world.service.cancel(operation.id) == cancelled
    assert await world.events() == {}
    assert world.exported() == []
    with pytest.raises(NoContent):
        await world.service.content(operation.id)
    again = await requested(world, kind)
    assert again.id != operation.id
    done = await world.perform(again)
    with pytest.raises(OperationEnded):
        await world.service.cancel(done.id)


async def test_equal_requests_share_an_operation_and_an_export_its_file(world: World) -> None:
    for kind in OperationKind:
        first, second = await asyncio.gather(requested(world, kind), requested(world, kind))
        assert first.id == second.id
        done = await world.perform(first)
        later = await requested(world, kind)
        assert (later.id == done.id) == (kind is OperationKind.EXPORT)
        await world.perform(later)
    other = await world.service.export(world.job, STEP, ExportForm(ParameterNames.HUGGING_FACE))
    assert (await world.perform(other)).state is OperationState.FAILED
    assert len(world.exported()) == 1
    world.exported()[0].unlink()
    assert (await requested(world, OperationKind.EXPORT)).state is OperationState.PENDING


async def test_an_export_for_hugging_face_is_a_folder_with_the_tokenizer_of_its_store(
    world: World, tmp_path: Path
) -> None:
    files = {"tokenizer.json": b"{}", "tokenizer_config.json": b'{"eos_token": "</s>"}'}
    digest = digest_of(files["tokenizer.json"])
    roots = (world.settings.data_dir, tmp_path / "other")
    own, foreign = (str(root / "tokens" / digest) for root in roots)
    for step, uri in ((5, own), (6, foreign)):
        record = keep_tokenizer(open_storage(uri), files)
        prepared = PreparedSpec(
            uri=uri,
            origin="",
            digest=digest,
            vocabulary=256,
            tokens=9,
            tokenizer=digest,
            tokenizer_files=record,
        )
        sources = (SourceSpec(path="/texts"),)
        data = DataSpec(tokenizer="/models/own", sources=sources, prepared=(prepared,))
        training = TrainingSpec(model=ModelSpec(dim=16, layers=1, heads=2), data=data)
        await world.report(save_model(open_storage(str(world.folder.parent)), step, training))
    hugging_face = ExportForm(ParameterNames.HUGGING_FACE)
    done = await world.perform(await world.service.export(world.job, 5, hugging_face))
    assert done.content is not None, done.error
    assert (done.content.name, done.content.note) == ("step-00000005.tar", None)
    with (await world.service.content(done.id)).file as file, tarfile.open(fileobj=file) as tar:
        names = {*files, "config.json", "generation_config.json", "model.safetensors"}
        assert set(tar.getnames()) == names
        for name, content in files.items():
            member = tar.extractfile(name)
            assert member is not None and member.read() == content
    refused = await world.perform(await world.service.export(world.job, 6, hugging_face))
    assert refused.error is not None
    assert refused.error["code"] == "not_exportable"
    assert f"{foreign}, which is not in the store of its job" in refused.error["detail"]
    assert len(world.exported()) == 1


async def test_the_moving_average_is_exported_in_both_forms(world: World) -> None:
    train = TrainSpec(ema=0.9)
    training = TrainingSpec(model=ModelSpec(dim=16, layers=1, heads=2), train=train)
    values = {
        name: np.random.default_rng(3).random(shape, np.float32)
        for name, shape in shapes_of(training).items()
    }
    root = open_storage(str(world.folder.parent))
    await world.report(save_model(root, 5, training, values=values))
    digests = set()
    for names, weights in product(ParameterNames, ExportedWeights):
        form = ExportForm(names, weights)
        done = await world.perform(await world.service.export(world.job, 5, form))
        assert done.content is not None, done.error
        assert done.weights is weights
        digests.add(done.content.digest)
        with (await world.service.content(done.id)).file as file:
            content = file.read()
        if names is ParameterNames.HUGGING_FACE:
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                member = tar.extractfile("model.safetensors")
                assert member is not None
                content = member.read()
        factor = 2 if weights is ExportedWeights.AVERAGE else 1
        loaded = load(content)
        for name, expected in values.items():
            is_folder = names is ParameterNames.HUGGING_FACE
            found = loaded[hugging_face_name(name) if is_folder else name]
            assert np.array_equal(found, factor * expected)
        assert len(loaded) == len(values)
    assert len(digests) == 4


async def test_an_average_that_a_run_does_not_have_is_not_exported(world: World) -> None:
    form = ExportForm(weights=ExportedWeights.AVERAGE)
    refused = await world.perform(await world.service.export(world.job, STEP, form))
    assert refused.error is not None
    assert refused.error["code"] == "not_exportable"
    assert "train.ema" in refused.error["detail"]


async def test_a_bad_checkpoint_is_quarantined_and_not_exported(world: World) -> None:
    spoil(world.folder)
    verified = await world.perform(await requested(world, OperationKind.VERIFY))
    assert verified.state is OperationState.SUCCEEDED
    assert "__1_0.distcp" in str(verified.bad)
    assert (world.folder / "why-bad.txt").exists()
    assert await world.events() == {"checkpoint.bad": 1}
    exported = await world.perform(await requested(world, OperationKind.EXPORT))
    assert exported.error is not None and exported.error["code"] == "checkpoint_bad"
    assert world.exported() == []


async def test_what_is_wrong_may_hold_text_that_no_database_stores(world: World) -> None:
    manifest = world.folder / MANIFEST
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, "format": "a\0b \ud800"}))
    verified = await world.perform(await requested(world, OperationKind.VERIFY))
    assert (verified.state, verified.error) == (OperationState.SUCCEEDED, None)
    assert "\0" not in str(verified.bad)
    assert await world.events() == {"checkpoint.bad": 1}
    exported = await world.perform(await requested(world, OperationKind.EXPORT))
    assert exported.error is not None and exported.error["code"] == "checkpoint_bad"


@pytest.mark.parametrize("kind", list(OperationKind))
async def test_a_checkpoint_that_is_removed_meanwhile_is_not_bad(
    world: World, kind: OperationKind, slow: Callable[[], None]
) -> None:
    operation = await requested(world, kind)
    async with world.runner():
        await until(lambda: is_in(world, operation, OperationState.RUNNING))
        await asyncio.sleep(0.2)  # it has read the manifest
        shutil.rmtree(world.folder)
        slow()
        failed = await world.ended(operation)
    assert failed.error is not None and failed.error["code"] == "checkpoint_not_found"
    assert await world.events() == {}


async def bad_in_database(world: World) -> str | None:
    async with world.store.read() as session:
        return (await session.get_one(Checkpoint, (world.job, str(world.folder)))).bad


async def test_a_verification_that_is_cancelled_before_its_result_is_stored_marks_nothing(
    world: World,
) -> None:
    spoil(world.folder)
    operation = await requested(world, OperationKind.VERIFY)

    async def cancel(reached: CrashPoint) -> None:
        if reached is CrashPoint.OPERATION_WORKED:
            await world.service.cancel(operation.id)

    async with world.runner(cancel) as runner:
        await world.ended(operation)
        await until(lambda: not runner._leases.tasks)
    assert not (world.folder / "why-bad.txt").exists()
    assert await bad_in_database(world) is None
    assert await world.events() == {}


@pytest.mark.parametrize("by_user", [True, False])
async def test_a_verification_that_ends_while_it_marks_leaves_the_mark_and_its_reason(
    world: World, monkeypatch: pytest.MonkeyPatch, *, by_user: bool
) -> None:
    """Cancelled by a user, or because its server ends: then another one carries on."""
    marking, proceed, marked = threading.Event(), threading.Event(), threading.Event()

    def slowly(storage: Storage, why: str) -> None:
        marking.set()
        assert proceed.wait(DEADLINE_S)
        quarantine(storage, why)
        marked.set()

    monkeypatch.setattr(runner_module, "quarantine", slowly)
    monkeypatch.setattr(runner_module, "PROGRESS_S", 0.05)
    spoil(world.folder)
    operation = await requested(world, OperationKind.VERIFY)
    async with world.runner() as runner:
        await until(marking.is_set)
        if by_user:
            await world.service.cancel(operation.id)
            await until(lambda: not runner._leases.tasks)
    proceed.set()
    await until(marked.is_set)
    assert (world.folder / "why-bad.txt").exists()
    assert "__1_0.distcp" in str(await bad_in_database(world))
    if not by_user:
        done = await world.perform(operation)
        assert (done.state, "__1_0.distcp" in str(done.bad)) == (OperationState.SUCCEEDED, True)
    assert await world.events() == {"checkpoint.bad": 1}


async def test_a_database_that_fails_for_a_moment_fails_no_operation(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, failures = OperationRunner._end, 0

    def fails_once(*arguments: Any) -> None:
        nonlocal failures
        failures += 1
        if failures == 1:
            raise OperationalError("COMMIT", {}, Exception("the server closed the connection"))
        end(*arguments)

    monkeypatch.setattr(OperationRunner, "_end", fails_once)
    world.settings = world.settings.model_copy(update={"lease_s": 0.6})
    operation = await requested(world, OperationKind.VERIFY)
    done = await world.perform(operation)
    assert (done.state, failures) == (OperationState.SUCCEEDED, 2)
    assert await world.events() == {"checkpoint.verified": 1}


async def test_a_file_that_appears_during_the_clean_up_is_kept(
    world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed: list[str] = []
    await requested(world, OperationKind.EXPORT)
    (world.settings.data_dir / "exports").mkdir()
    world.files._path("of-a-dead-server").write_bytes(b"")

    async def claimed_before(runner: OperationRunner) -> set[str]:
        await leases.renew(store, Operation, "server", [], 3600.0)
        claimed.extend(lease.token for lease in await leases.claim(store, Operation, "server", 1))
        world.files._path(claimed[0]).write_bytes(b"begun")
        return await read(runner)

    read = OperationRunner._tokens_of_files
    monkeypatch.setattr(OperationRunner, "_tokens_of_files", claimed_before)
    runner = OperationRunner(store, world.checkpoints, world.files, world.settings)
    await runner._expire()
    assert world.files.tokens() == set(claimed)


async def test_a_silent_storage_fails_the_operation_by_its_deadline(
    world: World, slow: Callable[[], None]
) -> None:
    world.settings = world.settings.model_copy(update={"storage_deadline_s": 0.3})
    operation = await requested(world, OperationKind.VERIFY)
    failed = await world.perform(operation)
    assert failed.error is not None and failed.error["code"] == "storage_unavailable"
    assert "0.3 s" in failed.error["detail"]


async def test_operations_expire_with_their_files_and_go_with_their_job(
    world: World, store: Store, settings: Settings, jobs: JobService
) -> None:
    done = await world.perform(await requested(world, OperationKind.EXPORT))
    content = await world.service.content(done.id)
    content.file.close()
    async with store.write() as session:
        await session.execute(update(Operation).values(expires_at=time.time() - 1))
    async with world.runner() as runner:
        await runner._expire()
    assert world.exported() == []
    with pytest.raises(OperationNotFound):
        await world.service.get(done.id)

    done = await world.perform(await requested(world, OperationKind.EXPORT))
    world.exported()[0].unlink()
    with pytest.raises(ContentGone):
        await world.service.content(done.id)
    await requested(world, OperationKind.VERIFY)
    await jobs.cancel(world.job)
    async with store.write() as session:
        await session.execute(update(JobRecord).values(cleaned=True))
    await JobRemoval(store, world.checkpoints, settings).remove(world.job, with_checkpoints=False)
    assert (await world.service.list()).items == ()


async def test_lists_are_pages_newest_first(world: World) -> None:
    made = []
    for _ in range(3):
        made.append(await world.perform(await requested(world, OperationKind.VERIFY)))
    first = await world.service.list(limit=2)
    rest = await world.service.list(limit=2, cursor=first.next_cursor, job_id=world.job)
    listed = [operation.id for page in (first, rest) for operation in page.items]
    assert listed == [operation.id for operation in reversed(made)]
    assert rest.next_cursor is None
    assert (await world.service.list(active=True)).items == ()
    assert len((await world.service.list(active=False)).items) == 3


async def is_in(world: World, operation: OperationView, state: OperationState) -> bool:
    return (await world.service.get(operation.id)).state is state


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Reads of checkpoints wait until this is called."""
    proceed, opened = threading.Event(), LocalStorage.open

    def wait(self: LocalStorage, name: str) -> object:
        assert proceed.wait(DEADLINE_S)
        return opened(self, name)

    monkeypatch.setattr(LocalStorage, "open", wait)
    monkeypatch.setattr(runner_module, "PROGRESS_S", 0.05)
    return proceed.set
