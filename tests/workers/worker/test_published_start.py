"""A worker that begins with published weights: only at step 0, with a verdict on each failure."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from tests.support.checkpoint.published_models import prepared_model, write_folder
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server
from tests.support.nodes.agent_config import agent_config, join_order
from tests.support.nodes.supervised import small_training, supervised
from tests.support.ranks.rank_programs import begin
from tests.support.ranks.rank_worlds import ALONE, RecordingHooks, tiny_spec

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.checkpoint.manifest import checkpoint_folder
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.publish import finalize
from holdfast_workers.checkpoint.shards import save_shard
from holdfast_workers.checkpoint.storage import StorageError, write_small
from holdfast_workers.ipc import control_channel
from holdfast_workers.progress import beacon as beacons
from holdfast_workers.progress.beacon import Beacon, BeaconReader
from holdfast_workers.protocol.messages import ErrorKind, InitPart, Restore, Tier
from holdfast_workers.protocol.processes import (
    JoinAttempt,
    LoadOrder,
    LoadOutcome,
    LoadResult,
    StorageOptions,
    WorkerMessage,
    WorkerSignal,
)
from holdfast_workers.protocol.signals import WorkerDone, WorkerFailed, WorkerJoined
from holdfast_workers.published.weight_reader import WeightsUnavailable
from holdfast_workers.published.weight_set import MANIFEST, BadWeightSet
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.spec import ParallelSpec, TrainingSpec
from holdfast_workers.training.step_loop import train
from holdfast_workers.worker.first_weights import initialize_with_weights
from holdfast_workers.worker.main import Worker
from holdfast_workers.worker.remote_loading import fill_shared, load_object

WAIT_S = 60.0


class ShowsItsPhase(PretrainRecipe):
    """Fails if its beacon does not show that it reads weights, when it does."""

    def initialize(self) -> None:
        reads = self.published_weights is not None
        super().initialize()
        beacon = beacons.current()
        assert beacon is not None
        shown = BeaconReader(beacon.path).read()
        assert shown is not None
        phase = (shown.phase, shown.bound_s, shown.micro_batch > 10)
        assert phase == (("read_weights", 120.0, True) if reads else ("restore_far", 0.0, False))


class PlayedAgent:
    """The agent's side of a worker of one rank."""

    def __init__(self, folder: Path, spec: TrainingSpec) -> None:
        timeouts = {"form_s": 0.0}  # what is away now is not waited for
        config = agent_config(folder, training=spec, timeouts=timeouts).zygote_config
        self._end, theirs = control_channel.pair()
        self._end.settimeout(WAIT_S)
        self._segment, self._attempt = folder / "segment", 0
        path = beacons.path_of(folder, "n0.abc.1")
        beacons.create(path)
        recipe = ShowsItsPhase(spec, folder / "cache")
        self._pid = os.fork()
        if self._pid == 0:
            self._end.close()
            os._exit(Worker(theirs, config, recipe, Beacon(path), None, is_prepared=False).run())
        theirs.close()

    def attempt(self, restore: Restore) -> str:
        """How the next attempt ends."""
        self._attempt += 1
        order = join_order(self._segment, attempt=self._attempt, restore=restore)
        control_channel.send(self._end, JoinAttempt(order))
        began = ""
        while True:
            message = control_channel.receive(self._end, *get_args(WorkerMessage))
            match message.detail if isinstance(message, WorkerSignal) else None:
                case WorkerJoined(step=step):
                    began = f"joined at step {step}"
                case WorkerDone():
                    return began
                case WorkerFailed(error=error):
                    return f"{error.kind.name} {error.type}: {error.message}"

    def close(self) -> None:
        self._end.close()
        os.waitpid(self._pid, 0)


@pytest.fixture
def spec(tmp_path: Path, cache: Path) -> TrainingSpec:
    del cache
    write_folder(tmp_path / "model")
    model = prepared_model(tmp_path / "model", tmp_path / "store")
    return tiny_spec({}, steps=2).model_copy(update={"model": model})


@pytest.fixture
def agent(tmp_path: Path, spec: TrainingSpec) -> Iterator[PlayedAgent]:
    played = PlayedAgent(tmp_path, spec)
    yield played
    played.close()


FIRST = Restore(Tier.INIT, 0)


def test_the_folder_is_needed_at_step_0_and_never_again(
    tmp_path: Path, spec: TrainingSpec, agent: PlayedAgent
) -> None:
    folder, away = tmp_path / "model", tmp_path / "away"
    path = folder / "model.safetensors"
    folder.rename(away)
    assert agent.attempt(FIRST) == (
        f"{ErrorKind.USER.name} CannotBegin: {path}: No such file or directory, on the node "
        f"{socket.gethostname()}: each node must be able to read {folder}"
    )
    away.rename(folder)
    (tmp_path / "store").rename(away)
    expected = f"{ErrorKind.RESTORE.name} RestoreFailed: {tmp_path}/store/manifest.json: "
    assert agent.attempt(FIRST).startswith(expected)
    away.rename(tmp_path / "store")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\xff")
    changed = f"{ErrorKind.USER.name} CannotBegin: {path} has changed since the job was submitted"
    assert agent.attempt(FIRST).startswith(changed)
    path.write_bytes(content)
    assert agent.attempt(FIRST) == "joined at step 0"
    uri = _checkpoint(tmp_path, spec)
    folder.rename(away)
    (tmp_path / "store" / MANIFEST).unlink()
    assert agent.attempt(Restore(Tier.REMOTE, 1, uri=uri)) == "joined at step 1"
    for part, step in ((InitPart.EVERYTHING, 1), (InitPart.MODEL, 0)):
        begins = Restore(Tier.INIT, step, uri=uri, what=part)
        assert agent.attempt(begins) == f"joined at step {step}"


