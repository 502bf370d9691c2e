"""Writes what the present version stores, as the fixture of its upgrade tests.

    python -m tests.support.upgrade.write [--overwrite]

The folder of a version is written once, right before its release, and never again: `--overwrite` is
for a version that is not released yet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sqlalchemy import func, select
from tests.support.upgrade import fixture, story, takeovers, training
from tests.support.upgrade.answers import NOW, answers

from holdfast.client import config as client_config
from holdfast.schemas import SERVER_FILE, ServerFile
from holdfast_service.embedded_cluster.local_cluster import LocalCluster, LocalNode, folder
from holdfast_service.job_model.events.kinds import EventKind
from holdfast_service.job_model.lifecycle import State
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.models import Base, Event, JobRecord
from holdfast_service.supervisor.fence_record import FenceRecord, open_fence
from holdfast_service.supervisor.injection_record import InjectionRecord
from holdfast_workers.checkpoint.manifest import checkpoint_folder
from holdfast_workers.checkpoint.marks import pin
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.memory.segment_store import mesh_tag
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.spec import TrainingSpec

NEVER_REACHED = frozenset({State.RESIZING})
FENCE_S = 10.0


def main() -> None:
    options = argparse.ArgumentParser(prog="tests.support.upgrade.write", description=__doc__)
    options.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    target = fixture.WRITTEN / version("holdfast-train")
    if target.exists() and not options.parse_args().overwrite:
        raise SystemExit(
            f"{target} exists: what a released version wrote is never written again; raise the "
            "version in pyproject.toml, or use --overwrite if it is not released"
        )
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch, "fixture")
        write(fresh, Path(scratch, "data"), Path(scratch, "cache"))
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(fresh, target)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{target}: {size / 1000:.0f} kB")


def write(target: Path, data_dir: Path, cache: Path) -> None:
    """Write the fixture of the present version to `target`, using two scratch folders."""
    settings = Settings(data_dir=data_dir, allow_fault_injection=True, check_data_paths=False)
    target.mkdir(parents=True)
    clock = story.Clock()
    numbers = count(1)
    with (
        patch("time.time", clock),
        patch("uuid_utils.uuid7", lambda: f"01900000-0000-7000-8000-{next(numbers):012d}"),
    ):
        asyncio.run(_write_data(target, settings, clock, cache))
    training.write_segment(target / fixture.MEMORY / mesh_tag(training.SEGMENT_MESH))
    _write_client_config(target / fixture.CLIENT_CONFIG)
    (target / fixture.DUMP).write_text(fixture.dump_of(data_dir))
    for left in (fixture.DATABASE, f"{fixture.DATABASE}-wal", f"{fixture.DATABASE}-shm"):
        (data_dir / left).unlink(missing_ok=True)
    shutil.copytree(data_dir, target / fixture.FILES)
    for path in (target / fixture.FILES).rglob("*.json"):
        if "checkpoints" not in path.parts:
            path.write_text(path.read_text().replace(str(data_dir), fixture.DATA_DIR))


async def _write_data(target: Path, settings: Settings, clock: story.Clock, cache: Path) -> None:
    corpus = settings.data_dir / fixture.CORPUS
    corpus.parent.mkdir(parents=True)
    corpus.write_text(training.CORPUS)
    store = await Store.open(settings)
    store.sends_webhooks = True
    written = story.Story(store, settings, clock)

    def save_checkpoint(job: str, step: int, attempt: int) -> None:
        root = settings.job_dir(job) / "checkpoints"
        following = training.save(_training_spec(), corpus, root, step, attempt, cache)
        pin(open_storage(str(root)).below(checkpoint_folder(step, attempt)))
        trained = {"job": job, "steps": [asdict(step) for step in following]}
        _write_json(target / fixture.TRAINED, trained, settings)

    await written.write(save_checkpoint)
    await _require_everything(store)
    _write_files(settings, written)
    lives = ("running", "recovering")
    left = [
        asdict(takeovers.left_by(written.ids[name], written.simulations[name])) for name in lives
    ]
    _write_json(target / fixture.TAKEOVERS, left, settings)
    clock.now = NOW
    _write_json(target / fixture.ANSWERS, await answers(store, settings), settings)
    await store.close()


def _training_spec() -> TrainingSpec:
    fields = {name: part for name, part in story.SPEC.items() if name in TrainingSpec.model_fields}
    return TrainingSpec.model_validate(fields)


async def _require_everything(store: Store) -> None:
    """Every table has rows, every state a job, and every kind of event an event."""
    async with store.read() as session:
        for table in Base.metadata.sorted_tables:
            rows = await session.scalar(select(func.count()).select_from(table))
            assert rows, f"the story writes no row of {table.name}"
        states = set(await session.scalars(select(JobRecord.state)))
        kinds = set(await session.scalars(select(Event.kind)))
    assert states == set(State) - NEVER_REACHED, set(State) - states
    assert kinds == set(EventKind), set(EventKind) - kinds


def _write_files(settings: Settings, written: story.Story) -> None:
    """The files of the data directory beside database and checkpoints, with fixed content."""
    job_dir = settings.job_dir(written.ids["running"])
    storage = open_fence(str(job_dir / "checkpoints"), StorageOptions())
    fence = FenceRecord(storage)
    fence.claim(3, FENCE_S)
    fence.announce(2)
    fence.wait_stored(2, FENCE_S)
    fence.close()
    InjectionRecord(storage).take(1)
    (settings.data_dir / "job-secrets.key").write_bytes(bytes(range(32)))
    server = ServerFile(address="http://127.0.0.1:8642", pid=4321, data_dir=str(settings.data_dir))
    (settings.data_dir / SERVER_FILE).write_text(server.model_dump_json())
    cluster = folder(settings.data_dir)
    cluster.make()
    cluster.write(
        LocalCluster(
            cluster_id="c1",
            address="127.0.0.1:6379",
            keeper_pid=4322,
            data_dir=str(settings.data_dir),
            temp_dir="/tmp/holdfast-c1",
            shm_root="/dev/shm/holdfast-c1",
            token_path=str(settings.data_dir / "cluster" / "token"),
            nodes=(LocalNode("head", "ab12", host="127.0.0.1", raylet_pid=4323, head=True),),
            ready=True,
        )
    )


def _write_client_config(path: Path) -> None:
    team = client_config.ServerContext(address="https://holdfast.example", token="a-token")
    with _variable(client_config.CONFIG_VARIABLE, str(path)):
        client_config.store(client_config.Config().with_context("team", team))


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    with patch.dict(os.environ, {name: value}):
        yield


def _write_json(path: Path, content: Any, settings: Settings) -> None:
    """One line per entry, so that a difference is readable."""
    if isinstance(content, dict):
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()]
        text = "{\n" + ",\n".join(lines) + "\n}\n"
    else:
        text = "[\n" + ",\n".join(map(json.dumps, content)) + "\n]\n"
    path.write_text(text.replace(str(settings.data_dir), fixture.DATA_DIR))


if __name__ == "__main__":
    main()
