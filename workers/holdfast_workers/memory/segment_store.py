"""The store of all memory checkpoints of one job on one node, as segment files in a folder.

The folder is the only source of truth and the store a view of it: a restarted agent that opens the
same folder holds the same checkpoints as the agent that died. The store never decides which state
is restored. It lists the commits, verifies them on request, and quarantines damaged ones.

Thread-safe. A segment that is replaced or dropped stays mapped for its current readers.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from holdfast_workers.memory.relaid_segment import path_beside, relaid
from holdfast_workers.memory.segment import (
    BadSegment,
    Commit,
    Segment,
    SegmentError,
    SegmentSpaceError,
)
from holdfast_workers.protocol.messages import Held, Place
from holdfast_workers.state.layout import StateLayout
from holdfast_workers.state.object_room import differ_in_room

_FILE = re.compile(r"(own|replica)-(\d+)\.seg")
_MIN_READ_BYTES_PER_S = 1 << 29
"""Lower bound of the speed at which a payload is verified; bounds the wait for another reader."""
_POLL_S = 0.1
"""How often a waiting thread checks whether it must stop waiting."""
_MESH_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_=,.-]*")


def mesh_tag(mesh: Mapping[str, int]) -> str:
    """The name of a mesh in folder names and messages, e.g. "dp_shard=2,tp=2"."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


class NothingHeld(SegmentError):
    """This node has no such segment or commit."""


class SegmentBusy(SegmentError):
    """Another thread uses the segment for longer than the caller may wait."""


@dataclass(frozen=True)
class Quarantined:
    """A state that failed verification. `attempt` and `step` are None if the whole segment is
    damaged."""

    rank: int
    place: Place
    attempt: int | None
    step: int | None
    path: Path
    reason: str


@dataclass(frozen=True)
class _Mapped:
    inode: int
    segment: Segment


