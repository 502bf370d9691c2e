"""A beacon is read from outside, never partially, and costs its writer about a microsecond."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import eventually

from holdfast_workers.progress import beacon as beacons
from holdfast_workers.progress.beacon import (
    MAX_GROUPS,
    RING_ENTRIES,
    Beacon,
    BeaconReader,
    BeaconReading,
)
from holdfast_workers.protocol.messages import GroupBeat


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    created = beacons.path_of(tmp_path, "n0.abc.1")
    beacons.create(created)
    yield created
    beacons.remove_all(tmp_path)
    assert not created.exists()


@pytest.fixture
def beacon(path: Path) -> Beacon:
    created = Beacon(path)
    created.begin(3)
    return created


def read(reader: BeaconReader) -> BeaconReading:
    reading = reader.read()
    assert reading is not None
    return reading


def test_a_beacon_without_a_write_reads_as_none(path: Path) -> None:
    assert BeaconReader(path).read() is None


def test_phase_step_and_micro_batch_are_read_as_they_were_written(
    beacon: Beacon, path: Path
) -> None:
    reader = BeaconReader(path)
    before = time.monotonic_ns()
    beacon.enter("backward", 17, 2)
    reading = read(reader)
    assert (reading.attempt, reading.phase, reading.step, reading.micro_batch) == (
        3,
        "backward",
        17,
        2,
    )
    assert before <= reading.changed_ns <= time.monotonic_ns()


def test_collectives_are_counted_by_group_and_are_signs_of_life(beacon: Beacon, path: Path) -> None:
    reader = BeaconReader(path)
    beacon.enter("forward", 1)
    world, tp = beacon.track("world"), beacon.track("tp")
    assert world is not None and tp is not None
    since = world.enter(b"all_gather")
    world.leave(since)
    tp.enter(b"all_reduce")
    reading = read(reader)
    assert reading.groups == (
        GroupBeat("world", 1, 1, "all_gather"),
        GroupBeat("tp", 1, 0, "all_reduce"),
    )
    changed = reading.changed_ns
    world.leave(world.enter(b"barrier"))
    assert read(reader).changed_ns > changed
    assert read(reader).groups[0] == GroupBeat("world", 2, 2, "barrier")


def test_each_attempt_counts_its_collectives_from_zero(beacon: Beacon, path: Path) -> None:
    track = beacon.track("world")
    assert track is not None
    track.leave(track.enter(b"barrier"))
    beacon.begin(4)
    beacon.enter("rendezvous", 0)
    reading = read(BeaconReader(path))
    assert (reading.attempt, reading.groups) == (4, ())


def test_groups_beyond_the_maximum_are_left_out(beacon: Beacon, path: Path) -> None:
    tracks = [beacon.track(f"g{index}") for index in range(MAX_GROUPS + 3)]
    assert tracks.count(None) == 3
    for track in tracks:
        if track is not None:
            track.enter(b"barrier")
    beacon.enter("agree", 1)
    assert len(read(BeaconReader(path)).groups) == MAX_GROUPS


def test_the_longest_standstill_of_each_ended_phase_is_read_once(
    beacon: Beacon, path: Path
) -> None:
    reader = BeaconReader(path)
    began = time.monotonic()
    beacon.enter("forward", 1)
    standstill_s = 0.03
    time.sleep(standstill_s)
    track = beacon.track("world")
    assert track is not None
    track.leave(track.enter(b"all_gather"))
    beacon.enter("backward", 1)
    (ended,) = reader.ended_phases()
    assert ended.phase == "forward"
    assert standstill_s <= ended.standstill_s <= time.monotonic() - began
    assert reader.ended_phases() == []


def test_a_phase_is_cold_if_it_began_cold(beacon: Beacon, path: Path) -> None:
    reader = BeaconReader(path)
    beacon.enter("forward", 1)
    beacon.cold = False
    beacon.enter("forward", 2)
    beacon.enter("forward", 3)
    assert [ended.cold for ended in reader.ended_phases()] == [True, False]


def test_an_aborted_phase_is_not_recorded(beacon: Beacon, path: Path) -> None:
    reader = BeaconReader(path)
    beacon.enter("forward", 1)
    beacon.end()
    assert (reader.ended_phases(), read(reader).phase) == ([], beacons.IDLE)
    beacon.begin(4)
    beacon.enter("build", 0)
    beacon.enter("forward", 1)
    assert [ended.phase for ended in reader.ended_phases()] == ["build"]


def test_if_the_ring_overflows_the_newest_phases_are_read(beacon: Beacon, path: Path) -> None:
    reader = BeaconReader(path)
    for step in range(3 * RING_ENTRIES):
        beacon.enter(f"phase {step}", step)
    phases = [ended.phase for ended in reader.ended_phases()]
    last = 3 * RING_ENTRIES - 1
    assert phases == [f"phase {step}" for step in range(last - len(phases), last)]
    assert RING_ENTRIES - 2 <= len(phases) <= RING_ENTRIES


def test_an_interrupted_write_reads_as_the_record_before(beacon: Beacon, path: Path) -> None:
    """For example, if a worker is stopped in the middle of a write."""
    reader = BeaconReader(path)
    beacon.enter("forward", 5)
    whole = read(reader)
    with path.open("r+b") as file:
        (counter,) = struct.unpack("<Q", file.read(8))
        file.seek(0)
        file.write(struct.pack("<Q16s", counter + 1, b"backward"))
    assert read(reader) == whole
    beacon.enter("agree", 6)
    assert read(reader).phase == "agree"


class ObservedCounter:
    """A counter that calls `observe` whenever it is about to be written."""

    def __init__(self, value: int, observe: Callable[[], object]) -> None:
        self.value = value
        self.observe = observe

    def __add__(self, more: int) -> ObservedCounter:
        return ObservedCounter(self.value + more, self.observe)

    def __mod__(self, of: int) -> int:
        return self.value % of

    def __index__(self) -> int:
        self.observe()
        return self.value


def test_a_write_in_progress_reads_as_the_record_before(beacon: Beacon, path: Path) -> None:
    """`pack_into` first zeroes its target, so both counters must not be zero at the same time."""
    reader = BeaconReader(path)
    beacon.enter("forward", 5)
    track = beacon.track("world")
    assert track is not None
    track.leave(track.enter(b"barrier"))
    seen: list[BeaconReading | None] = []
    counting = ObservedCounter(7, lambda: seen.append(reader.read()))
    read(reader)
    for counter in (beacon, track):
        writer: Any = counter
        writer._writes = counting
    beacon.enter("forward", 6)
    track.enter(b"barrier")
    assert len(seen) == 4
    assert all(reading is not None and len(reading.groups) == 1 for reading in seen)


def test_a_reader_never_reads_a_partial_write(beacon: Beacon, path: Path) -> None:
    """For any thread schedule: step and micro-batch are written as the same number."""
    reader, stop = BeaconReader(path), threading.Event()
    beacon.enter("forward", 0, 0)
    assert read(reader).step == 0  # from here on there is a record to fall back on

    def write() -> None:
        for step in count():
            beacon.enter("forward", step, step)
            if stop.is_set():
                return

    def look() -> bool:
        seen.update(
            reading.step for reading in (read(reader) for _ in range(100)) if _whole(reading)
        )
        return len(seen) > 10

    seen: set[int] = set()
    writer = threading.Thread(target=write)
    writer.start()
    try:
        eventually(look)
    finally:
        stop.set()
        writer.join()


def _whole(reading: BeaconReading) -> bool:
    assert reading.step == reading.micro_batch, reading
    return True


def test_a_declared_phase_has_its_bound_and_returns_to_the_outer_phase(
    beacon: Beacon, path: Path
) -> None:
    reader = BeaconReader(path)
    beacon.make_current()
    beacon.enter("optimizer", 4, 1)
    with beacons.phase("evaluate", bound_s=60.0):
        reading = read(reader)
        assert (reading.phase, reading.step, reading.bound_s) == ("evaluate", 4, 60.0)
    reading = read(reader)
    assert (reading.phase, reading.step, reading.micro_batch, reading.bound_s) == (
        "optimizer",
        4,
        1,
        0.0,
    )


def test_a_declared_phase_aborted_by_an_exception_is_not_recorded(
    beacon: Beacon, path: Path
) -> None:
    reader = BeaconReader(path)
    beacon.make_current()
    beacon.enter("optimizer", 4, 1)
    with pytest.raises(ZeroDivisionError), beacons.phase("evaluate", bound_s=60.0):
        raise ZeroDivisionError
    assert (read(reader).phase, read(reader).micro_batch) == ("optimizer", 1)
    with beacons.phase("export"):
        pass
    assert [ended.phase for ended in reader.ended_phases()] == ["optimizer", "optimizer", "export"]


def test_outside_of_a_worker_a_declared_phase_has_no_effect() -> None:
    program = (
        "from holdfast_workers.progress.beacon import phase\n"
        "with phase('user', bound_s=1): print(1)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).stdout == b"1\n"


def test_a_write_costs_little_more_than_a_look_at_the_clock(beacon: Beacon) -> None:
    """About 0.7 µs were measured for a phase, and 0.9 µs for entering and leaving a collective,
    beside 0.06 µs for the clock."""
    track = beacon.track("world")
    assert track is not None
    look_s = _cost_s(time.monotonic_ns)
    assert _cost_s(lambda: beacon.enter("forward", 3, 1)) < 120 * look_s
    assert _cost_s(lambda: track.leave(track.enter(b"all_reduce"))) < 150 * look_s


def _cost_s(body: Callable[[], object]) -> float:
    """The minimum of several means: the cost without interruptions."""
    times = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(1000):
            body()
        times.append((time.perf_counter() - began) / 1000)
    return min(times)


def test_only_the_owner_can_access_a_beacon_file(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_uid == os.getuid()
