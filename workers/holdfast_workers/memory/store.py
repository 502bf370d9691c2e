"""All memory checkpoints of one job on one node, as files: what is held is what lies there.

The folder is the truth and this object only a view of it, so a restarted agent that makes a new
store of the same folder holds what the dead one held. Nothing here decides which state is taken;
it says what there is, verified if asked, and takes bad ones out of what counts.

Thread-safe. A segment replaced or dropped stays mapped for whoever is reading it just then.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast_workers.layout import StateLayout
from holdfast_workers.memory.segment import BadSegment, Commit, Segment, SegmentError
from holdfast_workers.messages import Held, Place

_FILE = re.compile(r"(own|replica)-(\d+)\.seg")
_MESH_TAG = re.compile(r"[A-Za-z0-9_=,.-]+")


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

    `on_bad` hears of every quarantine, in the thread that found the bad state.
    `busy_timeout_s` bounds every wait for another writer of the same segment.
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
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._on_bad = on_bad
        self._busy_timeout_s = busy_timeout_s
        self._lock = threading.Lock()
        self._mapped: dict[tuple[int, Place], _Mapped] = {}
        self._writers: dict[tuple[int, Place], threading.Lock] = {}

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

    def check(self, rank: int, place: Place, commit: Commit) -> bool:
        """True if the payload is what its word says. A bad one is quarantined and reported; one
        that was overwritten meanwhile is neither."""
        segment = self.find(rank, place)
        if segment is None or segment.verify(commit):
            return segment is not None
        if segment.is_current(commit):
            segment.quarantine(commit)
            why = f"the payload does not have its digest {commit.digest}"
            self._report(Quarantined(rank, place, commit.attempt, commit.step, segment.path, why))
        return False

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
        if not lock.acquire(timeout=self._busy_timeout_s):
            raise SegmentBusy(
                f"{self.path(rank, place)} was being written for {self._busy_timeout_s} s"
            )
        try:
            yield
        finally:
            lock.release()

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

    def free_all(self) -> None:
        """Free every byte of every segment of this mesh, quarantined ones too."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Unmap everything. The files stay for whoever comes next."""
        with self._lock:
            self._mapped.clear()

    def _present(self) -> list[tuple[int, Place]]:
        names = (_FILE.fullmatch(path.name) for path in self.folder.glob("*.seg"))
        return sorted((int(name[2]), Place(name[1])) for name in names if name)

    def _map(self, rank: int, place: Place, path: Path) -> Segment:
        inode = path.stat().st_ino
        mapped = self._mapped.get((rank, place))
        if mapped is None or mapped.inode != inode:
            mapped = self._mapped[rank, place] = _Mapped(inode, Segment.open(path))
        return mapped.segment

    def _report(self, bad: Quarantined) -> None:
        if self._on_bad is not None:
            self._on_bad(bad)
