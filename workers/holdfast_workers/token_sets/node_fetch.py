"""Brings the token sets of a job into a node's cache, so that ranks can read them.

Each file is verified by its digest while it is written under another name, and gets its own name
once it is on disk. What the job reads now (`fetch_plan`) is locked: nothing removes it. What it
reads next is kept, unless others read something now that has no room; the rest may be removed.

A file comes from the cache of another node if one has it, or will have it soon (`partner_caches`),
else from the store. What is damaged, missing or refused is tried again until it comes or the fetch
is stopped, and its reason is left for the ranks (`token_cache.report_trouble`). What goes, because
a rank found it damaged, is fetched again. Processes of one node do not fetch the same file twice at
once: they lock its unfinished file, which the next one takes over from one that was killed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import xxhash

from holdfast_workers.checkpoint.storage import (
    ObjectMissing,
    ObjectReader,
    Storage,
    StorageError,
    TransientStorageError,
    joined,
)
from holdfast_workers.data.fetch_plan import FetchPlan, KeptShards
from holdfast_workers.data.token_cache import (
    decoded,
    manifest_file,
    report_trouble,
    shard_file,
)
from holdfast_workers.data.token_corpus import order_of, shuffle_bytes
from holdfast_workers.data.token_set import MANIFEST, BadTokenSet, ShardFacts, TokenSet
from holdfast_workers.data.validation_sets import ValidationSets, read_sets
from holdfast_workers.errors import WorkersError
from holdfast_workers.memory.cache_transfer import (
    MOST_NAMES,
    CachedReader,
    RemoteCache,
)
from holdfast_workers.node_cache import use_locks
from holdfast_workers.node_cache.cached_file import LIMIT_VARIABLE, cache_limit_bytes, make_room
from holdfast_workers.private_files import make_private_folder, sync_folder, write_private
from holdfast_workers.spec import PreparedSpec, TrainingSpec
from holdfast_workers.token_sets.partner_caches import PartnerCaches

_PIECE_BYTES = 4 << 20
_POLL_S = 0.2
_LARGEST_MANIFEST = 1 << 28
"""Bytes of one that comes from another node."""

_log = structlog.get_logger()


@dataclass(frozen=True)
class Pauses:
    """Waits of a fetch, in seconds."""

    retries_s: tuple[float, ...] = (1.0, 3.0)
    """Before each further attempt for one file."""
    round_s: float = 15.0
    """Before what could not be fetched is tried again, well within a rank's patience; also the
    longest wait for another process that fetches a file."""
    room_s: float = 1.0
    """Before it is looked again whether others have made room."""
    look_s: float = 5.0
    """Between looks whether a file has gone."""


@dataclass(frozen=True)
class FetchProgress:
    """How much the cache has of the shards that it is to hold now."""

    shards: int
    shards_there: int
    nbytes: int
    bytes_there: int
    is_all: bool
    """Whether these are all shards of the job."""
    trouble: str = ""
    """The last reason why something is not there, until it is."""
    from_partners: int = 0
    """The files that came from other nodes, since the beginning."""

    @property
    def is_whole(self) -> bool:
        return 0 < self.shards == self.shards_there and not self.trouble


@dataclass(frozen=True)
class WantedFile:
    """A file of a set."""

    prepared: PreparedSpec
    shard: ShardFacts | None
    """None: the manifest."""
    path: Path
    """Its place in the cache."""


class _NoRoom(TransientStorageError):
    """The cache has no room for a shard: others use their files, or keep them for later."""


class _Stopped(Exception):
    """The fetch is stopped."""


def fetch(
    spec: TrainingSpec,
    open_set: Callable[[str], Storage],
    cache_dir: Path,
    stop: threading.Event,
    on_progress: Callable[[FetchProgress], None],
    window: Callable[[], int | None],
    pauses: Pauses = Pauses(),
    partners: PartnerCaches | None = None,
) -> None:
    """Bring the shards of `spec.data.prepared` that a run reads at a window of its order, those
    that its evaluations read, and those that it reads next, and then what has gone from
    `cache_dir`, until `stop` is set. So long, what is read now, or by evaluations, stays locked,
    and what is read next is kept. `window`: the first one that ranks read now; while it is None,
    shards come only if the cache may keep all. `on_progress` learns when all that is to be held is
    there. `open_set`: the storage of a set by its URI, for each file; if it raises, it is called
    again. `partners`: the caches of other nodes, if there are any.

    Whatever it raises, its reason is left for the ranks: CorpusError if the cache may not keep
    enough, ValueError if there is no order, InvalidCacheLimit, OSError.
    """
    try:
        partners = partners or PartnerCaches("", partial(RemoteCache, b""), tuple)
        _NodeFetch(spec, open_set, cache_dir, stop, on_progress, window, pauses, partners).run()
    except Exception as error:
        reason = str(error) if isinstance(error, WorkersError) else repr(error)
        for each in read_sets(spec):
            _leave_reason(cache_dir, each, reason)
        raise


class _NodeFetch:
    def __init__(
        self,
        spec: TrainingSpec,
        open_set: Callable[[str], Storage],
        cache_dir: Path,
        stop: threading.Event,
        on_progress: Callable[[FetchProgress], None],
        window: Callable[[], int | None],
        pauses: Pauses,
        partners: PartnerCaches,
    ) -> None:
        self._spec = spec
        self._prepared = list({each.digest: each for each in read_sets(spec)}.values())
        self._open_set = open_set
        self._cache_dir = cache_dir
        self._stop = stop
        self._on_progress = on_progress
        self._window = window
        self._pauses = pauses
        self._partners = partners
        self._limit_bytes = cache_limit_bytes(os.environ)
        self._sets: dict[str, TokenSet] = {}
        self._plan: FetchPlan | None = None
        self._phase: Hashable = None
        """That of the plan which `_shards` are of."""
        self._at: int | None = None
        """The last window in this phase."""
        self._read_now = set[Path]()
        """Those of `_shards` that it reads: the first ones."""
        self._use_ns: dict[Path, int] = {}
        """The time of use of each, since the epoch: what is read last is the first to go."""
        self._all: dict[str, WantedFile] = {}
        """All shards, by their digests."""
        self._shards: list[WantedFile] = []
        """Those to hold, in their order."""
        self._held: dict[Path, int] = {}
        """The descriptor of each file that was there, which locks or keeps it."""
        self._there: dict[Path, int] = {}
        """The sizes of the shards among them."""
        self._trouble = ""
        self._troubled: set[str] = set()
        """The sets whose reasons are left for the ranks."""
        self._look_at = 0.0

    def run(self) -> None:
        make_private_folder(self._cache_dir)
        for each in self._prepared:
            report_trouble(self._cache_dir, each, "")
        try:
            self._bring_all()
            self._plan = self._new_plan()
            while True:
                self._follow(self._plan)
                self._bring_all()
                self._idle(self._pauses.look_s)
                self._gone()
        except _Stopped:
            return
        finally:
            for path in [*self._held]:
                self._let_go(path)

    # --- what is wanted ---------------------------------------------------------------------

    def _manifests(self) -> list[WantedFile]:
        return [
            WantedFile(each, None, manifest_file(self._cache_dir, each)) for each in self._prepared
        ]

    def _missing(self) -> list[WantedFile]:
        wanted = (*self._manifests(), *self._shards)
        return [each for each in wanted if each.path not in self._held]

    def _new_plan(self) -> FetchPlan:
        data, train = self._spec.data, self._spec.train
        sets = [self._sets[each.digest] for each in data.prepared]
        for prepared, token_set in zip(data.prepared, sets, strict=True):
            self._add(prepared, token_set.shards)
        kept = self._evaluated()
        use_locks.allow_descriptors(len(self._all))
        order = order_of(data, sets, self._spec.model.sequence_length, train.seed)
        shuffled = shuffle_bytes(data)
        return FetchPlan(order, sets, train.global_batch, shuffled, self._limit_bytes, kept)

    def _evaluated(self) -> KeptShards:
        """What evaluations read."""
        spec = self._spec
        if not (most := spec.evaluate.most_samples(spec.train.global_batch)):
            return KeptShards()
        validation = ValidationSets.of(spec.data, lambda each: self._sets[each.digest])
        read = validation.read(most, spec.model.sequence_length)
        for prepared, shard in read:
            self._add(prepared, [shard])
        return KeptShards([shard for _, shard in read], validation.manifests)

    def _add(self, prepared: PreparedSpec, shards: Iterable[ShardFacts]) -> None:
        for shard in shards:
            path = shard_file(self._cache_dir, shard)
            self._all.setdefault(shard.digest, WantedFile(prepared, shard, path))

    def _follow(self, plan: FetchPlan) -> None:
        """Hold what the plan says for the present window; let go of the rest."""
        if not self._has_moved():
            return
        self._at = window = self._window()
        self._phase = plan.phase(window)
        self._shards = [self._all[shard.digest] for shard in plan.held(window)]
        self._read_now = {self._all[shard.digest].path for shard in plan.read(window)}
        now_ns = time.time_ns()
        self._use_ns = {each.path: now_ns - at for at, each in enumerate(self._shards)}
        for path in self._there.keys() - self._use_ns.keys():
            self._let_go(path)
        for each in self._shards:
            if not self._is_there(each) and each.path in self._held:
                self._let_go(each.path)

    def _go_by_groups(self) -> None:
        """Let go of what has been read, so that other jobs and this one have room."""
        if self._plan is not None and self._plan.keeps_all:
            self._plan.go_by_groups()
            self._phase = None

    def _has_moved(self) -> bool:
        """Whether other shards than `_shards` may be to hold, or in another order, or others of
        them are read now."""
        plan, window = self._plan, self._window()
        if plan is None or (window == self._at and self._phase is not None):
            return False
        if plan.phase(window) != self._phase:
            return True
        self._at = window
        return False

    def _gone(self) -> list[WantedFile]:
        """Files that were there and are so no more, each once."""
        gone = [
            each
            for each in (*self._manifests(), *self._shards)
            if each.path in self._held and not use_locks.is_at(each.path, self._held[each.path])
        ]
        for each in gone:
            _log.warning("a file of a token set has gone from the cache", file=str(each.path))
            self._let_go(each.path)
        self._look_at = time.monotonic() + self._pauses.look_s
        return gone

    def _in_turn(self, left: list[WantedFile], unreachable: set[str]) -> Iterator[WantedFile]:
        """The files that are left, nearly in their order, each when it can be had; it is taken from
        the list then. Ends early if others are wanted. Between them come those that have gone: all
        may take hours. Raises _Stopped."""
        self._partners.begin()
        while left and not self._has_moved():
            if time.monotonic() >= self._look_at:
                yield from self._gone()
            each = self._next(left[:MOST_NAMES], unreachable)
            if each is None:
                self._pause(_POLL_S)
                continue
            left.remove(each)
            yield each

    def _next(self, near: list[WantedFile], unreachable: set[str]) -> WantedFile | None:
        """The first of the files that another node has, or that this node is to bring from the
        store; None: others are to bring all of them. A manifest is not waited for, and a set is
        not if its store has just failed: then its files fail too."""
        self._partners.look([each.path.name for each in near])
        for each in near:
            name, fails = each.path.name, each.prepared.digest in unreachable
            is_waited_for = not (fails or each.shard is None or self._partners.is_own(name))
            if not is_waited_for or self._partners.have(name) or each.path.exists():
                return each
        return None

    # --- attempts, and what they report -----------------------------------------------------

    def _bring_all(self) -> None:
        """Return once all is there, or others are wanted. Raises _Stopped."""
        while True:
            pause_s = self._bring_each(self._missing())
            if self._has_moved():
                return
            if not self._missing():
                self._partners.rest()
                self._advance(trouble="")
                return
            self._idle(pause_s)

    def _bring_each(self, left: list[WantedFile]) -> float:
        """Try to bring each, unless others are wanted meanwhile. What is read later may wait for
        room, and is no trouble then. Returns the pause, in seconds, before what is missing is tried
        again. Raises _Stopped."""
        failed, unreachable, pause_s = list[WantedFile](), set[str](), self._pauses.room_s
        for each in self._in_turn(left, unreachable):
            is_reached = each.prepared.digest not in unreachable
            if not is_reached and not self._partners.have(each.path.name):
                failed.append(each)
            elif isinstance(error := self._attempts(each), _NoRoom):
                self._go_by_groups()
                left[:] = [other for other in left if other.path in self._read_now]
                if each.path in self._read_now:
                    self._report(each.prepared, str(error))
                    failed += [each, *left]
                    break
            elif error is not None:
                failed.append(each)
                self._report(each.prepared, str(error))
                pause_s = self._pauses.round_s
                if isinstance(error, StorageError) and not isinstance(error, ObjectMissing):
                    unreachable.add(each.prepared.digest)
        if not self._has_moved():
            self._end_troubles({each.prepared.digest for each in failed})
        return pause_s

    def _attempts(self, wanted: WantedFile) -> WorkersError | None:
        """The error of the last attempt, if all failed. Raises _Stopped."""
        is_first_trouble = wanted.prepared.digest not in self._troubled
        for pause_s in (*self._pauses.retries_s, None):
            self._pause(0.0)
            error = self._attempt(wanted)
            if error is None:
                if is_first_trouble:  # before it is said that all is there
                    self._end_trouble(wanted.prepared)
                self._advance()
                return None
            if pause_s is None or isinstance(error, _NoRoom):
                return error
            _log.warning("a file of a token set is tried again", why=str(error))
            _leave_reason(self._cache_dir, wanted.prepared, str(error))  # a try may take a minute
            self._troubled.add(wanted.prepared.digest)
            self._pause(pause_s)
        raise AssertionError("the last attempt returns")

    def _attempt(self, wanted: WantedFile) -> WorkersError | None:
        try:
            if wanted.shard is None:
                self._bring_manifest(wanted)
            else:
                self._bring_shard(wanted, wanted.shard)
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
        if reason != self._trouble:
            _log.error("a token set is not complete on this node", why=reason)
        _leave_reason(self._cache_dir, prepared, reason)
        self._troubled.add(prepared.digest)
        self._advance(trouble=reason)

    def _end_troubles(self, but_of: Collection[str]) -> None:
        """The other sets have none any more."""
        for prepared in self._prepared:
            if prepared.digest not in but_of:
                self._end_trouble(prepared)
        if self._trouble and not self._troubled:
            self._advance(trouble="")

    def _end_trouble(self, prepared: PreparedSpec) -> None:
        if prepared.digest in self._troubled:
            report_trouble(self._cache_dir, prepared, "")
            self._troubled.remove(prepared.digest)

    def _advance(self, trouble: str | None = None) -> None:
        self._trouble = self._trouble if trouble is None else trouble
        nbytes = sum(each.shard.nbytes for each in self._shards if each.shard)
        there = len(self._there), sum(self._there.values())
        is_all = self._plan is not None and self._plan.keeps_all
        self._on_progress(
            FetchProgress(
                len(self._shards),
                there[0],
                nbytes,
                there[1],
                is_all,
                self._trouble,
                self._partners.taken,
            )
        )

    def _pause(self, seconds: float) -> None:
        """Raises _Stopped."""
        if self._stop.wait(seconds):
            raise _Stopped

    def _idle(self, seconds: float) -> None:
        """Wait, unless others are wanted, or may be had elsewhere. Raises _Stopped."""
        self._pause(0.0)
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            if self._has_moved() or self._partners.are_new:
                return
            self._pause(min(left_s, _POLL_S))

    # --- one file ---------------------------------------------------------------------------

    def _hold(self, path: Path, descriptor: int) -> None:
        """Own the descriptor of a file until the file has gone, or the fetch ends."""
        if (former := self._held.get(path)) is not None:
            os.close(former)
        self._held[path] = descriptor

    def _let_go(self, path: Path) -> None:
        os.close(self._held.pop(path))
        self._there.pop(path, None)

    def _bring_manifest(self, wanted: WantedFile) -> None:
        prepared, path = wanted.prepared, wanted.path
        try:
            self._sets[prepared.digest] = decoded(path.read_bytes(), str(path), prepared)
        except (FileNotFoundError, BadTokenSet):

            def keep(source: CachedReader) -> None:
                content = source.read_all(_LARGEST_MANIFEST)
                self._keep_manifest(wanted, content, f"{path.name} of another node")

            if not self._partners.take(path.name, keep):
                content = self._open_set(prepared.uri).read(MANIFEST)
                self._keep_manifest(wanted, content, joined(prepared.uri, MANIFEST))
        self._hold(path, use_locks.opened(path))

    def _keep_manifest(self, wanted: WantedFile, content: bytes, where: str) -> None:
        """Raises BadTokenSet and OSError."""
        self._sets[wanted.prepared.digest] = decoded(content, where, wanted.prepared)
        write_private(wanted.path, content)

    def _is_there(self, wanted: WantedFile) -> bool:
        """Whether a shard is there; then it is held."""
        if wanted.shard is None:
            return False
        try:
            descriptor = use_locks.opened(wanted.path)
        except FileNotFoundError:
            return False
        try:
            if os.fstat(descriptor).st_size != wanted.shard.nbytes:
                os.close(descriptor)
                return False
            use_locks.note_use(descriptor, self._use_ns[wanted.path])
        except OSError:
            os.close(descriptor)
            raise
        if wanted.path not in self._read_now:
            use_locks.keep_for_later(descriptor)
        self._hold(wanted.path, descriptor)
        self._there[wanted.path] = wanted.shard.nbytes
        return True

    def _bring_shard(self, wanted: WantedFile, shard: ShardFacts) -> None:
        waited_s = 0.0
        while not self._is_there(wanted):
            unfinished = use_locks.lock_unfinished(wanted.path.with_suffix(".part"))
            if unfinished is not None:
                self._fill(unfinished, wanted.path, wanted.prepared, shard)
                continue
            if waited_s >= self._pauses.round_s:
                raise TransientStorageError(
                    str(wanted.path), "another process of this node has been fetching it for long"
                )
            self._pause(_POLL_S)
            waited_s += _POLL_S

    def _fill(self, descriptor: int, path: Path, prepared: PreparedSpec, shard: ShardFacts) -> None:
        """Fetch the shard into its unfinished file, which this process has locked, and give it its
        name. The lock ends with this; another process may remove the file before it is held."""
        unfinished = path.with_suffix(".part")
        try:
            # Another process may have finished it just before.
            if not path.exists() or path.stat().st_size != shard.nbytes:
                os.ftruncate(descriptor, shard.nbytes)  # its room, which others count
                self._make_room(or_kept=path not in self._read_now)
                where = f"{path.name} of another node"
                copy = partial(self._write, descriptor, shard=shard, where=where)
                if not self._partners.take(path.name, copy):
                    self._download(descriptor, prepared, shard)
                unfinished.rename(path)
                sync_folder(self._cache_dir)
        finally:
            use_locks.close_unfinished(descriptor, unfinished)

    def _make_room(self, or_kept: bool) -> None:
        """Raises _NoRoom."""
        if too_many := make_room(self._cache_dir, self._limit_bytes, or_kept):
            raise _NoRoom(
                str(self._cache_dir),
                f"the cache of this node is in use by other jobs: the next shard needs "
                f"{too_many / 1e9:.3g} GB more than the {self._limit_bytes / 1e9:.3g} GB of "
                f"{LIMIT_VARIABLE} leave: it is fetched once some are free; or set more",
            )

    def _download(self, descriptor: int, prepared: PreparedSpec, shard: ShardFacts) -> None:
        """Raises BadTokenSet, StorageError, OSError and _Stopped."""
        where, began = joined(prepared.uri, shard.object_name), time.monotonic()
        with self._open_set(prepared.uri).open(shard.object_name) as source:
            try:
                self._write(descriptor, source, shard, where)
            except BadTokenSet as error:
                raise BadTokenSet(
                    f"{error}; it is fetched again and again: restore the object, or delete it and "
                    "prepare the data again"
                ) from error
        self._partners.note_read(time.monotonic() - began)

    def _write(self, descriptor: int, source: ObjectReader, shard: ShardFacts, where: str) -> None:
        """Write the content to the disk. Raises BadTokenSet, OSError and _Stopped, and what
        `source` raises."""
        os.ftruncate(descriptor, shard.nbytes)  # a former content may have been longer
        digest, nbytes = xxhash.xxh3_128(), 0
        piece = memoryview(bytearray(min(_PIECE_BYTES, shard.nbytes + 1)))
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.seek(0)
            while nbytes <= shard.nbytes and (count := source.readinto(piece)):
                self._pause(0.0)
                digest.update(piece[:count])
                nbytes += file.write(piece[:count])
            file.flush()
            os.fsync(descriptor)
        if (found := str(digest.hexdigest())) != shard.digest:
            raise BadTokenSet(
                f"{where} is damaged: its digest is {found} and not {shard.digest}, in {nbytes} "
                f"bytes of {shard.nbytes}"
            )


def _leave_reason(cache_dir: Path, prepared: PreparedSpec, reason: str) -> None:
    try:
        report_trouble(cache_dir, prepared, reason)
    except OSError as error:  # such as a full disk, which is the reason then
        _log.error("the reason cannot be left for the ranks", why=str(error))
