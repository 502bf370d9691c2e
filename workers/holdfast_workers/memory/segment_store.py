"""All memory checkpoints of one job on one node, as files: what is held is what lies there.

The folder is the truth and this object only a view of it, so a restarted agent that makes a new
store of the same folder holds what the dead one held. Nothing here decides which state is taken;
it says what there is, verified if asked, and takes bad ones out of what counts.

Thread-safe. A segment replaced or dropped stays mapped for whoever is reading it just then.
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

from holdfast_workers.memory.segment import BadSegment, Commit, Segment, SegmentError
from holdfast_workers.protocol.messages import Held, Place
from holdfast_workers.state.layout import StateLayout

_FILE = re.compile(r"(own|replica)-(\d+)\.seg")
_SLOWEST_READ = 1 << 29
"""Bytes per second that a payload is read at against its digest, at the least."""
_LOOK_S = 0.1
"""How often who waits for another reader looks whether it is still to wait."""
_MESH_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_=,.-]*")


def mesh_tag(mesh: Mapping[str, int]) -> str:
    """The mesh as its payloads are named."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


class NothingHeld(SegmentError):
    """No such segment on this node."""


class SegmentBusy(SegmentError):
    """Somebody else is writing the segment, for longer than the caller would wait."""


@dataclass(frozen=True)
class Quarantined:
    """A state that failed verification. `step` is None where the whole segment is damaged."""

    rank: int
    place: Place
    attempt: int | None
    step: int | None
    path: Path
    why: str


@dataclass(frozen=True)
class _Mapped:
    inode: int
    segment: Segment


