"""The token sets of a job as one corpus, read from the files in a node's cache.

Another process fetches the files; a missing one is waited for, visibly, and for a bounded time
since the last one came. A shard is mapped when a sample of it is read, and is locked while it is
mapped, so that nothing removes it. Once its group has been read, it is mapped no more: the cache
may need its room for what comes next. Nothing of a file is read before all of it was verified by
its digest, once by each reader; a damaged one is removed, named, and waited for like a missing one.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

import numpy as np
import structlog
import xxhash
from numpy.typing import NDArray

from holdfast_workers.data.corpus import CorpusError, DataUnavailable
from holdfast_workers.data.fetch_plan import FetchPlan, KeptShards
from holdfast_workers.data.sample_order import ConsecutiveSamples, Indices
from holdfast_workers.data.token_cache import (
    decoded,
    manifest_file,
    reported_trouble,
    shard_file,
)
from holdfast_workers.data.token_order import SourceShards, TokenOrder
from holdfast_workers.data.token_set import (
    BadTokenSet,
    ShardContent,
    ShardFacts,
    TokenSet,
    read_shard,
    shard_digest,
)
from holdfast_workers.data.validation_sets import VALIDATION_SEED, ValidationSets
from holdfast_workers.node_cache import use_locks
from holdfast_workers.node_cache.cached_file import cache_limit_bytes
from holdfast_workers.spec import DataSpec, PreparedSpec

IGNORED = -100
"""A target that no loss counts, as in torch's cross-entropy."""
PATIENCE_S = 600.0
"""The longest wait for a shard in which no shard of the job comes."""
MANIFEST_PATIENCE_S = 60.0
"""The longest wait for the manifests of a job. They are small, and are read while processes start,
whose own limits (120 s and more) would end a longer wait without its reason."""
FIRST_NOTE_S = 5.0
NOTES_EVERY_S = 30.0
_POLL_S = 0.1
_MOST_MAPPED = 256
"""Mapped shards: each needs a file descriptor."""
COLLECTIVE_SHARE = 0.9
"""Of the time after which a collective fails: a rank whose peers wait in one while it waits for
data gives up before, as its reason says more than theirs."""

_log = structlog.get_logger()
Found = TypeVar("Found")
Waiting = Callable[[], AbstractContextManager[Callable[[], None]]]
"""Entered when a wait for a file begins, and again when its end moves; what it returns is called
again and again, and may raise."""
OnWindow = Callable[[int], None]
"""Called with the number of a window before its first sample is read; in any thread."""


def _unnoticed() -> AbstractContextManager[Callable[[], None]]:
    return nullcontext(lambda: None)


