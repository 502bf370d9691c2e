"""Memory checkpoints for crash-point tests: small states with several tensors, written by the real
copy code, and the checks of what a crash or a flipped bit leaves of them."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from holdfast_workers.agent.remote_saves import RemoteSaves
from holdfast_workers.memory import segment as segment_module
from holdfast_workers.memory.segment import Commit, Segment
from holdfast_workers.memory.segment_store import Quarantined, SegmentStore
from holdfast_workers.protocol.messages import Place
from holdfast_workers.state.layout import StateLayout, TensorEntry, aligned
from holdfast_workers.state.rank_state import Snapshot
from holdfast_workers.worker import rank_checkpoints

MESH = "dp_shard=2,tp=1"
RANK = 0
SIZES = (700, 1300, 9)
OTHER_SIZES = (700, 1300, 77)
PIN_MOST_NS = 60 * 10**9


@dataclass(frozen=True)
class Saved:
    """Identifies one commit of one rank."""

    attempt: int
    step: int
    sizes: tuple[int, ...] = SIZES


def layout_of(sizes: tuple[int, ...]) -> StateLayout:
    entries, at = [], 0
    for number, nbytes in enumerate(sizes):
        shape = (nbytes,)
        entries.append(TensorEntry(f"w{number}", "uint8", shape, (0,), shape, at, nbytes))
        at += aligned(nbytes)
    return StateLayout(tuple(entries), at)


def snapshot_of(saved: Saved) -> Snapshot:
    """The live state of that attempt at that step."""
    numbers = np.random.default_rng((saved.attempt, saved.step))
    tensors = [numbers.integers(0, 256, size, dtype=np.uint8) for size in saved.sizes]
    return Snapshot(layout_of(saved.sizes), tensors)


def payload_of(saved: Saved) -> bytes:
    layout = layout_of(saved.sizes)
    payload = memoryview(bytearray(layout.payload_bytes))
    snapshot_of(saved).write(payload)
    return bytes(payload)


def save(segment: Segment, saved: Saved) -> Commit:
    """Save a state as a worker's copying thread does."""
    digest = snapshot_of(saved).write(segment.begin(saved.step))
    return segment.commit(attempt=saved.attempt, step=saved.step, digest=digest)


def open_or_create(path: Path, sizes: tuple[int, ...] = SIZES) -> Segment:
    """Open the own segment of a rank, or create it, as a worker does."""
    layout = layout_of(sizes)
    return rank_checkpoints._open_matching(path, layout) or Segment.create(path, layout)


@dataclass
class RecoveredNode:
    """The memory of a node as its restarted agent finds it."""

    root: Path
    bad: list[Quarantined] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Removing leftovers uses neither the child processes nor the signal sender.
        saves = RemoteSaves(cast(Any, None), self.root, cast(Any, None), cast(Any, None))
        saves.remove_leftovers()
        self.store = SegmentStore(self.root, MESH, on_quarantine=self.bad.append)

    def accepted(self, *, verified: bool) -> dict[tuple[Place, int, int], bytes]:
        """The payload of every commit that this node would offer for a restore."""
        found = {}
        for held in self.store.held(verified=verified):
            segment = self.store.find(held.rank, held.place)
            assert segment is not None
            commit = segment.find(held.attempt, held.step)
            assert commit is not None
            found[held.place, held.attempt, held.step] = bytes(segment.payload(commit))
        return found

    def check(
        self, known: Collection[Saved], must_hold: Collection[Saved], *, verified: bool
    ) -> None:
        """Only saved states are accepted, bit for bit, and all of `must_hold` are present."""
        accepted = self.accepted(verified=verified)
        by_name = {(saved.attempt, saved.step): saved for saved in known}
        for (place, *name), payload in accepted.items():
            saved = by_name.get((name[0], name[1]))
            assert saved is not None, f"accepted {place} {name}, which was never saved"
            assert payload == payload_of(saved), f"wrong bits accepted as {place} {saved}"
        held = {(attempt, step) for _place, attempt, step in accepted}
        assert {(saved.attempt, saved.step) for saved in must_hold} <= held, f"there is only {held}"

    def save_next(self, known: Collection[Saved]) -> None:
        """The worker saves its next step. Afterwards the node holds it and the newest earlier
        commit (or the commit that a reader may have pinned), and no other files are left."""
        following = Saved(9, 1 + max(saved.step for saved in known))
        segment = open_or_create(self.store.path(RANK, Place.OWN))
        whole = [commit for commit in segment.commits() if segment.verify(commit)]
        _slot, deadline_ns = segment_module._PIN.unpack_from(segment._view, segment_module._PIN_AT)
        if deadline_ns < time.monotonic_ns() + PIN_MOST_NS:
            whole.sort(key=lambda commit: commit.slot != segment._pinned())
        save(segment, following)
        must_hold = [following, *(Saved(saved.attempt, saved.step) for saved in whole[:1])]
        self.check([*known, following], must_hold, verified=True)
        segment.close()
        files = (path for path in self.root.rglob("*") if path.is_file())
        names = {str(path.relative_to(self.root)) for path in files if path.suffix != ".bad"}
        assert names <= {f"{MESH}/own-{RANK}.seg", f"{MESH}/replica-{RANK}.seg"}, names

    def close(self) -> None:
        self.store.close()