class SegmentStore:
    """Segments of one mesh, in `root/<mesh>/own-<rank>.seg` and `replica-<rank>.seg`.

    Payloads of another mesh lie beside it, in a store of their own, see `of`. `on_bad` hears of
    every quarantine, in the thread that found the bad state. `busy_timeout_s` bounds
    every wait for another writer of the same segment.
    """

    def __init__(
        self,
        root: Path,
        mesh: str,
        *,
        on_bad: Callable[[Quarantined], None] | None = None,
        busy_timeout_s: float = 5.0,
    ) -> None:
        if not _MESH_TAG.fullmatch(mesh):
            raise ValueError(f"mesh tag {mesh!r} cannot be a folder's name")
        self.mesh = mesh
        self.folder = root / mesh
        self._on_bad = on_bad
        self._busy_timeout_s = busy_timeout_s
        self._lock = threading.Lock()
        self._mapped: dict[tuple[int, Place], _Mapped] = {}
        self._writers: dict[tuple[int, Place], threading.Lock] = {}
        self._checks: dict[tuple[int, Place], threading.Lock] = {}
        self._good: dict[tuple[int, Place], tuple[int, Commit]] = {}  # with the file's inode
        # All stores of a node know each other, and only the one that made another keeps it: without
        # circles, what nobody uses any more gives its memory back at once.
        self._meshes = WeakValueDictionary({mesh: self})
        self._finding = threading.Lock()
        self._made: list[SegmentStore] = []

    def of(self, mesh: str) -> SegmentStore:
        """This node's store for payloads of `mesh`. Raises ValueError for what is no mesh tag."""
        with self._finding:
            found = self._meshes.get(mesh)
            if found is None:
                found = SegmentStore(
                    self.folder.parent,
                    mesh,
                    on_bad=self._on_bad,
                    busy_timeout_s=self._busy_timeout_s,
                )
                found._meshes, found._finding = self._meshes, self._finding
                self._meshes[mesh] = found
                self._made.append(found)
            return found

    def meshes(self) -> list[str]:
        """The meshes that this node has segments of."""
        segments = self.folder.parent.glob("*/*.seg")
        names = {path.parent.name for path in segments if _FILE.fullmatch(path.name)}
        return sorted(name for name in names if _MESH_TAG.fullmatch(name))

    def path(self, rank: int, place: Place) -> Path:
        """Where the segment lies; a worker opens or creates its own at `path(rank, OWN)`."""
        return self.folder / f"{place.value}-{rank}.seg"

    def ensure(self, rank: int, place: Place, layout: StateLayout) -> Segment:
        """The segment, writable: the one that is there if its layout fits, else a new one.

        Raises SegmentSpaceError where shared memory is full.
        """
        found = self.find(rank, place)
        if found is not None and found.layout == layout:
            return found
        segment = Segment.create(self.path(rank, place), layout)
        with self._lock:
            inode = segment.path.stat().st_ino
            self._mapped[rank, place] = _Mapped(inode, segment)
        return segment

    def find(self, rank: int, place: Place) -> Segment | None:
        """The segment as it lies there now, or None. A damaged file is quarantined: None."""
        found = self._find(rank, place)
        return found.segment if found is not None else None

    def held(self, *, verified: bool = False) -> list[Held]:
        """Every commit on this node, by rank, newest first. With `verified`, every payload is
        read against its digest (at memory bandwidth), and the bad ones are quarantined."""
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
        look: Callable[[], object] = lambda: None,
    ) -> bool:
        """True if the payload is what its word says. A bad one is quarantined and reported; one
        that was overwritten meanwhile is neither. What `look` raises meanwhile ends the check."""
        segment = self.find(rank, place)
        if segment is None or segment.verify(commit, look):
            return segment is not None
        if segment.is_current(commit):
            segment.quarantine(commit)
            why = f"the payload does not have its digest {commit.digest}"
            self._report(Quarantined(rank, place, commit.attempt, commit.step, segment.path, why))
        return False

    def check_once(
        self,
        rank: int,
        place: Place,
        commit: Commit,
        look: Callable[[], object] = lambda: None,
    ) -> bool:
        """As `check`, but what was found good is not read again while its word stands."""
        with self._lock:
            lock = self._checks.setdefault((rank, place), threading.Lock())
        reading_s = commit.nbytes / _SLOWEST_READ
        with self._held(lock, rank, place, self._busy_timeout_s + reading_s, look):
            found = self._find(rank, place)
            if found is None:
                return False
            looked_at = (found.inode, commit)
            if self._good.get((rank, place)) == looked_at:
                return found.segment.is_current(commit)
            if not self.check(rank, place, commit, look):
                return False
            self._good[rank, place] = looked_at
            return True

    def describe(self, rank: int, place: Place, commit: Commit) -> Held:
        return Held(
            rank=rank,
            step=commit.step,
            attempt=commit.attempt,
            mesh=self.mesh,
            digest=commit.digest,
            nbytes=commit.nbytes,
            place=place,
        )

    @contextmanager
    def writing(self, rank: int, place: Place) -> Iterator[None]:
        """The right to write the segment, within this process. Raises SegmentBusy."""
        with self._lock:
            lock = self._writers.setdefault((rank, place), threading.Lock())
        with self._held(lock, rank, place, self._busy_timeout_s):
            yield

    def adopt(self, rank: int) -> None:
        """Make the replica of `rank` this node's own segment of it; no byte moves.

        For a rank that comes to the node which already holds its replica. Raises NothingHeld,
        or SegmentBusy if a push to the replica does not end in time.
        """
        replica = self.path(rank, Place.REPLICA)
        with self.writing(rank, Place.REPLICA), self.writing(rank, Place.OWN):
            try:
                replica.replace(self.path(rank, Place.OWN))
            except FileNotFoundError as error:
                raise NothingHeld(f"no replica of rank {rank} in {self.folder}") from error

    def drop(self, rank: int, place: Place) -> None:
        """Free one segment; it may be absent."""
        self.path(rank, place).unlink(missing_ok=True)
        with self._lock:
            self._mapped.pop((rank, place), None)
            self._good.pop((rank, place), None)

    def free_others(self) -> None:
        """Free every byte of every segment of other meshes, quarantined ones too."""
        for folder in self.folder.parent.glob("*/"):
            if folder != self.folder and _MESH_TAG.fullmatch(folder.name):
                self.of(folder.name).close()
                shutil.rmtree(folder, ignore_errors=True)

    def keep_only(self, own: Container[int], replicas: Container[int]) -> None:
        """Free every segment but those of the ranks named, by place. Who reads one just then
        reads on; one that is being written for longer than the others wait stays."""
        kept = {Place.OWN: own, Place.REPLICA: replicas}
        for rank, place in self._present():
            if rank not in kept[place]:
                with contextlib.suppress(SegmentBusy), self.writing(rank, place):
                    self.drop(rank, place)

    def free_all(self) -> None:
        """The same, and those of this mesh too."""
        self.free_others()
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Unmap everything. The files stay for whoever comes next."""
        with self._lock:
            self._mapped.clear()

    @contextmanager
    def _held(
        self,
        lock: threading.Lock,
        rank: int,
        place: Place,
        timeout_s: float,
        look: Callable[[], object] = lambda: None,
    ) -> Iterator[None]:
        deadline = time.monotonic() + timeout_s
        while not lock.acquire(timeout=min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
            look()
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