class TokenCorpus:
    """Samples of `sequence_length` targets from the token sets of all sources. They are read by one
    thread at a time, window by window of `window_samples` positions."""

    def __init__(
        self,
        data: DataSpec,
        sets: Sequence[TokenSet],
        files: _AwaitedFiles,
        sequence_length: int,
        seed: int,
        window_samples: int,
        on_window: OnWindow,
    ) -> None:
        self.order = order_of(data, sets, sequence_length, seed)
        self._consecutive = ConsecutiveSamples(self.order.samples_at)
        self.vocabulary = sets[0].tokenizer.vocabulary
        digests = [each.digest for each in sets]
        weights = _weights(data, len(sets))
        what = f"{digests}/{weights}/{sequence_length}/{shuffle_bytes(data)}"
        self.fingerprint = str(xxhash.xxh3_128(what.encode()).hexdigest())
        """Of all that the samples and their order depend on, but for the seed."""
        self._shards = [
            (shard, prepared)
            for each, prepared in zip(sets, data.prepared, strict=True)
            for shard in each.shards
        ]
        self._names = {shard_file(files.cache_dir, shard).name for shard, _ in self._shards}
        files.unseen = {*self._names}
        self._files = files
        self._length = sequence_length
        self._window_samples = window_samples
        self._on_window = on_window
        self._window = -1
        self._places: tuple[tuple[int, int], ...] = ()
        self._mapped: OrderedDict[int, ShardContent] = OrderedDict()

    @classmethod
    def open(
        cls,
        data: DataSpec,
        cache_dir: Path,
        sequence_length: int,
        seed: int,
        patience_s: float = PATIENCE_S,
        waiting: Waiting = _unnoticed,
        window_samples: int = 1,
        window_patience_s: float = math.inf,
        on_window: OnWindow = lambda _: None,
        evaluated: int = 0,
    ) -> TokenCorpus:
        """The corpus of `data.prepared`; `waiting`: for each wait, here and later;
        `window_patience_s`: the longest wait for all shards of a window, `patience_s` aside;
        `evaluated`: the most samples of validation that are read beside (`open_validation`). Raises
        DataUnavailable if a manifest does not come in time; CorpusError if the sets do not fit
        together, or if the cache may not keep enough of them; and InvalidCacheLimit.
        """
        limit_bytes = cache_limit_bytes(os.environ)  # without it, nothing is fetched
        files = _AwaitedFiles(cache_dir, patience_s, window_patience_s, waiting)
        sets = [files.manifest(prepared) for prepared in data.prepared]
        validation = ValidationSets.of(data, files.manifest) if evaluated else None
        beside = () if validation is None else validation.manifests
        tokenizers = {each.tokenizer.digest: each for each in (*sets, *beside)}
        if len(tokenizers) > 1:
            sources = " and ".join(repr(each.source) for each in list(tokenizers.values())[:2])
            raise CorpusError(
                f"{sources} were prepared with different tokenizers: prepare all sources again "
                "with one"
            )
        try:
            corpus = cls(data, sets, files, sequence_length, seed, window_samples, on_window)
            kept = KeptShards()
            if validation is not None:
                kept = validation.kept(evaluated, sequence_length)
        except ValueError as error:
            raise CorpusError(f"the token sets cannot be read in an order: {error}") from error
        FetchPlan(corpus.order, sets, window_samples, shuffle_bytes(data), limit_bytes, kept)
        return corpus

    @classmethod
    def open_validation(
        cls,
        data: DataSpec,
        cache_dir: Path,
        sequence_length: int,
        patience_s: float = PATIENCE_S,
        waiting: Waiting = _unnoticed,
        window_samples: int = 1,
        window_patience_s: float = math.inf,
    ) -> TokenCorpus:
        """The documents of `data.validation`, whose order does not depend on training's; its
        first epoch has each sample once. Raises what `open` raises."""
        files = _AwaitedFiles(cache_dir, patience_s, window_patience_s, waiting)
        validation = ValidationSets.of(data, files.manifest)
        of, sets = validation.data, validation.sets
        seed, length = VALIDATION_SEED, sequence_length
        try:
            return cls(of, sets, files, length, seed, window_samples, lambda _: None)
        except ValueError as error:
            raise CorpusError(
                f"the documents of validation cannot be read in an order: {error}"
            ) from error

    @property
    def samples(self) -> int:
        """Of one epoch of all sources."""
        return self.order.samples

    def samples_at(self, positions: Indices) -> Indices:
        """The sample at each position, which is read next."""
        if len(positions):
            self._begin(int(positions.min()) // self._window_samples, int(positions.max()) + 1)
        return self._consecutive.samples_at(positions)

    def targets_of(self, samples: Indices) -> int:
        """The number of targets of these samples."""
        return int(self.order.targets_of(samples).sum())

    def batch(self, samples: Indices) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets (len(samples), sequence_length). Past the end of a shard targets are
        IGNORED. Raises DataUnavailable if a shard does not come in time, and CorpusError."""
        inputs = np.zeros((len(samples), self._length), dtype=np.int64)
        targets = np.full_like(inputs, IGNORED)
        shards, starts = self.order.windows_of(samples)
        counts = self.order.targets_of(samples)
        for row, (shard, start, count) in enumerate(
            zip(shards.tolist(), starts.tolist(), counts.tolist(), strict=True)
        ):
            tokens = self._content(shard).tokens[start : start + count + 1]
            inputs[row, :count] = tokens[:-1]
            targets[row, :count] = tokens[1:]
        return inputs, targets

    def _begin(self, window: int, end: int) -> None:
        """Samples of this window are read next, and of no position from `end` on."""
        if window != self._window:
            self._window = window
            self._files.begin_window()
            self._let_go_of_others(window * self._window_samples, end)
        self._on_window(window)  # once no file of another group is in use

    def _let_go_of_others(self, start: int, end: int) -> None:
        """Unmap the shards of groups that no sample of these positions is from."""
        places = self.order.places_at(start)
        if places == self._places:
            return
        self._places = places
        self._files.unseen = {*self._names}  # those that come again for these groups count, too
        groups = self.order.groups_between(start, max(end, start + self._window_samples))
        read = {shard for group in groups for shard in group.shards}
        for shard in self._mapped.keys() - read:
            del self._mapped[shard]

    def _content(self, shard: int) -> ShardContent:
        content = self._mapped.get(shard)
        if content is None:
            facts, prepared = self._shards[shard]
            content = self._files.shard(facts, prepared)
            if len(content.tokens) != facts.tokens:
                raise CorpusError(
                    f"{facts.object_name} has {len(content.tokens)} tokens, and the manifest of "
                    f"{prepared.uri} says {facts.tokens}: prepare the data again"
                )
            self._mapped[shard] = content
            if len(self._mapped) > _MOST_MAPPED:
                self._mapped.popitem(last=False)
        else:
            self._mapped.move_to_end(shard)
        return content


def order_of(
    data: DataSpec, sets: Sequence[TokenSet], sequence_length: int, seed: int
) -> TokenOrder:
    """The order of the samples of these sets, one for each of `data.sources`. Raises CorpusError,
    and ValueError if a set has too few tokens."""
    sizes = [SourceShards.of(each) for each in sets]
    weights = _weights(data, len(sets))
    return TokenOrder(sizes, weights, sequence_length, seed, shuffle_bytes(data))


def shuffle_bytes(data: DataSpec) -> int:
    return int(data.shuffle_gb * 1e9)


class _AwaitedFiles:
    """Files of a node's cache, each of which is waited for."""

    def __init__(
        self, cache_dir: Path, patience_s: float, window_patience_s: float, waiting: Waiting
    ) -> None:
        self.cache_dir = cache_dir
        self._patience_s = patience_s
        self._window_patience_s = window_patience_s
        self._waiting = waiting
        self._window_until = math.inf
        self._manifests_until = time.monotonic() + min(patience_s, MANIFEST_PATIENCE_S)
        self._progress_at = 0.0
        self._verified: dict[Path, tuple[int, int]] = {}
        """The inode, and the time of the last change, of each file that was verified."""
        self.unseen: set[str] = set()
        """Names of the job's shards that were not in the cache whenever a wait for the present
        groups looked."""

    def begin_window(self) -> None:
        """The next wait is the first one of a window."""
        self._window_until = math.inf

    def manifest(self, prepared: PreparedSpec) -> TokenSet:
        """Raises DataUnavailable."""
        path = manifest_file(self.cache_dir, prepared)
        return self._awaited(
            path,
            prepared,
            lambda: decoded(path.read_bytes(), str(path), prepared),
            lambda: self._manifests_until,
        )

    def shard(self, facts: ShardFacts, prepared: PreparedSpec) -> ShardContent:
        """A mapped shard, verified, and locked against removal until its arrays are gone. Raises
        DataUnavailable."""
        self._progress_at = time.monotonic()
        path = shard_file(self.cache_dir, facts)
        try:
            return self._awaited(
                path, prepared, lambda: self._mapped(path, facts), self._shard_until
            )
        except BaseException:
            self.begin_window()  # the next attempt to read it has all of the time
            raise

    def _shard_until(self) -> float:
        """The end of the wait for a shard: others that come show that the fetch goes on. One that
        comes for a second time, as it was damaged, does not show that."""
        with contextlib.suppress(FileNotFoundError):
            if came := self.unseen & {path.name for path in self.cache_dir.iterdir()}:
                self.unseen -= came
                self._progress_at = time.monotonic()
        self._window_until = min(self._window_until, time.monotonic() + self._window_patience_s)
        return min(self._progress_at + self._patience_s, self._window_until)

    def _awaited(
        self,
        path: Path,
        prepared: PreparedSpec,
        read: Callable[[], Found],
        until: Callable[[], float],
    ) -> Found:
        if not isinstance(found := _attempt(read), str):
            return found
        began = time.monotonic()
        note_at = began + FIRST_NOTE_S
        while True:
            end = until()
            with self._waiting() as check:  # anew if the end moves: it has a limit of its own
                while until() == end:
                    if not isinstance(found := _attempt(read), str):
                        return found
                    now = time.monotonic()
                    why = reported_trouble(self.cache_dir, prepared) or found
                    if now >= end:
                        if end == self._window_until:
                            why += (
                                "; if the storage is so slow, set detection.collective_timeout_s "
                                "to more"
                            )
                        raise DataUnavailable(
                            f"{path.name} of the token set {prepared.uri} did not come into the "
                            f"cache {self.cache_dir} of the node {socket.gethostname()} within "
                            f"{now - began:.0f} s: {why}"
                        )
                    if now >= note_at:
                        note_at = now + NOTES_EVERY_S
                        _log.warning(
                            "waits for data",
                            file=path.name,
                            node=socket.gethostname(),
                            waited_s=round(now - began),
                            why=why,
                        )
                    check()
                    time.sleep(_POLL_S)

    def _mapped(self, path: Path, facts: ShardFacts) -> ShardContent:
        """Raises FileNotFoundError and BadTokenSet."""
        descriptor = use_locks.opened(path)
        try:
            status = os.fstat(descriptor)
            if status.st_size != facts.nbytes:
                raise _removed(path, descriptor, f"{status.st_size} bytes, not {facts.nbytes}")
            # The mapping has the descriptor's lock, by a duplicate, as long as it exists.
            content = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
            version = (status.st_ino, status.st_mtime_ns)
            if self._verified.get(path) != version:
                if (found := shard_digest(content)) != facts.digest:
                    raise _removed(path, descriptor, f"the digest {found}, not {facts.digest}")
                self._verified[path] = version
            use_locks.note_use(descriptor)
            return read_shard(content, str(path))
        finally:
            os.close(descriptor)


def _removed(path: Path, descriptor: int, what: str) -> BadTokenSet:
    """Remove a damaged file, unless another one has taken its place, so that it is fetched
    again."""
    error = BadTokenSet(f"{path} is damaged, and is fetched again: it has {what}")
    _log.error("a damaged shard is removed from the cache", why=str(error))
    if use_locks.is_at(path, descriptor):
        path.unlink(missing_ok=True)
    return error


def _attempt(read: Callable[[], Found]) -> Found | str:
    """What was read, or the reason why it is missing."""
    try:
        return read()
    except FileNotFoundError:
        return "it is not fetched yet"
    except BadTokenSet as error:
        return str(error)


def _weights(data: DataSpec, sets: int) -> list[float] | None:
    """Raises CorpusError."""
    if data.sources and len(data.sources) != sets:
        raise CorpusError(
            f"data.sources has {len(data.sources)} sources, and data.prepared {sets} token sets: "
            "prepare the data again"
        )
    weights = [each.weight for each in data.sources if each.weight is not None]
    if weights and len(weights) != sets:
        raise CorpusError("data.sources: give every source a weight, or none")
    return weights or None
