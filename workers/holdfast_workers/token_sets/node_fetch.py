"""Brings the token sets of a job into a node's cache, so that ranks can read them.

Each file is verified by its digest while it is written under another name, and gets its own name
once it is on disk; it stays locked until the fetching process ends. What is damaged, missing or
refused is tried again until it comes or the fetch is stopped, and its reason is left for the ranks
(`token_cache.report_trouble`). Processes of one node do not fetch the same file twice at once: they
lock its unfinished file, which the next one takes over from one that was killed.
"""

from __future__ import annotations

import fcntl
import os
import resource
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
import xxhash

from holdfast_workers.checkpoint.storage import (
    ObjectMissing,
    Storage,
    StorageError,
    TransientStorageError,
    joined,
)
from holdfast_workers.data.corpus import CorpusError
from holdfast_workers.data.token_cache import (
    decoded,
    distinct_shards,
    manifest_file,
    refuse_larger_than_cache,
    report_trouble,
    shard_file,
)
from holdfast_workers.data.token_corpus import order_of
from holdfast_workers.data.token_set import MANIFEST, BadTokenSet, ShardFacts, TokenSet
from holdfast_workers.errors import WorkersError
from holdfast_workers.node_cache import use_locks
from holdfast_workers.node_cache.cached_file import cache_limit_bytes, make_room
from holdfast_workers.private_files import make_private_folder, sync_folder, write_private
from holdfast_workers.spec import DataSpec, PreparedSpec

_PIECE_BYTES = 4 << 20
_POLL_S = 0.2
_OTHER_DESCRIPTORS = 256
"""Descriptors of a process for anything but the locked shards."""

_log = structlog.get_logger()


@dataclass(frozen=True)
class Pauses:
    """Waits of a fetch, in seconds."""

    retries_s: tuple[float, ...] = (1.0, 3.0)
    """Before each further attempt for one file."""
    round_s: float = 15.0
    """Before what could not be fetched is tried again, well within a rank's patience; also the
    longest wait for another process that fetches a file."""


@dataclass(frozen=True)
class FetchProgress:
    """How much of the shards of a job the cache has."""

    shards: int
    shards_there: int
    nbytes: int
    bytes_there: int
    trouble: str = ""
    """The last reason why something is not there, until it is."""


@dataclass(frozen=True)
class WantedFile:
    """A file of a set, and the work that brings it into the cache and locks it."""

    prepared: PreparedSpec
    bring: Callable[[], None]
    """Raises WorkersError or OSError."""


class _Stopped(Exception):
    """The fetch is stopped."""


def fetch(
    data: DataSpec,
    sequence_length: int,
    seed: int,
    open_set: Callable[[str], Storage],
    cache_dir: Path,
    stop: threading.Event,
    on_progress: Callable[[FetchProgress], None],
    pauses: Pauses = Pauses(),
) -> None:
    """Bring the sets in `data.prepared`, in the order in which a run reads their shards (see
    `token_corpus.order_of`). Returns once all files of the sets are in `cache_dir`, or `stop` is
    set. The files stay locked until this process ends. `open_set`: the storage of a set by its URI;
    it may raise, and is called again then.

    Raises CorpusError if the cache may not keep so much, ValueError if there is no order, and
    InvalidCacheLimit.
    """
    _NodeFetch(data, sequence_length, seed, open_set, cache_dir, stop, on_progress, pauses).run()


