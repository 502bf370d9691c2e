"""The two ends of a replication: a worker's node that saves, and its partner's node."""

from __future__ import annotations

from pathlib import Path

from tests.support.memory.memory_states import MESH, RANK, SIZES, Saved, layout_of, payload_of, save

from holdfast_workers.memory.segment import Segment
from holdfast_workers.memory.segment_store import Quarantined, SegmentStore
from holdfast_workers.memory.wire import Timeouts
from holdfast_workers.protocol.messages import Place

TIMES = Timeouts(connect_s=1.0, handshake_s=0.2, stall_s=0.2, idle_s=600.0)
"""Ends a stall soon. A slow machine may run into them without any fault."""


class Receiver:
    """The node that receives states; `check` reads them as its restarted agent would."""

    def __init__(self, root: Path, place: Place) -> None:
        self.root = root
        self.place = place
        self.bad: list[Quarantined] = []
        self.store = SegmentStore(root, MESH, on_quarantine=self.bad.append)

    def check(self, newest: int, must_hold: int) -> None:
        """Every commit equals one of the steps 1 to `newest` bit for bit, and `must_hold`
        exists."""
        store = SegmentStore(self.root, MESH, on_quarantine=self.bad.append)
        segment = store.find(RANK, self.place)
        assert segment is not None
        steps = []
        for commit in segment.commits():
            assert commit.attempt == 1
            assert 1 <= commit.step <= newest, f"accepted step {commit.step} of {newest}"
            payload = bytes(segment.slot(commit))
            if segment.is_current(commit):
                assert payload == payload_of(Saved(1, commit.step)), f"wrong bits: {commit.step}"
                steps.append(commit.step)
        assert segment.layout == layout_of(SIZES)
        assert must_hold in steps, f"step {must_hold} was lost, there is {steps}"
        assert self.bad == []


class Sender:
    """The worker's node, which saves one step after the other."""

    def __init__(self, root: Path) -> None:
        self.store = SegmentStore(root, MESH)
        self.segment: Segment = self.store.ensure(RANK, Place.OWN, layout_of(SIZES))
        self.step = 0

    def save(self) -> int:
        self.step += 1
        save(self.segment, Saved(1, self.step))
        return self.step
