"""The files of a released version are read by this version: checkpoints, segments, small files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.upgrade.fixture import CLIENT_CONFIG, CORPUS, MEMORY, TRAINED, Written
from tests.support.upgrade.training import SEGMENT_MESH, TrainedStep, resume, segment_payload

from holdfast.client import config as client_config
from holdfast.client.address import (
    ADDRESS_VARIABLE,
    CONTEXT_VARIABLE,
    DATA_DIR_VARIABLE,
    TOKEN_VARIABLE,
    find,
)
from holdfast_service.embedded_cluster.local_cluster import folder
from holdfast_service.store.installation import load_or_create_key
from holdfast_service.supervisor.fence_record import FenceRecord, open_fence
from holdfast_service.supervisor.injection_record import InjectionRecord
from holdfast_workers.checkpoint.fence_objects import FenceFloor
from holdfast_workers.checkpoint.manifest import list_checkpoints, verify
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.memory.segment_store import SegmentStore, mesh_tag
from holdfast_workers.protocol.messages import Place
from holdfast_workers.protocol.processes import StorageOptions


def test_training_continues_from_a_remote_checkpoint(
    written: Written, data_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    trained = written.json(TRAINED, data_dir)
    root = data_dir / "jobs" / trained["job"] / "checkpoints"
    bad: list[str] = []
    storage = open_storage(str(root))
    listed = list_checkpoints(storage, lambda uri, why: bad.append(f"{uri}: {why}"))
    assert bad == []
    [manifest] = listed
    verify(storage.below(manifest.folder), lambda _nbytes: None)
    corpus = data_dir / CORPUS
    continued = resume(corpus, root, manifest, tmp_path_factory.mktemp("cache"))
    before = [TrainedStep(**step) for step in trained["steps"]]
    assert [(step.step, step.samples) for step in continued] == [
        (step.step, step.samples) for step in before
    ]
    losses = [step.loss for step in before]
    assert [step.loss for step in continued] == pytest.approx(losses, rel=1e-4)


def test_memory_checkpoints_are_listed_and_intact(written: Written, tmp_path: Path) -> None:
    source = written.folder / MEMORY
    for path in source.rglob("*.seg"):
        copy = tmp_path / path.relative_to(source)
        copy.parent.mkdir(parents=True)
        copy.write_bytes(path.read_bytes())
    store = SegmentStore(tmp_path, mesh_tag(SEGMENT_MESH))
    held = store.held(verified=True)
    assert sorted((state.rank, state.attempt, state.step) for state in held) == [
        (1, 2, 6),
        (1, 2, 7),
    ]
    segment = store.find(1, Place.OWN)
    assert segment is not None
    for commit in segment.commits():
        assert bytes(segment.payload(commit)) == bytes(segment_payload(commit.step))
    store.close()


def test_small_files_of_the_data_directory_are_read(data_dir: Path) -> None:
    # Version 0.1 kept them in the job's folder, later ones in its remote storage.
    found = (*data_dir.glob("jobs/*/fence.json"), *data_dir.glob("jobs/*/checkpoints/fence"))
    [job_dir] = {data_dir / "jobs" / path.relative_to(data_dir / "jobs").parts[0] for path in found}
    storage = open_fence(str(job_dir / "checkpoints"), StorageOptions())
    fence = FenceRecord(storage)
    assert fence.read(10.0) == FenceFloor(epoch=3, attempt=2)
    assert fence.claim(1, 10.0) == 4
    fence.close()
    faults = InjectionRecord(storage)
    assert not faults.take(1)
    assert faults.take(2)
    assert load_or_create_key(data_dir / "job-secrets.key") == bytes(range(32))
    cluster = folder(data_dir).read()
    assert cluster is not None and cluster.ready
    assert (cluster.cluster_id, cluster.nodes[0].name) == ("c1", "head")


def test_a_stored_login_and_the_file_of_a_server_are_used(
    written: Written, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(client_config.CONFIG_VARIABLE, str(written.folder / CLIENT_CONFIG))
    for variable in (ADDRESS_VARIABLE, CONTEXT_VARIABLE, DATA_DIR_VARIABLE, TOKEN_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    server = find()
    credential = server.find_credential()
    assert credential is not None
    assert (server.address, credential.token) == ("https://holdfast.example", "a-token")
    assert find(data_dir=data_dir).address == "http://127.0.0.1:8642", "of server.json"