class _NodeFetch:
    def __init__(
        self,
        data: DataSpec,
        sequence_length: int,
        seed: int,
        open_set: Callable[[str], Storage],
        cache_dir: Path,
        stop: threading.Event,
        on_progress: Callable[[FetchProgress], None],
        pauses: Pauses,
    ) -> None:
        self._data = data
        self._sequence_length = sequence_length
        self._seed = seed
        self._prepared = list({each.digest: each for each in data.prepared}.values())
        self._open_set = open_set
        self._cache_dir = cache_dir
        self._stop = stop
        self._on_progress = on_progress
        self._pauses = pauses
        self._limit_bytes = cache_limit_bytes(os.environ)
        self._sets: dict[str, TokenSet] = {}
        self._progress = FetchProgress(0, 0, 0, 0)

    def run(self) -> None:
        make_private_folder(self._cache_dir)
        for each in self._prepared:
            report_trouble(self._cache_dir, each, "")
        for left in self._cache_dir.glob("shard-*.part"):  # of a process that was killed
            if (unfinished := _lock_unfinished(left)) is not None:
                _close_unfinished(unfinished, left)
        try:
            self._bring_all(self._manifests())
            sets = [self._sets[each.digest] for each in self._prepared]
            self._refuse_too_many(sets)
            shards = distinct_shards(sets)
            self._advance(shards=len(shards), nbytes=sum(shard.nbytes for shard in shards))
            _allow_descriptors(len(shards))
            self._bring_all(self._shards())
        except _Stopped:
            return

    # --- what is wanted ---------------------------------------------------------------------

    def _manifests(self) -> Iterable[WantedFile]:
        for each in self._prepared:
            yield WantedFile(each, lambda each=each: self._bring_manifest(each))  # type: ignore[misc]

    def _shards(self) -> Iterable[WantedFile]:
        """All shards, in the order in which the run needs them."""
        data, seen = self._data, set[str]()
        sets = [self._sets[each.digest] for each in data.prepared]
        shards = [
            (prepared, shard)
            for prepared, token_set in zip(data.prepared, sets, strict=True)
            for shard in token_set.shards
        ]
        order = order_of(data, sets, self._sequence_length, self._seed)
        for number in order.shards_as_read():
            each, shard = shards[number]
            if shard.digest not in seen:
                seen.add(shard.digest)
                yield WantedFile(
                    each,
                    lambda each=each, shard=shard: self._bring_shard(each, shard),  # type: ignore[misc]
                )

    def _refuse_too_many(self, sets: Sequence[TokenSet]) -> None:
        try:
            refuse_larger_than_cache(sets, self._limit_bytes)
        except CorpusError as error:
            for each in self._prepared:
                report_trouble(self._cache_dir, each, str(error))
            raise

    # --- attempts, and what they report -----------------------------------------------------

    def _bring_all(self, wanted: Iterable[WantedFile]) -> None:
        """Raises _Stopped."""
        left, troubled = wanted, set[str]()
        while True:
            failed, unreachable = [], set[str]()
            for each in left:
                if each.prepared.digest in unreachable:
                    failed.append(each)
                elif (error := self._attempts(each)) is not None:
                    failed.append(each)
                    self._report(each.prepared, str(error))
                    if isinstance(error, StorageError) and not isinstance(error, ObjectMissing):
                        unreachable.add(each.prepared.digest)
            now_troubled = {each.prepared.digest for each in failed}
            for prepared in self._prepared:
                if prepared.digest in troubled - now_troubled:
                    report_trouble(self._cache_dir, prepared, "")
            left, troubled = failed, now_troubled
            if not left:
                self._advance(trouble="")
                return
            self._pause(self._pauses.round_s)

    def _attempts(self, wanted: WantedFile) -> WorkersError | None:
        """The error of the last attempt, if all failed. Raises _Stopped."""
        for pause_s in (*self._pauses.retries_s, None):
            self._pause(0.0)
            if (error := self._attempt(wanted)) is None or pause_s is None:
                return error
            _log.warning("a file of a token set is tried again", why=str(error))
            self._pause(pause_s)
        raise AssertionError("the last attempt returns")

    def _attempt(self, wanted: WantedFile) -> WorkersError | None:
        try:
            wanted.bring()
        except WorkersError as error:
            return error
        except OSError as error:
            return TransientStorageError(
                str(self._cache_dir),
                f"{error.strerror or error}: the cache of this node must be writable, and have "
                "room for the token sets",
            )
        return None

    def _report(self, prepared: PreparedSpec, reason: str) -> None:
        _log.error("a token set is not complete on this node", why=reason)
        try:
            report_trouble(self._cache_dir, prepared, reason)
        except OSError as error:  # a full disk, which is the reason then
            _log.error("the reason cannot be left for the ranks", why=str(error))
        self._advance(trouble=reason)

    def _advance(
        self,
        shards: int | None = None,
        nbytes: int | None = None,
        there_bytes: int | None = None,
        trouble: str | None = None,
    ) -> None:
        now = self._progress
        self._progress = FetchProgress(
            now.shards if shards is None else shards,
            now.shards_there + (there_bytes is not None),
            now.nbytes if nbytes is None else nbytes,
            now.bytes_there + (there_bytes or 0),
            now.trouble if trouble is None else trouble,
        )
        self._on_progress(self._progress)

    def _pause(self, seconds: float) -> None:
        """Raises _Stopped."""
        if self._stop.wait(seconds):
            raise _Stopped

    # --- one file ---------------------------------------------------------------------------

    def _bring_manifest(self, prepared: PreparedSpec) -> None:
        path = manifest_file(self._cache_dir, prepared)
        try:
            self._sets[prepared.digest] = decoded(path.read_bytes(), str(path), prepared)
        except (FileNotFoundError, BadTokenSet):
            content = self._open_set(prepared.uri).read(MANIFEST)
            where = joined(prepared.uri, MANIFEST)
            self._sets[prepared.digest] = decoded(content, where, prepared)
            write_private(path, content)
        use_locks.opened(path)  # until this process ends

    def _bring_shard(self, prepared: PreparedSpec, shard: ShardFacts) -> None:
        path = shard_file(self._cache_dir, shard)
        waited_s = 0.0
        while not _is_there(path, shard.nbytes):
            unfinished = _lock_unfinished(path.with_suffix(".part"))
            if unfinished is None:
                if waited_s >= self._pauses.round_s:
                    raise TransientStorageError(
                        str(path), "another process of this node has been fetching it for long"
                    )
                self._pause(_POLL_S)
                waited_s += _POLL_S
            elif self._fill(unfinished, path, prepared, shard):
                break
        self._advance(there_bytes=shard.nbytes)

    def _fill(self, descriptor: int, path: Path, prepared: PreparedSpec, shard: ShardFacts) -> bool:
        """Fetch the shard into its unfinished file, which this process has locked. Whether the file
        is now in its place, and locked as in use."""
        unfinished = path.with_suffix(".part")
        try:
            # Another process may have finished it just before.
            if not path.exists() or path.stat().st_size != shard.nbytes:
                make_room(self._cache_dir, shard.nbytes, self._limit_bytes)
                self._download(descriptor, prepared, shard)
                unfinished.rename(path)
                sync_folder(self._cache_dir)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                if use_locks.is_at(path, descriptor):
                    return True  # the descriptor stays open until this process ends
        except BaseException:
            _close_unfinished(descriptor, unfinished)
            raise
        _close_unfinished(descriptor, unfinished)
        return False

    def _download(self, descriptor: int, prepared: PreparedSpec, shard: ShardFacts) -> None:
        """Raises BadTokenSet, StorageError, OSError and _Stopped."""
        os.ftruncate(descriptor, 0)
        digest, nbytes = xxhash.xxh3_128(), 0
        piece = memoryview(bytearray(min(_PIECE_BYTES, shard.nbytes + 1)))
        with (
            self._open_set(prepared.uri).open(shard.object_name) as source,
            os.fdopen(os.dup(descriptor), "wb") as file,
        ):
            while nbytes <= shard.nbytes and (count := source.readinto(piece)):
                self._pause(0.0)
                digest.update(piece[:count])
                nbytes += file.write(piece[:count])
            file.flush()
            os.fsync(descriptor)
        if (found := str(digest.hexdigest())) != shard.digest:
            raise BadTokenSet(
                f"{joined(prepared.uri, shard.object_name)} is damaged: its digest is {found} and "
                f"not {shard.digest}, in {nbytes} bytes of {shard.nbytes}; it is fetched again and "
                "again: restore the object, or delete it and prepare the data again"
            )


def _is_there(path: Path, nbytes: int) -> bool:
    """Whether the file is there; then it is in use until this process ends."""
    try:
        descriptor = use_locks.opened(path)
    except FileNotFoundError:
        return False
    if os.fstat(descriptor).st_size == nbytes:
        use_locks.note_use(path)
        return True
    os.close(descriptor)
    return False


def _lock_unfinished(path: Path) -> int | None:
    """The unfinished file, locked for this process; None if another one has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if use_locks.is_free(descriptor) and use_locks.is_at(path, descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _close_unfinished(descriptor: int, path: Path) -> None:
    if use_locks.is_at(path, descriptor):  # and not one of another process, after this was renamed
        path.unlink()
    os.close(descriptor)


def _allow_descriptors(locked: int) -> None:
    """Each locked file needs a descriptor. Where the hard limit is too low, opening names it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = locked + _OTHER_DESCRIPTORS
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
