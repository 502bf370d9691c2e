"""Data loaders of the last call end at once, although the collector deletes them."""

from __future__ import annotations

import multiprocessing
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from tests.support.waiting import eventually
from torch.utils.data import DataLoader

from holdfast_workers.functions import former_call


def test_iterators_that_are_garbage_do_not_wait_for_their_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float | None] = []
    usual = BaseProcess.join

    def join(process: BaseProcess, timeout: float | None = None) -> None:
        waits.append(timeout)
        usual(process, timeout)

    before = {*multiprocessing.active_children()}
    data: Any = list(range(100))
    objects: dict[str, Any] = {"iterator": iter(DataLoader(data, num_workers=2))}
    objects["itself"] = objects  # a cycle, as a module's globals are
    workers = {*multiprocessing.active_children()} - before
    assert len(workers) == 2
    monkeypatch.setattr(BaseProcess, "join", join)
    del objects
    former_call.delete_objects()
    assert waits
    assert {*waits} == {former_call.LOADER_ENDS_S}
    eventually(lambda: not any(worker.is_alive() for worker in workers))
