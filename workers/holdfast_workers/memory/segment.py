"""A segment: the memory checkpoint of one rank, two payload slots in one file under /dev/shm.

Promises:

- A commit is valid only if its commit word is intact. The word is invalidated before its slot is
  touched and written last, so a writer killed at any instant leaves the other slot unchanged.
- All pages are allocated when the segment is created: a full /dev/shm is an error at that moment
  and never a SIGBUS in the middle of a step.
- One process writes, any number read. A reader takes no lock: it reads, then checks `is_current`.
- The file outlives every process; a new process continues with it after `open`.

Commit words are ordered by `seq`, the order of writing, and not by step: after a rollback the
newest state may have a lower step than a stale one, and the stale one must be overwritten. If
training rolls back to a state that a slot already holds, `make_newest` marks that state.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from holdfast_workers.errors import WorkersError
from holdfast_workers.memory.memory_room import MARGIN_BYTES, smallest_room
from holdfast_workers.private_files import make_private_folder
from holdfast_workers.state.digest import interruptible_digest
from holdfast_workers.state.layout import StateLayout

MAGIC = b"HOLDFAST"
VERSION = 1
SLOTS = 2
PAGE = 4096
CLAIM_BYTES = 32 << 20
"""Memory is claimed in pieces of this size."""

_HEADER = struct.Struct("<8sIIQQQ")  # magic, version, layout bytes, payload bytes, slot offsets
_HEADER_CRC_AT = _HEADER.size
_WORD = struct.Struct("<4sqQQQ16s")  # tag, seq, attempt, step, nbytes, digest; then its crc
_CRC = struct.Struct("<I")
_PIN = struct.Struct("<QQ")  # slot + 1 (0: none), deadline on the monotonic clock in ns
_WORDS_AT = 512
_WORD_STRIDE = 256
_PIN_AT = 2048
_PIN_MOST_NS = 60 * 10**9
_COUNTER = struct.Struct("=q")
_COUNTER_AT = 3072
_COMMITTED = b"DONE"
_QUARANTINED = b"BAD!"


class SegmentError(WorkersError):
    """Base of the errors about segments; raised itself for a misuse of the API."""


class BadSegment(SegmentError):
    """The file is not an intact segment of this version."""


class SegmentSpaceError(SegmentError):
    """Shared memory cannot hold the segment; the message gives the required and the free bytes."""


class Overwritten(SegmentError):
    """The requested commit is no longer (or was never) in the segment."""


@dataclass(frozen=True)
class Commit:
    """A state that was complete when its commit word was read."""

    attempt: int
    """The attempt that computed the state."""
    step: int
    nbytes: int
    """Size of the payload."""
    digest: str
    """xxh3-128 of the payload, in hex."""
    slot: int
    """Index of its slot, 0 or 1."""
    seq: int
    """Order of writing within the segment."""


class Segment:
    """A mapped segment file, see the module. Construct it with `create` or `open`; as a context
    manager it closes itself."""

    def __init__(self, path: Path, mapping: mmap.mmap, inode: int, writable: bool) -> None:
        self.path = path
        self.writable = writable
        self._inode = inode
        self._mapping = mapping
        self._view = memoryview(mapping)
        self._open_slot: int | None = None
        self._payload_bytes, self._slots, self._layout = _read_header(path, self._view)

    @classmethod
    def create(cls, path: Path, layout: StateLayout) -> Segment:
        """Create an empty segment at `path`, open for writing. Replaces an existing file.

        Raises SegmentSpaceError if /dev/shm (or the cgroup's memory limit) cannot hold it.
        """
        text = layout.to_json()
        first = _round_up(PAGE + len(text))
        slots = (first, first + _round_up(layout.payload_bytes))
        size = slots[1] + _round_up(layout.payload_bytes)
        make_private_folder(path.parent)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _claim_pages(fd, size, path)
            header = _HEADER.pack(
                MAGIC, VERSION, len(text), layout.payload_bytes, slots[0], slots[1]
            )
            os.pwrite(fd, header + _CRC.pack(zlib.crc32(text, zlib.crc32(header))), 0)
            os.pwrite(fd, text, PAGE)
            mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            inode = os.fstat(fd).st_ino
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return cls(path, mapping, inode, writable=True)

    @classmethod
    def open(cls, path: Path, *, writable: bool = True) -> Segment:
        """Open the segment at `path`. Raises FileNotFoundError, or BadSegment if it is not one.

        Readers pass `writable=False`, which maps the file read-only.
        """
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            size = found.st_size
            if size < PAGE:
                raise BadSegment(f"{path} is not a segment: it has only {size} bytes")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            # A writer will touch every page; a reader may need only the commit words.
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if writable else 0)
            mapping = mmap.mmap(fd, size, flags=flags, prot=protection)
        finally:
            os.close(fd)
        return cls(path, mapping, found.st_ino, writable)

    @property
    def file_exists(self) -> bool:
        """Whether the file at `path` is still the mapped one; otherwise no other process can find
        what is written. (Not only the owner removes files under /dev/shm: systemd-logind does when
        a user logs out, with RemoveIPC, and so do cleanup scripts.)"""
        try:
            return self.path.stat().st_ino == self._inode
        except FileNotFoundError:
            return False

    @property
    def layout(self) -> StateLayout:
        return self._layout

    def begin(self, step: int, *, keep: Commit | None = None) -> memoryview:
        """Choose and invalidate the slot for `step`; returns its `payload_bytes` writable bytes.

        Chooses a slot without a commit if there is one (no complete state is lost), else the slot
        that already holds `step`, else the slot written first. A slot that a reader has pinned is
        chosen only if it holds `step`. `keep`: a commit that must not be lost; its slot is not
        chosen, although the other one is pinned.
        """
        if not self.writable:
            raise SegmentError(f"{self.path} is open for reading only")
        slot = self._slot_for(step, keep)
        self._clear_word(slot)
        self._open_slot = slot
        return self._slot(slot)

    def commit(self, *, attempt: int, step: int, digest: str) -> Commit:
        """Declare the slot of the last `begin` complete. `digest`: `payload_digest` of its
        bytes."""
        slot = self._open_slot
        if slot is None:
            raise SegmentError(f"{self.path}: commit of step {step} without begin")
        seq = self._next_seq()
        commit = Commit(attempt, step, self._payload_bytes, digest, slot, seq)
        self._write_word(commit, _COMMITTED)
        self._open_slot = None
        return commit

    def make_newest(self, commit: Commit) -> None:
        """Make `commit` count as the one written last: training continues from its state.

        Rewrites the word of the other slot, with a `seq` below that of `commit`: a writer killed in
        the middle loses only the state that training has abandoned.
        """
        for other in self.commits():
            if other.seq > commit.seq:
                self._write_word(replace(other, seq=commit.seq - 1), _COMMITTED)

    def abandon(self) -> None:
        """Abandon the slot of the last `begin`; it stays without a commit."""
        self._open_slot = None

    @property
    def unfinished(self) -> memoryview | None:
        """The slot of the last `begin` until it is committed or abandoned, else None."""
        return None if self._open_slot is None else self._slot(self._open_slot)

    def commits(self) -> list[Commit]:
        """The valid commits at this moment, the one written last first."""
        words = (self._read_word(slot) for slot in range(SLOTS))
        return sorted((word for word in words if word), key=lambda word: -word.seq)

    def find(self, attempt: int, step: int, *, digest: str = "") -> Commit | None:
        """The commit of `step` that `attempt` computed, or None. Of two, that with `digest`, else
        the one written last."""
        found = [c for c in self.commits() if (c.attempt, c.step) == (attempt, step)]
        return next((c for c in found if c.digest == digest), next(iter(found), None))

    def payload(self, commit: Commit) -> memoryview:
        """Read-only view of the bytes of `commit`. They may be overwritten while they are read:
        check `is_current` afterwards. Raises Overwritten if that has already happened."""
        if not self.is_current(commit):
            raise Overwritten(
                f"{self.path}: step {commit.step} of attempt {commit.attempt} is gone"
            )
        return self.slot(commit)

    def slot(self, commit: Commit) -> memoryview:
        """The bytes of the commit's slot, without the check of `payload`: the slot may hold another
        state by now."""
        return self._slot(commit.slot).toreadonly()

    def is_current(self, commit: Commit) -> bool:
        """True if no byte of `commit` has been touched since its word was read."""
        return self._read_word(commit.slot) == commit

    def verify(self, commit: Commit, check_cancelled: Callable[[], object] = lambda: None) -> bool:
        """True if the payload has the digest in its commit word, and the word was the same before
        and after the read. `check_cancelled` is called repeatedly during the read; an exception of
        it ends the read."""
        if not self.is_current(commit):
            return False
        with self._slot(commit.slot) as payload:
            same = interruptible_digest(payload, check_cancelled) == commit.digest
        return same and self.is_current(commit)

    def quarantine(self, commit: Commit) -> None:
        """Mark `commit` as invalid. Its bytes and its word stay as evidence until the slot is used
        again."""
        if self.is_current(commit):
            self._write_word(commit, _QUARANTINED)

    def pin(self, commit: Commit, for_s: float) -> None:
        """Ask the writer not to overwrite `commit` for `for_s` (a minute at most), so that fast
        steps cannot starve a slow reader. Advisory: correctness rests on the digest alone. A
        deadline and not a lock, because a reader may die."""
        deadline = time.monotonic_ns() + min(int(for_s * 1e9), _PIN_MOST_NS)
        _PIN.pack_into(self._view, _PIN_AT, commit.slot + 1, deadline)

    def is_pinned(self, commit: Commit) -> bool:
        """Whether a reader has asked not to overwrite `commit`."""
        return self._pinned() == commit.slot

    def unpin(self) -> None:
        """Remove the pin. Does nothing on a closed segment: a store may close before its
        readers."""
        with contextlib.suppress(TypeError):  # raised by a released view
            _PIN.pack_into(self._view, _PIN_AT, 0, 0)

    def close(self) -> None:
        """Unmap. If a caller still holds a view, the mapping ends with the last view."""
        try:
            self._view.release()
            self._mapping.close()
        except BufferError:
            pass  # the views keep the mapping alive; garbage collection ends both

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _slot(self, slot: int) -> memoryview:
        start = self._slots[slot]
        return self._view[start : start + self._payload_bytes]

    def _slot_for(self, step: int, keep: Commit | None) -> int:
        if keep is not None and self.is_current(keep):
            return 1 - keep.slot
        words = {slot: self._read_word(slot) for slot in range(SLOTS)}
        for slot, word in words.items():
            if word is None:
                return slot
        oldest_first = sorted(words, key=lambda slot: words[slot].seq)  # type: ignore[union-attr]
        for slot, word in words.items():
            if word is not None and word.step == step:
                return slot
        return oldest_first[1] if oldest_first[0] == self._pinned() else oldest_first[0]

    def _next_seq(self) -> int:
        # Counted in the file, not derived from the words: a number must not repeat even after its
        # word was cleared, or a reader could not detect that its slot was overwritten.
        (last,) = _COUNTER.unpack_from(self._view, _COUNTER_AT)
        number = 1 + max(last, *(word.seq for word in self.commits()), 0)
        _COUNTER.pack_into(self._view, _COUNTER_AT, number)
        return int(number)

    def _pinned(self) -> int | None:
        slot, deadline = _PIN.unpack_from(self._view, _PIN_AT)
        left_ns = deadline - time.monotonic_ns()
        # A pin beyond the maximum is damage; obeying it would cost the newest commit for ever.
        return slot - 1 if slot and 0 < left_ns <= _PIN_MOST_NS else None

    def _read_word(self, slot: int) -> Commit | None:
        at = _WORDS_AT + slot * _WORD_STRIDE
        raw = bytes(self._view[at : at + _WORD.size + _CRC.size])
        if zlib.crc32(raw[: _WORD.size]) != _CRC.unpack_from(raw, _WORD.size)[0]:
            return None
        tag, seq, attempt, step, nbytes, digest = _WORD.unpack_from(raw)
        if tag != _COMMITTED or nbytes != self._payload_bytes:
            return None
        return Commit(attempt, step, nbytes, digest.hex(), slot, seq)

    def _write_word(self, commit: Commit, tag: bytes) -> None:
        raw = _WORD.pack(
            tag,
            commit.seq,
            commit.attempt,
            commit.step,
            commit.nbytes,
            bytes.fromhex(commit.digest),
        )
        at = _WORDS_AT + commit.slot * _WORD_STRIDE
        self._view[at : at + _WORD.size + _CRC.size] = raw + _CRC.pack(zlib.crc32(raw))

    def _clear_word(self, slot: int) -> None:
        # The tag is cleared first, in one store: a half-cleared word is invalid.
        at = _WORDS_AT + slot * _WORD_STRIDE
        self._view[at : at + 4] = bytes(4)
        self._view[at : at + _WORD.size + _CRC.size] = b"\xff" * (_WORD.size + _CRC.size)


def _read_header(path: Path, view: memoryview) -> tuple[int, tuple[int, ...], StateLayout]:
    magic, version, layout_bytes, payload_bytes, *slots = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise BadSegment(f"{path} is not a segment: it begins with {magic!r}")
    if version != VERSION:
        raise BadSegment(f"{path} has version {version}, this program reads version {VERSION}")
    text = bytes(view[PAGE : PAGE + layout_bytes])
    crc = zlib.crc32(text, zlib.crc32(view[: _HEADER.size]))
    if crc != _CRC.unpack_from(view, _HEADER_CRC_AT)[0]:
        raise BadSegment(f"{path}: the header or the layout is damaged")
    if len(view) < slots[-1] + payload_bytes:
        raise BadSegment(f"{path} is truncated to {len(view)} bytes")
    return payload_bytes, tuple(slots), StateLayout.from_json(text)


def _claim_pages(fd: int, size: int, path: Path) -> None:
    """Claim the pages of the file. Nothing is claimed if it cannot hold all; then the pages are
    claimed piece by piece, as other processes claim memory at the same time."""
    for start in range(0, size, CLAIM_BYTES):
        _require_room(size - start, path)
        try:
            os.posix_fallocate(fd, start, min(CLAIM_BYTES, size - start))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
                raise
            raise _no_space(size, path) from error


def _require_room(size: int, path: Path) -> None:
    """Raises SegmentSpaceError if shared memory or a memory limit cannot hold `size` more bytes.
    Beyond a limit, the kernel would kill a process."""
    if size > _free_shared_memory(path):
        raise _no_space(size, path)
    room = smallest_room()
    if room is not None and size + MARGIN_BYTES > room.free_bytes:
        raise SegmentSpaceError(
            f"{path.parent} cannot hold {size} bytes of a memory checkpoint: {room.limit} leaves "
            f"{room.free_bytes}, of which {MARGIN_BYTES} stay free. Raise that limit, or turn the "
            "memory tier off"
        )


def _no_space(size: int, path: Path) -> SegmentSpaceError:
    return SegmentSpaceError(
        f"{path.parent} cannot hold {size} bytes of a memory checkpoint: "
        f"{_free_shared_memory(path)} bytes are free. Give the node more shared memory "
        f"(for a container: a larger /dev/shm), or turn the memory tier off"
    )


def _free_shared_memory(path: Path) -> int:
    stat = os.statvfs(path.parent)
    return stat.f_bavail * stat.f_frsize


def _round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