class SegmentStore:
    """Segments of one mesh, in `root/<mesh>/own-<rank>.seg` and `replica-<rank>.seg`.

    Payloads of another mesh are in a store of their own beside it, see `for_mesh`. `on_quarantine`
    is called for every quarantine, in the thread that found the damage. `busy_timeout_s` bounds
    every wait for another writer of the same segment. `facts_of` gives `number` and `divisible`
    of `Held`.
    """

    def __init__(
        self,
        root: Path,
        mesh: str,
        *,
        on_quarantine: Callable[[Quarantined], None] | None = None,
        busy_timeout_s: float = 5.0,
        facts_of: Callable[[StateLayout, memoryview], tuple[int, bool]] = lambda *_: (0, True),
    ) -> None:
        if not _MESH_TAG.fullmatch(mesh):
            raise ValueError(f"mesh tag {mesh!r} cannot be a folder's name")
        self.mesh = mesh
        self.folder = root / mesh
        self._on_bad = on_quarantine
        self._busy_timeout_s = busy_timeout_s
        self._facts_of = facts_of
        self._lock = threading.Lock()
        self._mapped: dict[tuple[int, Place], _Mapped] = {}
        self._writers: dict[tuple[int, Place], threading.Lock] = {}
        self._checks: dict[tuple[int, Place], threading.Lock] = {}
        self._verified: dict[tuple[int, Place], tuple[int, Commit]] = {}  # with the file's inode
        self._prepared: dict[int, Segment] = {}  # replica segments that have no commit yet
        # All stores of a node know each other, but only the store that created another one owns it:
        # without reference cycles, an unused store frees its memory at once.
        self._meshes = WeakValueDictionary({mesh: self})
        self._meshes_lock = threading.Lock()
        self._created: list[SegmentStore] = []

    def for_mesh(self, mesh: str) -> SegmentStore:
        """This node's store for payloads of `mesh`. Raises ValueError for an invalid mesh tag."""
        with self._meshes_lock:
            found = self._meshes.get(mesh)
            if found is None:
                found = SegmentStore(
                    self.folder.parent,
                    mesh,
                    on_quarantine=self._on_bad,
                    busy_timeout_s=self._busy_timeout_s,
                    facts_of=self._facts_of,
                )
                found._meshes, found._meshes_lock = self._meshes, self._meshes_lock
                self._meshes[mesh] = found
                self._created.append(found)
            return found

    def meshes(self) -> list[str]:
        """The meshes of all segments on this node."""
        segments = self.folder.parent.glob("*/*.seg")
        names = {path.parent.name for path in segments if _FILE.fullmatch(path.name)}
        return sorted(name for name in names if _MESH_TAG.fullmatch(name))

    def path(self, rank: int, place: Place) -> Path:
        """Path of the segment; a worker opens or creates its own at `path(rank, OWN)`."""
        return self.folder / f"{place.value}-{rank}.seg"

    def ensure(self, rank: int, place: Place, layout: StateLayout) -> Segment:
        """The segment, writable: the present one if its layout fits, else a new one, with the
        newest step of the present one if only the room of objects differs.

        Raises SegmentSpaceError if shared memory is full.
        """
        found = self.find(rank, place)
        if found is not None and found.layout == layout:
            return found
        if found is not None:
            segment = relaid(found, layout)
        else:
            segment = Segment.create(self.path(rank, place), layout)
        with self._lock:
            inode = segment.path.stat().st_ino
            self._mapped[rank, place] = _Mapped(inode, segment)
        return segment

    def prepare_replica(self, rank: int, layout: StateLayout) -> bool:
        """Make a replica segment with this layout; returns whether it is to replace another one.

        One in which objects have other room takes over with its newest step. Otherwise the former
        keeps its place, with its commits, until the new one has a commit too. If shared memory has
        no room for both, the former goes first. Raises SegmentSpaceError.
        """
        former = self.find(rank, Place.REPLICA)
        if former is None or former.layout == layout or not former.commits():
            self._drop_prepared(rank)
            self.ensure(rank, Place.REPLICA, layout)
            return False
        with contextlib.suppress(SegmentSpaceError):
            return self._prepare_beside(rank, former, layout)
        del former  # its memory is free once nothing maps it
        self.drop(rank, Place.REPLICA)
        self.ensure(rank, Place.REPLICA, layout)
        return True

    def _prepare_beside(self, rank: int, former: Segment, layout: StateLayout) -> bool:
        if differ_in_room(former.layout, layout):
            self.ensure(rank, Place.REPLICA, layout)
            return False
        prepared = self._prepared.get(rank)
        if prepared is None or prepared.layout != layout or not prepared.file_exists:
            beside = path_beside(self.path(rank, Place.REPLICA))
            self._prepared[rank] = Segment.create(beside, layout)
        return True

    def _drop_prepared(self, rank: int) -> None:
        prepared = self._prepared.pop(rank, None)
        if prepared is not None:
            prepared.path.unlink(missing_ok=True)

    def replica_of_size(self, rank: int, nbytes: int) -> Segment | None:
        """The replica segment for payloads of `nbytes`, in its place or prepared."""
        for segment in (self._prepared.get(rank), self.find(rank, Place.REPLICA)):
            if segment is not None and segment.layout.payload_bytes == nbytes:
                return segment
        return None

    def put_in_place(self, rank: int, segment: Segment) -> None:
        """Put `segment` in the place of the former replica, if it was only prepared."""
        if self._prepared.get(rank) is segment:
            del self._prepared[rank]
            segment.path = segment.path.replace(self.path(rank, Place.REPLICA))

    def find(self, rank: int, place: Place) -> Segment | None:
        """The segment as the folder has it now, or None. A damaged file is quarantined: None."""
        found = self._find(rank, place)
        return found.segment if found is not None else None

    def held(self, *, verified: bool = False) -> list[Held]:
        """Every commit on this node, by rank, newest first. With `verified`, every payload is
        checked against its digest (at memory bandwidth), and damaged ones are quarantined."""
        held = []
        for rank, place in self._present():
            segment = self.find(rank, place)
            for commit in segment.commits() if segment else ():
                if not verified or self.check(rank, place, commit):
                    held.append(self.describe(rank, place, commit))
        return held

    def check(
        self,
        rank: int,
        place: Place,
        commit: Commit,
        check_cancelled: Callable[[], object] = lambda: None,
    ) -> bool:
        """True if the payload has the digest in its commit word. A damaged payload is quarantined
        and reported; one that is overwritten meanwhile is neither. `check_cancelled` is called
        during the check; an exception of it ends the check."""
        segment = self.find(rank, place)
        if segment is None or segment.verify(commit, check_cancelled):
            return segment is not None
        if segment.is_current(commit):
            segment.quarantine(commit)
            reason = f"the payload does not have its digest {commit.digest}"
            self._report(
                Quarantined(rank, place, commit.attempt, commit.step, segment.path, reason)
            )
        return False

    def check_once(
        self,
        rank: int,
        place: Place,
        commit: Commit,
        check_cancelled: Callable[[], object] = lambda: None,
    ) -> bool:
        """Check the commit like `check`, but do not read a payload again that was verified before,
        while its word is unchanged."""
        with self._lock:
            lock = self._checks.setdefault((rank, place), threading.Lock())
        reading_s = commit.nbytes / _MIN_READ_BYTES_PER_S
        with self._acquired(lock, rank, place, self._busy_timeout_s + reading_s, check_cancelled):
            found = self._find(rank, place)
            if found is None:
                return False
            verified = (found.inode, commit)
            if self._verified.get((rank, place)) == verified:
                return found.segment.is_current(commit)
            if not self.check(rank, place, commit, check_cancelled):
                return False
            self._verified[rank, place] = verified
            return True

    def describe(self, rank: int, place: Place, commit: Commit) -> Held:
        """The commit as a message for the supervisor."""
        segment = self.find(rank, place)
        number, divisible = (
            self._facts_of(segment.layout, segment.slot(commit)) if segment else (0, True)
        )
        return Held(
            rank=rank,
            step=commit.step,
            attempt=commit.attempt,
            mesh=self.mesh,
            digest=commit.digest,
            nbytes=commit.nbytes,
            place=place,
            number=number,
            divisible=divisible,
        )

    @contextmanager
    def writing(self, rank: int, place: Place) -> Iterator[None]:
        """Hold the write lock of the segment within this process. Raises SegmentBusy."""
        with self._lock:
            lock = self._writers.setdefault((rank, place), threading.Lock())
        with self._acquired(lock, rank, place, self._busy_timeout_s):
            yield

    def adopt(self, rank: int) -> None:
        """Turn the replica of `rank` into this node's own segment by renaming it; no byte moves.

        For a rank that moves to a node which already holds its replica. Raises NothingHeld, or
        SegmentBusy if a push to the replica does not end in time.
        """
        replica = self.path(rank, Place.REPLICA)
        with self.writing(rank, Place.REPLICA), self.writing(rank, Place.OWN):
            try:
                replica.replace(self.path(rank, Place.OWN))
            except FileNotFoundError as error:
                raise NothingHeld(f"no replica of rank {rank} in {self.folder}") from error
            self.drop(rank, Place.REPLICA)  # what was prepared in its place

    def drop(self, rank: int, place: Place) -> None:
        """Free one segment; does nothing if it is absent."""
        self.path(rank, place).unlink(missing_ok=True)
        if place is Place.REPLICA:
            self._drop_prepared(rank)
        with self._lock:
            self._mapped.pop((rank, place), None)
            self._verified.pop((rank, place), None)

    def free_others(self) -> None:
        """Free all segments of other meshes, including quarantined ones."""
        for folder in self.folder.parent.glob("*/"):
            if folder != self.folder and _MESH_TAG.fullmatch(folder.name):
                self.for_mesh(folder.name).close()
                shutil.rmtree(folder, ignore_errors=True)

    def keep_only(self, own: Container[int], replicas: Container[int]) -> None:
        """Free every segment except those of the ranks in `own` and `replicas`. Current readers
        keep theirs mapped; a segment that stays busy for longer than `busy_timeout_s` is kept."""
        kept = {Place.OWN: own, Place.REPLICA: replicas}
        for rank, place in self._present():
            if rank not in kept[place]:
                with contextlib.suppress(SegmentBusy), self.writing(rank, place):
                    self.drop(rank, place)

    def free_all(self) -> None:
        """Free all segments of this node, of this mesh and of others."""
        self.free_others()
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Unmap everything. The files stay for the next store of this folder."""
        with self._lock:
            self._mapped.clear()
            self._prepared.clear()

    @contextmanager
    def _acquired(
        self,
        lock: threading.Lock,
        rank: int,
        place: Place,
        timeout_s: float,
        check_cancelled: Callable[[], object] = lambda: None,
    ) -> Iterator[None]:
        deadline = time.monotonic() + timeout_s
        while not lock.acquire(timeout=min(_POLL_S, max(0.0, deadline - time.monotonic()))):
            check_cancelled()
            if time.monotonic() >= deadline:
                raise SegmentBusy(f"{self.path(rank, place)} was in use for {timeout_s:g} s")
        try:
            yield
        finally:
            lock.release()

    def _present(self) -> list[tuple[int, Place]]:
        names = (_FILE.fullmatch(path.name) for path in self.folder.glob("*.seg"))
        return sorted((int(name[2]), Place(name[1])) for name in names if name)

    def _find(self, rank: int, place: Place) -> _Mapped | None:
        path = self.path(rank, place)
        try:
            with self._lock:
                return self._map(rank, place, path)
        except FileNotFoundError:
            with self._lock:
                self._mapped.pop((rank, place), None)
            return None
        except BadSegment as error:
            path.replace(path.with_suffix(".bad"))
            self._report(Quarantined(rank, place, None, None, path, str(error)))
            return None

    def _map(self, rank: int, place: Place, path: Path) -> _Mapped:
        inode = path.stat().st_ino
        mapped = self._mapped.get((rank, place))
        if mapped is None or mapped.inode != inode:
            mapped = self._mapped[rank, place] = _Mapped(inode, Segment.open(path))
        return mapped

    def _report(self, bad: Quarantined) -> None:
        if self._on_bad is not None:
            self._on_bad(bad)
