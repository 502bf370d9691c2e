"""Crash points of the data channel: transfers over a link that is cut, stalled or corrupted at
any byte."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.faults.crash_point_list import CrashPoints, seeded_runs
from tests.support.faults.faulty_link import Direction, Fault, FaultType, FaultyLink
from tests.support.memory.crashing_nodes import TIMES, Receiver, Sender
from tests.support.memory.data_nodes import PATIENT
from tests.support.memory.memory_states import MESH, RANK, SIZES, Saved, layout_of, payload_of
from tests.support.memory.shm import SECRET
from tests.support.waiting import eventually

from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.fetch import BadShard, SourceLost, fetch
from holdfast_workers.memory.reshard import Reshard
from holdfast_workers.memory.wire import Timeouts
from holdfast_workers.protocol.messages import Origin, Place, Restore, Tier

IN_PAYLOAD = 300
STALLS = 6
BOX_FAULTS = 500
SHARE_OF_FAULTS = 0.55


def _faults(
    forwarded: dict[Direction, bytearray],
    payload_way: Direction,
    payload: bytes,
    random_: random.Random,
) -> list[Fault]:
    """A cut and a flip at every byte outside the payload, at `IN_PAYLOAD` bytes of the payload, and
    some stalls. A run uses a random share of all of them."""
    faults = []
    for way in Direction:
        offsets = list(range(len(forwarded[way])))
        if way is payload_way:
            start = forwarded[way].index(payload)
            inside = range(start + 1, start + len(payload) - 1)
            chosen = set(random_.sample(inside, IN_PAYLOAD))
            offsets = [at for at in offsets if at not in inside or at in chosen]
        for at in offsets:
            faults.append(Fault(FaultType.CUT, way, at))
            faults.append(Fault(FaultType.FLIP, way, at, random_.randrange(8)))
        faults += [Fault(FaultType.STALL, way, at) for at in random_.sample(offsets, STALLS)]
    return random_.sample(faults, int(SHARE_OF_FAULTS * len(faults)))


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    def counts() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    before = counts()
    yield
    gc.collect()  # a mapping ends with its last view
    eventually(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)))


def _source(port: int, step: int, digest: str) -> Restore:
    return Restore(
        Tier.PARTNER_RAM,
        step,
        attempt=1,
        digest=digest,
        agent="source",
        host="127.0.0.1",
        data_port=port,
    )


@pytest.mark.slow
@seeded_runs
def test_a_fetch_with_any_fault_ends_with_the_state_or_an_error(shm: Path, run: int) -> None:
    points = CrashPoints("data channel: fetch", run)
    source, here = Sender(shm / "source"), Receiver(shm / "here", Place.OWN)

    def transfer(fault: Fault | None) -> bool:
        """Fetch the next step, first over the link with the fault, then without faults."""
        step = source.save()
        digest = source.segment.commits()[0].digest
        link.arm(fault)
        times = TIMES if fault else PATIENT
        try:
            fetch(SECRET, _source(link.port, step, digest), RANK, here.store, 600.0, timeouts=times)
        except (SourceLost, BadShard):
            assert fault, "failed without a fault"
            if step > 1:
                here.check(step, step - 1)
        else:
            assert not link.fired, f"{fault} went unnoticed"
        fetch(SECRET, _source(server.port, step, digest), RANK, here.store, 60.0, timeouts=PATIENT)
        here.check(step, step)
        return link.fired

    with (
        closing(DataServer(source.store, SECRET, "127.0.0.1", timeouts=PATIENT)) as server,
        closing(FaultyLink(server.port)) as link,
    ):
        transfer(None)
        for fault in _faults(
            link.forwarded, Direction.DOWN, payload_of(Saved(1, 1)), points.random
        ):
            points.tried += transfer(fault)
    points.assert_enough()


@pytest.mark.slow
@seeded_runs
def test_a_reshard_with_any_fault_ends_with_the_state_or_an_error(shm: Path, run: int) -> None:
    points = CrashPoints("data channel: boxes", run)
    source, here = Sender(shm / "source"), Receiver(shm / "here", Place.OWN)
    here.store.ensure(RANK, Place.OWN, layout_of(SIZES))

    def reshard_from(port: int, step: int, timeout_s: float, timeouts: Timeouts) -> None:
        digest = source.segment.commits()[0].digest
        origin = Origin(RANK, "source", Place.OWN, "127.0.0.1", port, digest)
        restore = Restore(Tier.RESHARD, step, attempt=1, mesh=MESH, origins=(origin,))
        Reshard(SECRET, "here", restore, RANK, here.store, timeouts=timeouts).run({}, timeout_s)

    def transfer(fault: Fault | None) -> bool:
        """Reshard the next step, first over the link with the fault, then without faults."""
        step = source.save()
        link.arm(fault)
        try:
            reshard_from(link.port, step, 600.0, TIMES if fault else PATIENT)
        except SourceLost as lost:
            assert fault, f"failed without a fault: {lost}"
            assert [origin.rank for origin in lost.origins] == [RANK]
            if step > 1:
                here.check(step, step - 1)
        else:
            assert not link.fired, f"{fault} went unnoticed"
        reshard_from(server.port, step, 60.0, PATIENT)
        here.check(step, step)
        return link.fired

    with (
        closing(DataServer(source.store, SECRET, "127.0.0.1", timeouts=PATIENT)) as server,
        closing(FaultyLink(server.port)) as link,
    ):
        transfer(None)
        raw, tensors = payload_of(Saved(1, 1)), layout_of(SIZES).tensors
        sent = b"".join(raw[entry.offset : entry.offset + entry.nbytes] for entry in tensors)
        faults = _faults(link.forwarded, Direction.DOWN, sent, points.random)
        for fault in points.random.sample(faults, BOX_FAULTS):
            points.tried += transfer(fault)
    points.assert_enough()
