"""The fence in the remote storage: what it keeps, and what an unknown answer means.

No injected fault is carried out twice, on whichever node the supervisor starts again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server
from tests.support.faults.faulty_storage import Bucket, MemoryStorage

from holdfast_service.supervisor.fence_record import FenceRecord, InjectionRecord, open_fence
from holdfast_service.supervisor.successor_watch import SuccessorWatch
from holdfast_workers.checkpoint.fence_objects import FenceFloor
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.storage import Storage, TransientStorageError
from holdfast_workers.protocol.processes import StorageOptions

WAIT_S = 60.0
MARGIN_S = 0.5


class AwayStorage(MemoryStorage):
    """Fails or hangs while it is away; may lose the answer of a creation."""

    def __init__(self) -> None:
        super().__init__(Bucket())
        self.away: Callable[[], None] = lambda: None
        self.answers_to_lose = 0

    def put_new(self, name: str, content: bytes) -> None:
        self.away()
        super().put_new(name, content)
        if self.answers_to_lose:
            self.answers_to_lose -= 1
            raise TransientStorageError(name, "the answer was lost")

    def objects(self) -> dict[str, int]:
        self.away()
        return super().objects()


def fail() -> None:
    raise TransientStorageError("memory://", "Input/output error")


@contextmanager
def record(storage: Storage) -> Iterator[FenceRecord]:
    fence = FenceRecord(storage)
    yield fence
    fence.close()


def wait_until(condition: Callable[[], bool], act: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        act()
        time.sleep(0.01)


@pytest.fixture(params=["path", "bucket"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, s3_server: S3Server) -> Storage:
    if request.param == "path":
        return open_fence(str(tmp_path / "remote"), StorageOptions())
    options = StorageOptions(endpoint=s3_server.endpoint, credentials=CREDENTIALS)
    return open_fence(f"s3://{s3_server.new_bucket()}/job", options)


def test_a_late_write_of_an_older_supervisor_hides_nothing_of_a_later_one(storage: Storage) -> None:
    with record(storage) as older, record(storage) as later:
        assert older.read(WAIT_S) == FenceFloor(0, 0)
        assert older.claim(1, WAIT_S) == 1
        assert later.claim(2, WAIT_S) == 2
        later.announce(7)
        later.wait_stored(7, WAIT_S)
        older.announce(3)
        older.wait_stored(3, WAIT_S)
        assert older.is_superseded and not later.is_superseded
    with record(storage) as successor:
        assert successor.read(WAIT_S) == FenceFloor(2, 7)
        assert successor.claim(1, WAIT_S) == 3, "the lowest free epoch above all others"


def test_supervisors_that_claim_at_the_same_time_have_different_epochs(storage: Storage) -> None:
    fences = [FenceRecord(storage) for _ in range(4)]
    start = threading.Barrier(len(fences))

    def claim(fence: FenceRecord) -> int:
        start.wait(WAIT_S)
        return fence.claim(1, WAIT_S)

    with ThreadPoolExecutor(len(fences)) as pool:
        epochs = [*pool.map(claim, fences)]
    assert len(set(epochs)) == len(epochs)
    latest = fences[epochs.index(max(epochs))]
    older = [fence for fence in fences if fence is not latest]
    for fence in fences:
        fence.refresh()
    wait_until(lambda: all(fence.is_superseded for fence in older))
    assert not latest.is_superseded
    for fence in fences:
        fence.close()


def test_a_claim_whose_answer_was_lost_is_ones_own() -> None:
    storage = AwayStorage()
    storage.answers_to_lose = 1
    with record(storage) as fence:
        assert fence.claim(4, WAIT_S) == 4
        assert fence.confirmed_at == 0.0
        wait_until(lambda: fence.confirmed_at > 0, fence.refresh)
        assert not fence.is_superseded


@pytest.mark.parametrize("hangs", [False, True])
def test_a_storage_that_is_away_delays_each_call_by_its_bound_and_is_asked_again(
    hangs: bool,
) -> None:
    storage, back = AwayStorage(), threading.Event()

    def hang() -> None:
        back.wait()

    storage.away = hang if hangs else fail
    with record(storage) as fence:
        assert fence.read(0.1) is None, "unknown is not an empty fence"
        assert fence.claim(5, 0.1) == 5
        fence.announce(9)
        for _ in range(20):
            fence.wait_stored(9, 0.1)
        assert fence.confirmed_at == 0.0 and not fence.is_superseded
        storage.away = lambda: None
        back.set()
        wait_until(lambda: fence.confirmed_at > 0, fence.refresh)
    assert {*storage.objects()} == {"epoch-00000005", "epoch-00000005.attempt-00000009"}


def test_an_unclaimed_epoch_that_another_supervisor_has_must_not_go_on() -> None:
    storage = AwayStorage()
    with record(storage) as other, record(storage) as fence:
        other.claim(5, WAIT_S)
        storage.away = fail
        assert fence.claim(5, 0.1) == 5
        storage.away = lambda: None
        wait_until(lambda: fence.is_superseded, fence.refresh)


def test_a_fence_that_has_vanished_confirms_nothing() -> None:
    storage = AwayStorage()
    with record(storage) as fence:
        fence.claim(1, WAIT_S)
        confirmed_at = fence.confirmed_at
        assert confirmed_at > 0
        storage.bucket.objects.clear()  # as below the mount point of a share that is gone
        wait_until(lambda: fence._failing, fence.refresh)
        assert fence.confirmed_at == confirmed_at and not fence.is_superseded


# --- who may grant leases -------------------------------------------------------------------------


@contextmanager
def watching(storage: Storage, is_latest: Callable[[], bool | None]) -> Iterator[SuccessorWatch]:
    fence = FenceRecord(storage)
    fence.claim(1, WAIT_S)
    watch = SuccessorWatch(fence, is_latest, MARGIN_S)
    yield watch
    watch.close()


@pytest.mark.parametrize("answer", [None, fail])
def test_nothing_is_granted_while_neither_the_storage_nor_the_cluster_answers(
    answer: Callable[[], None] | None,
) -> None:
    storage = AwayStorage()
    with watching(storage, answer or (lambda: None)) as watch:
        wait_until(lambda: watch.granting_s > 0, watch.refresh)
        assert watch.granting_s <= MARGIN_S
        storage.away = fail
        wait_until(lambda: watch.granting_s == 0, watch.refresh)
        assert not watch.found, "unknown is no successor either"
        storage.away = lambda: None
        wait_until(lambda: watch.granting_s > 0, watch.refresh)


@pytest.mark.seconds
def test_the_cluster_alone_confirms_that_there_is_no_successor() -> None:
    storage, asked = AwayStorage(), threading.Event()

    def is_latest() -> bool:
        asked.set()
        return True

    with watching(storage, is_latest) as watch:
        watch.refresh()
        assert not asked.is_set(), "while the storage answers, the cluster is not asked"
        storage.away = fail
        wait_until(asked.is_set, watch.refresh)
        until = time.monotonic() + 3 * MARGIN_S
        wait_until(lambda: time.monotonic() > until and watch.granting_s > 0, watch.refresh)


def test_a_successor_is_found_through_the_storage_the_cluster_or_an_agent() -> None:
    storage = AwayStorage()
    with watching(storage, lambda: None) as watch:
        with record(storage) as later:
            later.claim(2, WAIT_S)
        wait_until(lambda: watch.found, watch.refresh)
    storage = AwayStorage()
    with watching(storage, lambda: False) as watch:
        storage.away = fail
        wait_until(lambda: watch.found, watch.refresh)
    with watching(AwayStorage(), lambda: None) as watch:
        watch.record_refusal()
        assert watch.found


@pytest.fixture(params=["folder", "s3"])
def fence(request: pytest.FixtureRequest, tmp_path: Path, s3_server: S3Server) -> Storage:
    if request.param == "folder":
        return open_fence(str(tmp_path), StorageOptions())
    options = StorageOptions(
        endpoint=s3_server.endpoint, region="us-east-1", credentials=CREDENTIALS
    )
    return open_fence(f"s3://{s3_server.new_bucket()}/job", options)


def test_a_fault_number_is_taken_once_across_restarts(fence: Storage) -> None:
    taken = [InjectionRecord(fence).take(number) for number in (1, 1, 2, 1, 2, 5, 4)]
    assert taken == [True, False, True, False, False, True, False]
    one = InjectionRecord(fence)
    assert [one.take(number) for number in (5, 6, 6)] == [False, True, False]


def test_taken_faults_and_epochs_do_not_disturb_each_other(fence: Storage) -> None:
    assert InjectionRecord(fence).take(7)
    record = FenceRecord(fence)
    assert record.claim(3, 10.0) == 3
    assert record.floor == FenceFloor(3, 0)
    record.close()
    assert not InjectionRecord(fence).take(7) and InjectionRecord(fence).take(8)


def test_a_fault_whose_storing_was_not_answered_is_taken_by_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, put_new = LocalStorage(tmp_path), LocalStorage.put_new
    losses = ["the answer was lost"]

    def unanswered(self: LocalStorage, name: str, content: bytes) -> None:
        put_new(self, name, content)
        if losses:
            raise TransientStorageError(name, losses.pop())

    monkeypatch.setattr(LocalStorage, "put_new", unanswered)
    first, other = InjectionRecord(storage), InjectionRecord(storage)
    with pytest.raises(TransientStorageError):
        first.take(1)
    assert not other.take(1), "the first may have carried it out"
    assert first.take(1) and not first.take(1)
