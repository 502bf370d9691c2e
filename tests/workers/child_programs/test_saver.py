"""Publication and retention are independent: a failed cleanup never fails a publication."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoint.saved_worlds import global_state, layout_of, payload_of, save_world
from tests.support.nodes.agent_config import agent_config

from holdfast_workers.checkpoint import retention
from holdfast_workers.checkpoint.fence_objects import FENCE_FOLDER, epoch_object
from holdfast_workers.checkpoint.manifest import (
    QUARANTINED,
    Manifest,
    checkpoint_folder,
    list_checkpoints,
)
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import Storage, TransientStorageError, joined
from holdfast_workers.child_programs import saver
from holdfast_workers.ipc import control_channel
from holdfast_workers.memory.segment import Segment
from holdfast_workers.protocol.answers import PublishedCheckpoint
from holdfast_workers.protocol.commands import FinalizeCheckpoint, TidyRemoteTier
from holdfast_workers.protocol.processes import (
    FrozenCopy,
    StorageRefusal,
    TidierJob,
    ZygoteConfig,
)
from holdfast_workers.state.digest import payload_digest

MESH = {"dp_shard": 1, "tp": 1}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    root = open_storage(str(tmp_path / "job"))
    monkeypatch.setattr(saver, "_root", lambda _config: root)
    return root


@contextlib.contextmanager
def _control() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = control_channel.pair()
    with ours, theirs:
        yield ours, theirs


def _config(**remote: Any) -> ZygoteConfig:
    training = {"checkpoint": {"remote": remote}}
    return agent_config(Path("/unused"), mesh=MESH, training=training).zygote_config


def _tidy(
    attempt: int,
    *,
    keep: int,
    bad: frozenset[str] = frozenset(),
    limits: dict[int, int] | None = None,
    epoch: int = 1,
) -> Any:
    command = TidyRemoteTier("n0", attempt, 0, (), bad, limits=limits or {})
    with _control() as (ours, theirs):
        saver.tidy(ours, TidierJob(command, epoch), _config(keep=keep))
        return control_channel.receive(theirs, *TidierJob.answers)


def _save(copies: Path, step: int) -> None:
    path = copies / f"{step}.seg"
    payload = bytes(payload_of(layout_of(MESH, 0), global_state(step), 0))
    with Segment.create(path, layout_of(MESH, 0)) as copy:
        with copy.begin(step) as slot:
            slot[:] = payload
        copy.commit(attempt=1, step=step, digest=payload_digest(payload))
    with _control() as (ours, _theirs):
        saver.save(ours, FrozenCopy(str(path), 0, 1, step), _config())


def _folders(root: Storage) -> list[str]:
    return [manifest.folder for manifest in list_checkpoints(root)]


def test_a_publication_succeeds_although_the_cleanup_of_older_checkpoints_fails(
    root: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(folder: Storage) -> None:
        raise TransientStorageError(folder.uri, "an old folder cannot be read")

    monkeypatch.setattr(retention, "verify", unreadable)
    for step in (1, 2):
        save_world(root, step, 1, MESH)
    _save(tmp_path, 3)
    with _control() as (ours, theirs):
        saver.finalize(ours, FinalizeCheckpoint("n0", 3, 1), _config())
        assert control_channel.receive(theirs, PublishedCheckpoint).uri.startswith(root.uri)
    refused = _tidy(1, keep=1)
    assert isinstance(refused, StorageRefusal)
    assert "cannot be read" in refused.message
    assert len(_folders(root)) == 3


def test_a_checkpoint_that_a_paused_finalizer_published_late_replaces_no_good_one(
    root: Storage,
) -> None:
    """Attempt 2 continued from step 90; the finalizer of attempt 1 slept, and published 120."""
    made = {key: save_world(root, *key, MESH) for key in ((90, 1), (100, 2), (120, 1))}
    answer = _tidy(2, keep=1, limits={1: 90})
    assert list(answer.deleted) == [made[90, 1].uri]
    assert _folders(root) == [checkpoint_folder(100, 2)]
    late = root.below(made[120, 1].folder)
    assert b"continued from step 90" in late.read(QUARANTINED)


def test_a_tidier_that_slept_removes_nothing_under_a_later_supervisor(root: Storage) -> None:
    made = [save_world(root, step, 1, MESH) for step in (80, 90, 100)]
    root.below(FENCE_FOLDER).put_new(epoch_object(3), b"the supervisor that went back to step 80")
    assert _tidy(1, keep=1, epoch=2).deleted == {}
    assert {*_folders(root)} == {manifest.folder for manifest in made}
    assert {*_tidy(1, keep=1, epoch=3).deleted} == {manifest.uri for manifest in made[:2]}


def test_retention_does_not_count_a_quarantined_checkpoint(root: Storage) -> None:
    made: dict[tuple[int, int], Manifest] = {
        key: save_world(root, *key, MESH) for key in ((100, 1), (110, 2), (120, 1))
    }
    bad = made[120, 1]
    answer = _tidy(2, keep=1, bad=frozenset({joined(root.uri, bad.folder), "elsewhere/x"}))
    assert list(answer.deleted) == [made[100, 1].uri]
    assert _folders(root) == [checkpoint_folder(110, 2)]
    assert b"checkpoint.bad" in root.below(bad.folder).read(QUARANTINED)
