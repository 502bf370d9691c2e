"""Real checkpoints in the folder of a job whose fake supervisor reports them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tests.support.checkpoint.saved_worlds import save_world
from tests.support.service.live_server import LiveServer
from tests.support.waiting import eventually

from holdfast import Client
from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.manifest import Manifest
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import Storage

MESH = {"dp_shard": 2, "tp": 2}


def root_of(server: LiveServer, job_id: str) -> Storage:
    return open_storage(str(server.settings.job_dir(job_id) / "checkpoints"))


def saved(server: LiveServer, client: Client, job_id: str, steps: dict[int, float]) -> None:
    """Checkpoints of `steps`, each with its loss, reported by the fake supervisor."""
    for step, loss in steps.items():
        report_saved(
            server, job_id, save_world(root_of(server, job_id), step, 1, MESH, step, {"loss": loss})
        )
    eventually(lambda: len(client.checkpoints(job_id).items) == len(steps))


def report_saved(server: LiveServer, job_id: str, made: Manifest) -> None:
    server.supervisor(job_id).emit(
        EventKind.CHECKPOINT_SAVED,
        at=time.time(),
        step=made.step,
        attempt=made.attempt,
        tier="remote",
        uri=made.uri,
        nbytes=made.nbytes,
        mesh=made.mesh,
        metrics=made.metrics,
    )


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files of checkpoints are removed once this is set."""
    proceed, delete = threading.Event(), LocalStorage.delete

    def slow(self: LocalStorage, name: str) -> None:
        assert proceed.wait(60)
        delete(self, name)

    monkeypatch.setattr(LocalStorage, "delete", slow)
    return proceed


def spoil(made: Path) -> None:
    """Flip a bit in a rank's file of the checkpoint in that folder."""
    victim = made / "__1_0.distcp"
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 1
    victim.write_bytes(raw)
