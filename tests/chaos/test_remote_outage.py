"""A remote tier fails in the middle of a run: training goes on, one incident reports the outage,
and missed saves are made up for when the tier answers again. Uses a real S3 server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.conftest import STEPS, Undisturbed
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server
from tests.support.faults.flaky_proxy import FlakyProxy
from tests.support.nodes.history_proof import assert_same_history, incidents, not_fired
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.checkpoint.manifest import list_checkpoints, verify
from holdfast_workers.checkpoint.storage import StorageOptions
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
    run.wait(lambda: not list(run.agents.root.glob("*/save-*.seg")), 10.0)


def test_a_bucket_disappears_and_comes_back(
    start: Start, proxy: FlakyProxy, s3_server: S3Server, undisturbed: Undisturbed
) -> None:
    with start(10, standbys=0) as run:
        run.wait(lambda: 10 in _saved(run))
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


def test_errors_lost_answers_and_cut_transfers_change_no_result(
    start: Start, proxy: FlakyProxy, s3_server: S3Server, undisturbed: Undisturbed
) -> None:
    rules = [
        proxy.add("status", method="PUT", times=5, status=503, code="SlowDown"),
        proxy.add("cut_upload", method="PUT", contains=".distcp", times=4),
        proxy.add("lose_answer", method="PUT", contains="manifest.json", times=1),
        proxy.add("reset", method="GET", times=3),
        proxy.add("cut_download", method="GET", contains="record.json", times=2, after_bytes=600),
    ]
    with start(20, standbys=0) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert all(rule.used == rule.times for rule in rules), rules
        assert_same_history(run, undisturbed)
        assert STEPS in _saved(run)  # a delayed save may be reported later
        _assert_nothing_left(run, s3_server)


def test_a_save_goes_on_when_its_worker_and_then_its_saver_die(
    start: Start, s3_server: S3Server, undisturbed: Undisturbed
) -> None:
    """The worker dies right after it froze its copy of step 20; the first saver dies too. The
    checkpoint of the ended attempt is completed nevertheless."""
    plan: list[dict[str, Any]] = [
        {"point": "saved", "rank": 1, "step": 20, "action": "kill"},
        {"point": "saver", "rank": 2, "step": 20, "action": "kill"},
    ]
    with start(20, standbys=0, chaos=plan) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert not not_fired(run, plan)
        assert_same_history(run, undisturbed)
        assert 20 in _saved(run), run.story()
        _assert_nothing_left(run, s3_server)


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
