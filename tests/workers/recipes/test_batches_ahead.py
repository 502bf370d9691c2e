"""Batches are read ahead, in order, by one thread at a time, and no thread stays behind."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
from tests.support.waiting import eventually

from holdfast_workers.data.corpus import CorpusError
from holdfast_workers.progress import beacon as beacons
from holdfast_workers.progress.beacon import Beacon, BeaconReader
from holdfast_workers.recipes import batches_ahead
from holdfast_workers.recipes.batches_ahead import BatchesAhead, wait_for_data

Read = tuple[int, int]
"""A share, and the number of a batch."""


def nothing() -> None:
    pass


def unexpected() -> None:
    raise AssertionError("a thread of its own reads")


class Source:
    """Three batches for each share. Reading waits before a batch, as for data, until it may go
    on."""

    def __init__(self) -> None:
        self.begun: list[Read] = []
        self.readers: list[int] = []
        """How many threads read, at each batch."""
        self.threads: set[int] = set()
        self.held: set[Read] = set()
        self.bad: set[Read] = set()
        self.slow: set[Read] = set()
        self.checks = True
        self._reading = 0
        self._lock = threading.Lock()

    def read(self, share: int) -> Iterator[Read]:
        for number in range(3):
            self._enter((share, number))
            try:
                self._wait((share, number))
            finally:
                with self._lock:
                    self._reading -= 1
            yield share, number

    def has_begun(self, batch: Read) -> bool:
        return batch in self.begun

    def _enter(self, batch: Read) -> None:
        with self._lock:
            self._reading += 1
            self.readers.append(self._reading)
            self.threads.add(threading.get_native_id())
            self.begun.append(batch)

    def _wait(self, batch: Read) -> None:
        with wait_for_data(unexpected) if batch in self.held else nullcontext(nothing) as check:
            while batch in self.held:
                threading.Event().wait(0.01)
                if self.checks:
                    check()
        while batch in self.slow:
            threading.Event().wait(0.01)
        if batch in self.bad:
            raise CorpusError(f"{batch} did not come")


def alive() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == batches_ahead._THREAD_NAME]


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.held.clear()
    eventually(lambda: not alive())


@pytest.fixture
def batches(source: Source) -> Iterator[BatchesAhead[int, Read]]:
    made = BatchesAhead(source.read)
    yield made
    made.drop()


def test_the_next_share_is_read_while_nothing_takes_a_batch(
    source: Source, batches: BatchesAhead[int, Read]
) -> None:
    for share in range(4):
        batches.begin(share)
        taken = [batches.take(nothing)]
        batches.read_ahead(share + 1)
        eventually(partial(source.has_begun, (share + 1, 2)))
        taken += [batches.take(nothing), batches.take(nothing)]
        assert taken == [(share, number) for number in range(3)]
    assert source.begun == [(share, number) for share in range(5) for number in range(3)]
    assert set(source.readers) == {1}


def test_steps_that_follow_each_other_start_no_thread(
    source: Source, batches: BatchesAhead[int, Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_ahead, "_IDLE_S", 600.0)  # however slow this machine is
    for share in range(20):
        batches.begin(share)
        batches.take(nothing)
        batches.read_ahead(share + 1)
    monkeypatch.undo()
    batches.begin(20)
    batches.take(nothing)
    assert len(source.threads) == 1
    batches.read_ahead(21)  # once it is read, the thread ends soon


def test_batches_are_read_again_after_the_thread_has_ended(
    source: Source, batches: BatchesAhead[int, Read]
) -> None:
    for share in range(2):
        batches.begin(share)
        eventually(lambda: not alive())
        assert [batches.take(nothing) for _ in range(3)] == [(share, n) for n in range(3)]
    assert len(source.threads) == 2


def test_batches_of_another_share_are_dropped(
    source: Source, batches: BatchesAhead[int, Read]
) -> None:
    batches.begin(1)
    batches.read_ahead(2)
    eventually(lambda: (2, 2) in source.begun)
    batches.begin(3)
    assert [batches.take(nothing) for _ in range(3)] == [(3, 0), (3, 1), (3, 2)]
    with pytest.raises(RuntimeError, match="no more batches"):
        batches.take(nothing)


def test_a_share_that_is_begun_again_is_read_from_its_first_batch(
    source: Source, batches: BatchesAhead[int, Read]
) -> None:
    batches.begin(1)
    batches.take(nothing)
    batches.begin(1)
    assert batches.take(nothing) == (1, 0)


def test_an_error_is_raised_where_its_batch_would_be_taken_and_says_where_it_arose(
    source: Source, batches: BatchesAhead[int, Read]
) -> None:
    source.bad.add((2, 1))
    batches.begin(1)
    batches.read_ahead(2)
    eventually(lambda: (2, 1) in source.begun)
    assert [batches.take(nothing) for _ in range(3)] == [(1, 0), (1, 1), (1, 2)]
    batches.begin(2)
    assert batches.take(nothing) == (2, 0)
    with pytest.raises(CorpusError, match="did not come") as caught:
        batches.take(nothing)
    assert "_wait" in [frame.name for frame in traceback.extract_tb(caught.tb)]


def test_an_error_of_dropped_batches_concerns_nobody(
    source: Source, batches: BatchesAhead[int, Read]
) -> None:
    source.bad.add((2, 0))
    batches.begin(1)
    batches.read_ahead(2)
    eventually(lambda: (2, 0) in source.begun)
    source.bad.clear()
    batches.drop()
    batches.begin(2)
    assert batches.take(nothing) == (2, 0)


def test_dropped_readings_end_also_while_they_wait_for_data(
    source: Source, batches: BatchesAhead[int, Read]
) -> None:
    source.held |= {(1, 1), (2, 0)}
    batches.begin(1)
    batches.read_ahead(2)
    eventually(lambda: (1, 1) in source.begun)
    batches.drop()
    eventually(lambda: not alive())
    assert source.begun == [(1, 0), (1, 1)]
    with pytest.raises(RuntimeError, match="no share has been begun"):
        batches.take(nothing)


def test_one_thread_reads_also_if_a_dropped_one_ends_late(
    source: Source, batches: BatchesAhead[int, Read]
) -> None:
    source.checks = False
    source.held.add((1, 0))
    batches.begin(1)
    eventually(lambda: (1, 0) in source.begun)
    for share in (2, 3):
        batches.begin(share)
    threading.Timer(0.5, source.held.clear).start()
    assert batches.take(nothing) == (3, 0)
    assert set(source.readers) == {1}
    assert not [batch for batch in source.begun if batch[0] == 2]


def test_a_wait_for_missing_data_is_told_from_one_for_the_processor(
    source: Source, batches: BatchesAhead[int, Read]
) -> None:
    source.held.add((1, 1))
    source.slow.add((1, 2))
    batches.begin(1)
    batches.take(nothing)

    def bring() -> None:
        if batches.fetch_waited_s:
            source.held.clear()

    batches.take(bring)
    fetched_s, waited_s = batches.fetch_waited_s, batches.waited_s
    assert 0 < fetched_s <= waited_s
    batches.take(source.slow.clear)
    assert batches.fetch_waited_s == fetched_s
    assert batches.waited_s > waited_s
    batches.begin(2)
    assert batches.waited_s == batches.fetch_waited_s == 0.0


def test_a_long_wait_is_a_phase_that_its_check_may_end(
    tmp_path: Path, source: Source, batches: BatchesAhead[int, Read]
) -> None:
    path = beacons.path_of(tmp_path, "n0.abc.1")
    beacons.create(path)
    beacon, reader = Beacon(path), BeaconReader(path)
    shown: list[tuple[str, int, int, float]] = []

    def look() -> None:
        reading = reader.read()
        assert reading is not None
        shown.append((reading.phase, reading.step, reading.micro_batch, reading.bound_s))

    def until(enough: int, act: Callable[[], None]) -> Callable[[], None]:
        def check() -> None:
            look()
            if len([each for each in shown if each[0] == "data"]) >= enough:
                act()

        return check

    def over() -> None:
        raise TimeoutError("the attempt is over")

    beacons._current.set(beacon)
    try:
        beacon.begin(1)
        beacon.enter("load", 7, 2)
        source.held.add((1, 0))
        batches.begin(1)
        assert batches.take(until(2, source.held.clear)) == (1, 0)
        look()
        assert set(shown) == {("load", 7, 2, 0.0), ("data", 7, 2, batches_ahead._BOUND_S)}
        assert shown[-1][0] == "load"
        source.held.add((2, 0))
        batches.begin(2)
        with pytest.raises(TimeoutError, match="over"):
            batches.take(until(4, over))
        look()
        assert shown[-1][0] == "load"
    finally:
        beacons._current.set(None)
        beacons.remove_all(tmp_path)


def test_what_failed_while_nobody_waited_for_it_is_read_anew() -> None:
    """A shard that did not come in time for a reading ahead may have come since."""
    source = Source()
    batches = BatchesAhead(source.read)
    batches.begin(1)
    source.bad.add((2, 1))
    batches.read_ahead(2)
    ahead = batches._ahead
    assert ahead is not None
    eventually(lambda: ahead.has_failed)
    source.bad.clear()
    batches.begin(2)
    assert [batches.take(nothing) for _ in range(3)] == [(2, 0), (2, 1), (2, 2)]
