"""No injected fault is carried out twice, on whichever node the supervisor starts again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server

from holdfast_service.supervisor.fence_record import FenceRecord, open_fence
from holdfast_service.supervisor.injection_record import InjectionRecord
from holdfast_workers.checkpoint.fence_objects import FenceFloor
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.storage import Storage, TransientStorageError
from holdfast_workers.protocol.processes import StorageOptions


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