def test_a_folder_that_comes_back_is_waited_for(
    tmp_path: Path, spec: TrainingSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Over(Exception):
        pass

    recipe = PretrainRecipe(spec, tmp_path / "cache")
    recipe.prepare()
    recipe.build(ALONE)
    manifest, folder, away = tmp_path / "store" / MANIFEST, tmp_path / "model", tmp_path / "away"
    folder.rename(away)
    waits: list[int] = []

    def on_read() -> None:
        waits.append(1)
        if len(waits) == 2:
            away.rename(folder)

    initialize_with_weights(recipe, manifest.read_bytes, on_read, patience_s=WAIT_S)
    assert recipe.applied_step == 0
    folder.rename(away)

    def leave() -> None:
        raise Over

    with pytest.raises(Over):
        initialize_with_weights(recipe, manifest.read_bytes, leave, patience_s=WAIT_S)
    with pytest.raises(BadWeightSet, match="No such file or directory, on the node "):
        initialize_with_weights(recipe, manifest.read_bytes)
    away.rename(folder)

    def fail(*_: object) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(WeightsUnavailable, match="Stale file handle, on the node "):
        initialize_with_weights(recipe, manifest.read_bytes)


def _checkpoint(tmp_path: Path, spec: TrainingSpec) -> str:
    """One of the same model at step 1."""
    recipe = PretrainRecipe(spec, tmp_path / "cache")
    recipe.prepare()
    recipe.build(ALONE)
    begin(recipe)
    payload = memoryview(bytearray(recipe.layout().payload_bytes))
    recipe.write_state(payload, 1)
    folder = open_storage(str(tmp_path / "saved")).below(checkpoint_folder(1, 1))
    finalize(folder, [save_shard(folder, payload, recipe.layout(), 0, 1, 1)], ALONE.mesh, {})
    return folder.uri


def test_a_manifest_comes_from_a_bucket_through_the_agent(s3_server: S3Server) -> None:
    options = StorageOptions(endpoint=s3_server.endpoint, credentials=CREDENTIALS, patience_s=1.0)
    uri, content = f"s3://{s3_server.new_bucket()}/job/weights/1", os.urandom(10_000)
    write_small(open_storage(uri, options), MANIFEST, content)
    outcomes: list[LoadOutcome] = []

    def ask(order: LoadOrder) -> LoadOutcome:
        outcomes.append(fill_shared(order, options, Path("/nowhere")))
        return outcomes[-1]

    order = LoadOrder(1, 0, uri, {}, own=False, object_name=MANIFEST, payload_bytes=len(content))
    assert load_object(order, ask) == content
    missing = LoadOrder(1, 0, uri, {}, own=False, object_name="other", payload_bytes=5)
    with pytest.raises(StorageError, match=f"{uri}/other: it does not exist"):
        load_object(missing, ask)
    assert [each.result for each in outcomes] == [LoadResult.LOADED, LoadResult.FAILED]


# --- with real agents -----------------------------------------------------------------------------


@pytest.mark.seconds
def test_a_job_begins_with_a_manifest_that_is_in_a_bucket(
    tmp_path: Path, s3_server: S3Server
) -> None:
    write_folder(tmp_path / "model", parts=2)
    model = prepared_model(tmp_path / "model", tmp_path / "store", sequence_length=64)
    training = small_training(2, model=model)
    alone = training.model_copy(update={"parallel": ParallelSpec()})
    recipe, hooks = PretrainRecipe(alone, tmp_path / "cache"), RecordingHooks()
    recipe.prepare()
    recipe.build(ALONE)
    begin(recipe)
    train(recipe, ALONE, alone, hooks, 0)
    storage = StorageOptions(endpoint=s3_server.endpoint, credentials=CREDENTIALS)
    root = f"s3://{s3_server.new_bucket()}/jobs/1"
    content = (tmp_path / "store" / MANIFEST).read_bytes()
    write_small(open_storage(f"{root}/weights", storage), MANIFEST, content)
    assert model.published is not None
    there = model.published.model_copy(update={"uri": f"{root}/weights"})
    training = small_training(2, model=model.model_copy(update={"published": there}))
    with supervised(
        tmp_path, training, standbys=0, remote=f"{root}/checkpoints", storage=storage
    ) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        found = [run.rows[step].loss for step in (1, 2)]
        assert found == pytest.approx([row.loss for row in hooks.rows], rel=1e-5)


@pytest.mark.seconds
def test_a_folder_that_changed_ends_the_job_after_a_second_look(tmp_path: Path) -> None:
    write_folder(tmp_path / "model")
    model = prepared_model(tmp_path / "model", tmp_path / "store", sequence_length=64)
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with supervised(tmp_path, small_training(2, model=model), standbys=0) as run:
        ended = run.wait_end()
        assert (ended["outcome"], ended["code"]) == ("FAILED", "user_error"), run.story()
        assert f"{path} has changed since the job was submitted" in ended["message"]
        assert len(run.of(EventKind.ATTEMPT_FORMING)) == 2
