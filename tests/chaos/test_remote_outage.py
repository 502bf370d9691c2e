"""A remote tier fails in the middle of a run: training goes on, one incident reports the outage,
and missed saves are made up for when the tier answers again. Uses a real S3 server.

The fence fails with it, and no recovery waits for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.chaos.conftest import STEPS, Undisturbed
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server
from tests.support.faults.flaky_proxy import FlakyProxy
from tests.support.nodes.history_proof import assert_same_history, incidents
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind, StopKind
from holdfast_workers.checkpoint.manifest import list_checkpoints, verify
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.spec import CheckpointSpec, MemoryTierSpec, RemoteTierSpec

pytestmark = pytest.mark.chaos

Start = Callable[..., Any]


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FlakyProxy]:
    proxy = FlakyProxy(s3_server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def start(tmp_path: Path, s3_server: S3Server, proxy: FlakyProxy) -> Start:
    """`start(every)` starts a run that saves to a bucket behind the proxy."""

    def begin(every: int, **options: Any) -> Any:
        bucket = s3_server.new_bucket()
        storage = StorageOptions(
            endpoint=proxy.endpoint,
            credentials=CREDENTIALS,
            connect_timeout_s=1.0,
            read_timeout_s=1.0,
            attempts=2,
            patience_s=3.0,
        )
        checkpoint = CheckpointSpec(
            memory=MemoryTierSpec(every_steps=1), remote=RemoteTierSpec(every_steps=every, keep=3)
        )
        training = small_training(STEPS, checkpoint=checkpoint)
        remote = f"s3://{bucket}/runs/job"
        return supervised(tmp_path, training, remote=remote, storage=storage, **options)

    return begin


def _saved(run: SupervisedRun) -> list[int]:
    return [saved["step"] for saved in run.of(EventKind.CHECKPOINT_SAVED)]


def _outages(run: SupervisedRun, kind: EventKind) -> list[dict[str, Any]]:
    return [event for event in run.of(kind) if event["cause"] == "remote_unavailable"]


def _assert_nothing_left(run: SupervisedRun, server: S3Server) -> None:
    """Only complete checkpoints in the bucket; no frozen copy in shared memory."""
    bucket = run.remote.uri.split("/")[2]
    assert server.uploads(bucket) == []
    listed = list_checkpoints(run.remote)
    assert listed[0].step == STEPS
    for manifest in listed:
        verify(run.remote.below(manifest.folder))
    run.wait(lambda: not list(run.agents.root.glob("*/save-*.seg")))


@pytest.mark.cell("P5", "storage")
def test_a_bucket_disappears_and_comes_back(
    start: Start, proxy: FlakyProxy, s3_server: S3Server, undisturbed: Undisturbed
) -> None:
    with start(10, standbys=0) as run:
        run.wait(lambda: bool(_saved(run)))
        proxy.add("status", status=404, code="NoSuchBucket")
        run.wait(lambda: bool(_outages(run, EventKind.INCIDENT_OPENED)))
        seen = max(run.rows)
        run.wait_step(min(seen + 20, STEPS))  # training goes on
        assert len(list(run.agents.root.glob("*/save-*.seg"))) <= 2 * 4
        proxy.heal()
        end = run.wait_end()
        assert end["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)
        (opened,) = _outages(run, EventKind.INCIDENT_OPENED)
        (closed,) = _outages(run, EventKind.INCIDENT_CLOSED)
        assert opened["incident"] == closed["incident"]
        assert "NoSuchBucket" in opened["reason"]
        assert "is in the remote tier" in closed["resolution"]
        assert [
            incident for incident in incidents(run) if incident["cause"] != "remote_unavailable"
        ] == []
        assert {row.attempt for row in run.all_rows} == {1}
        assert STEPS in _saved(run)
        _assert_nothing_left(run, s3_server)


def test_the_last_checkpoint_waits_for_a_silent_storage(
    start: Start, proxy: FlakyProxy, s3_server: S3Server
) -> None:
    with start(0, standbys=0) as run:
        run.wait_step(1)
        proxy.add("silence")
        run.wait(lambda: bool(_outages(run, EventKind.INCIDENT_OPENED)), 90.0)
        assert STEPS in run.rows
        assert not run.of(EventKind.ENDED)
        proxy.heal()
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert _saved(run) == [STEPS]
        _assert_nothing_left(run, s3_server)


@pytest.mark.soak
def test_a_restore_waits_for_unavailable_storage_instead_of_starting_over(
    start: Start, proxy: FlakyProxy, undisturbed: Undisturbed
) -> None:
    """All agents and the supervisor are lost while the bucket is unavailable: its checkpoints are
    neither forgotten nor marked bad."""
    with start(20, standbys=0, config={"wait_for_replacement_s": 60.0}) as run:
        run.wait(lambda: 20 in _saved(run))
        proxy.add("status", status=404, code="NoSuchBucket")
        for seat in run.agents.seats:
            run.agents.forget_memory(seat)
        run.lose_supervisor()
        run.wait(
            lambda: any("remote tier" in wait["resource"] for wait in run.of(EventKind.WAITING)),
            90.0,
        )
        proxy.heal()
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        forming = run.of(EventKind.ATTEMPT_FORMING)[-1]
        assert forming["restore"]["step"] >= 20
        assert run.digests[STEPS] == undisturbed.digests[STEPS]


def test_a_run_resumes_from_a_bucket_whose_key_is_in_no_process_with_users_code(
    tmp_path: Path, s3_server: S3Server
) -> None:
    """The kernel shows the memory of every child of the agents: the key is in none but those that
    reach the storage."""
    key = f"key-{os.urandom(16).hex()}"
    credentials = {**CREDENTIALS, "secret_access_key": key}
    run = {
        "remote": f"s3://{s3_server.new_bucket()}/runs/job",
        "storage": StorageOptions(endpoint=s3_server.endpoint, credentials=credentials),
        "standbys": 0,
    }
    with supervised(tmp_path, small_training(4000), **run) as first:
        first.wait_step(5)
        first.stop(StopKind.PAUSE)
        paused = first.wait_end()
        assert paused["outcome"] == "PAUSED", first.story()
    with supervised(tmp_path, small_training(4000), **run, resumes=first) as second:
        second.wait_step(paused["step"] + 1)
        formed = second.of(EventKind.ATTEMPT_FORMING)[-1]
        assert set(formed["restore"]["tiers"].values()) == {"remote"}, second.story()
        agents = [agent.process.pid for agent in second.agents.agents.values() if agent.process]
        names, with_key = set[str](), set[str]()
        for child in (child for pid in agents for child in psutil.Process(pid).children()):
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                has_key, name = _has_in_memory(child.pid, key.encode()), child.name()
                names.add(name)
                with_key |= {name} if has_key else set()
        assert {"hf-zygote", "hf-worker", "hf-storage"} <= names
        assert with_key == {"hf-storage"}


def _has_in_memory(pid: int, word: bytes) -> bool:
    """Whether a process has `word` in memory that it may write to."""
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            extent, access, *_ = line.split()
            if access.startswith("rw"):
                start, end = (int(number, 16) for number in extent.split("-"))
                memory.seek(start)
                with contextlib.suppress(OSError):  # unmapped meanwhile
                    if word in memory.read(end - start):
                        return True
    return False


@contextmanager
def _fence_away(run: SupervisedRun) -> Iterator[None]:
    """Every access to the fence is an I/O error."""
    fence = run.remote_root / "fence"
    kept = fence.rename(fence.with_name("fence-kept"))
    fence.touch()
    yield
    fence.unlink()
    kept.rename(fence)


@pytest.mark.cell("P6", "storage")
def test_an_error_of_the_fence_ends_no_job(tmp_path: Path, undisturbed: Undisturbed) -> None:
    with supervised(tmp_path, small_training(STEPS), standbys=0) as run:
        run.wait_step(3)
        with _fence_away(run):
            run.kill(1)
            run.wait(lambda: any(row.attempt == 2 for row in run.all_rows))
            run.lose_supervisor()  # its successor starts without the fence
            assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)
        assert {row.attempt for row in run.all_rows} == {1, 2}


@pytest.mark.cell("P1", "rank")
def test_ranks_hold_while_neither_fence_nor_cluster_rules_out_a_second_supervisor(
    tmp_path: Path,
) -> None:
    steps = 2_000
    leases = {"lease_s": 2.0, "lease_margin_s": 1.0}
    with supervised(tmp_path, small_training(steps), standbys=0, config=leases) as run:
        run.wait_step(3)
        run.cluster_answers = False
        with _fence_away(run):
            run.wait(lambda: "hold" in run.phases())  # its peers wait for it in a collective
        seen = run.newest_step()
        assert seen < steps
        run.wait_step(seen + 20)
        run.stop(StopKind.CANCEL)
        assert run.wait_end()["outcome"] == "CANCELLED", run.story()
        assert {row.attempt for row in run.all_rows} == {1}
