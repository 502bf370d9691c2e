"""A cache that is smaller than the corpus follows its readers, and is shared with others."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import pytest
from tests.support.data.node_fetches import (
    AT_ONCE,
    LENGTH,
    SEED,
    RecordingStore,
    fetched,
    spec_of,
)
from tests.support.data.token_sets import MadeSet, random_shards
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.storage import ObjectMissing
from holdfast_workers.data import fetch_plan, token_corpus
from holdfast_workers.data.token_cache import manifest_file, reported_trouble, shard_file
from holdfast_workers.data.token_corpus import IGNORED, TokenCorpus
from holdfast_workers.memory.cache_transfer import RemoteCache
from holdfast_workers.node_cache import use_locks
from holdfast_workers.node_cache.cached_file import LIMIT_VARIABLE, make_room
from holdfast_workers.protocol.messages import Partner
from holdfast_workers.spec import DataSpec
from holdfast_workers.token_sets import node_fetch
from holdfast_workers.token_sets.node_fetch import FetchProgress, Pauses, fetch
from holdfast_workers.token_sets.partner_caches import PartnerCaches, ranked


def corpus_of(
    data: DataSpec, cache: Path, batch: int, on_window: Callable[[int], None]
) -> TokenCorpus:
    return TokenCorpus.open(
        data, cache, LENGTH, SEED, DEADLINE_S, window_samples=batch, on_window=on_window
    )


class Readers:
    """Two ranks that read the windows of a corpus, and the fetch for them."""

    def __init__(self, data: DataSpec, cache: Path, batch: int) -> None:
        self.batch = batch
        self.windows = [0, 0]
        show = self.windows.__setitem__
        self.corpora = [corpus_of(data, cache, batch, partial(show, rank)) for rank in range(2)]

    def first_window(self) -> int:
        return min(self.windows)

    def read(self, window: int) -> list[list[int]]:
        """The targets of the samples of a window; the ranks read half of it each."""
        positions = np.arange(window * self.batch, (window + 1) * self.batch)
        shares = zip(self.corpora, np.array_split(positions, 2), strict=True)
        read = [(corpus, corpus.samples_at(own)) for corpus, own in shares]
        return [row for corpus, own in read for row in corpus.batch(own)[1].tolist()]


def cached_bytes(cache: Path) -> int:
    total = 0
    for path in (*cache.glob("shard-*.bin"), *cache.glob("tokens-*.json")):
        with suppress(FileNotFoundError):  # removed meanwhile
            total += path.stat().st_size
    return total


TOKENS = random_shards(7, [40 + 7 * n for n in range(30)])
MANY = MadeSet("many", TOKENS)
SHUFFLED_GB = 1e-6
"""Some four shards of MANY."""


BATCH = 4


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> int:
    """The limit of the cache: some two groups of MANY."""
    monkeypatch.setattr(fetch_plan, "LEAST_HELD_BYTES", 0)
    for module in (node_fetch, token_corpus):
        monkeypatch.setattr(module, "_POLL_S", 0.005)
    assert sum(map(len, MANY.contents.values())) > 3 * 2800
    limit = 2800 + len(MANY.facts.encode())
    monkeypatch.setenv(LIMIT_VARIABLE, f"{limit / 1e9:.9f}")
    return limit


def plan_of(data: DataSpec, limit: int) -> fetch_plan.FetchPlan:
    order = token_corpus.order_of(data, [MANY.facts], LENGTH, SEED)
    shuffled = token_corpus.shuffle_bytes(data)
    return fetch_plan.FetchPlan(order, [MANY.facts], BATCH, shuffled, limit)


@contextmanager
def read_by_groups(
    store: Path, cache: Path, limit: int
) -> Iterator[tuple[Readers, RecordingStore]]:
    """Readers of MANY, and its store. A fetch that brings more than the limit fails."""
    prepared = MANY.store(store)
    data = DataSpec(prepared=(prepared,), shuffle_gb=SHUFFLED_GB)
    sizes = {shard.object_name: shard.nbytes for shard in MANY.shards}

    def check(name: str) -> None:
        assert cached_bytes(cache) + sizes[name] <= limit

    storage, stop = RecordingStore(store, check), threading.Event()
    cache.mkdir()
    manifest_file(cache, prepared).write_bytes(MANY.facts.encode())
    readers, spec = Readers(data, cache, BATCH), spec_of(data, BATCH)
    what = (spec, lambda uri: storage, cache, stop, lambda _: None, readers.first_window, AT_ONCE)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(fetch, *what)
        try:
            yield readers, storage
        finally:
            stop.set()
        result.result(DEADLINE_S)


def test_a_cache_smaller_than_the_corpus_follows_its_readers(
    store: Path, cache: Path, small_limit: int
) -> None:
    with read_by_groups(store, cache, small_limit) as (readers, storage):
        samples = readers.corpora[0].samples
        targets: list[list[int]] = []
        for window in range(-(-2 * samples // BATCH)):
            targets += readers.read(window)
        expected = sorted(token for tokens in TOKENS for token in tokens[1:])
        for epoch in range(2):
            read = [target for row in targets[epoch * samples :][:samples] for target in row]
            assert sorted(target for target in read if target != IGNORED) == expected
        # Once an epoch; and those of the first groups of the third.
        assert max(Counter(storage.opened).values()) <= 3
        assert len(storage.opened) <= 2 * len(MANY.shards) + 12


def test_groups_that_are_read_again_come_again(store: Path, cache: Path, small_limit: int) -> None:
    """After a fault, ranks go on from an earlier step; or far ahead, past windows to skip."""
    with read_by_groups(store, cache, small_limit) as (readers, _):
        first = [readers.read(window) for window in range(40)]
        assert [readers.read(window) for window in range(5, 40)] == first[5:]
        far = readers.read(400)
        assert readers.read(2) == first[2]
        assert readers.read(400) == far


@pytest.mark.usefixtures("small_limit")
def test_groups_come_once_it_is_known_what_is_read(store: Path, cache: Path) -> None:
    """A run that goes on is not to replace what its cache has by what it has read long ago."""
    data = DataSpec(prepared=(MANY.store(store),), shuffle_gb=SHUFFLED_GB)
    progress = fetched(cache, data=data, window=400)
    assert 0 < progress[-1].shards < len(MANY.shards)
    assert not progress[-1].is_all
    window: int | None = None
    stop, storage = threading.Event(), RecordingStore(store)

    def keep(now: FetchProgress) -> None:
        nonlocal window
        window = 400  # once it has the manifests
        if now.is_whole:
            stop.set()

    again = (spec_of(data), lambda uri: storage, cache, stop, keep, lambda: window, AT_ONCE)
    fetch(*again)
    assert storage.opened == []


def test_a_fetch_by_groups_waits_for_the_room_of_others(
    store: Path, cache: Path, small_limit: int
) -> None:
    other = cache / "other.bin"
    with read_by_groups(store, cache, small_limit) as (readers, _):
        readers.read(0)
        other.write_bytes(bytes(small_limit))
        with ThreadPoolExecutor(1) as pool:
            with use_locks.held(other):
                read = pool.submit(readers.read, 60)
                eventually(
                    lambda: "in use by other jobs" in reported_trouble(cache, MANY.prepared())
                )
                assert not read.done()
            assert read.result(DEADLINE_S) == readers.read(60)


@pytest.mark.parametrize("when", ["before", "later", "elsewhere"])
def test_what_is_read_first_gets_room_though_it_comes_last(
    store: Path, cache: Path, small_limit: int, when: str
) -> None:
    """Others take room, as does a node that has the same cache and is elsewhere, before all but the
    first shard are there, or just then. Or another node is to bring that one."""
    prepared, other = MANY.store(store), cache / "other.bin"
    data = DataSpec(prepared=(prepared,), shuffle_gb=SHUFFLED_GB)
    spec, stop, is_away = spec_of(data, BATCH), threading.Event(), True
    plan = plan_of(data, small_limit)
    first, *others = (shard_file(cache, shard) for shard in plan.held(0))
    first_bytes = plan.held(0)[0].nbytes
    room = small_limit - len(MANY.facts.encode()) - sum(s.nbytes for s in plan.held(0)[1:])
    (away,) = (s.object_name for s in MANY.shards if shard_file(cache, s) == first)

    def at_open(name: str) -> None:
        if name == away and is_away:
            raise ObjectMissing(name)

    class Waits(PartnerCaches):
        def look(self, missing: Collection[str]) -> None:
            pass

        def is_own(self, name: str) -> bool:
            return when != "elsewhere" or name != first.name

    cache.mkdir()
    other.touch()
    storage = RecordingStore(store, at_open)
    what = (spec, lambda uri: storage, cache, stop, lambda _: None, lambda: 0, AT_ONCE)
    partners = Waits("", partial(RemoteCache, b""), tuple)
    with use_locks.held(other), ThreadPoolExecutor(1) as pool:
        if when != "later":
            other.write_bytes(bytes(room))
        result = pool.submit(fetch, *what, partners)
        try:
            eventually(
                lambda: (
                    "in use by other jobs" in reported_trouble(cache, prepared)
                    or all(path.exists() for path in others)
                )
            )
            if when == "later":
                other.write_bytes(bytes(room))
            if when == "elsewhere":
                eventually(lambda: make_room(cache, small_limit - first_bytes) == 0)
                return
            is_away = False
            eventually(first.exists)
        finally:
            stop.set()
            result.result(DEADLINE_S)
    assert cached_bytes(cache) <= small_limit


def test_a_job_that_others_leave_too_little_room_goes_by_groups(
    store: Path, cache: Path, small_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache could keep all of it, and another job has half of that."""
    nbytes = sum(map(len, MANY.contents.values()))
    limit = len(MANY.facts.encode()) + nbytes + 100
    monkeypatch.setenv(LIMIT_VARIABLE, f"{limit / 1e9:.9f}")
    other = cache / "other.bin"
    with read_by_groups(store, cache, limit) as (readers, _):
        other.write_bytes(bytes(nbytes // 2))
        with use_locks.held(other):
            samples = readers.corpora[0].samples
            read = [row for n in range(-(-samples // BATCH)) for row in readers.read(n)]
        expected = sorted(token for tokens in TOKENS for token in tokens[1:])
        found = [target for row in read[:samples] for target in row if target != IGNORED]
        assert sorted(found) == expected


class CachedNode:
    """A node whose cache is shared, with its fetch and a rank that reads half of each window."""

    def __init__(
        self,
        half: int,
        data: DataSpec,
        cache: Path,
        storage: LocalStorage,
        window: int | None = 0,
        pauses: Pauses = AT_ONCE,
        partners: PartnerCaches | None = None,
    ) -> None:
        self._half, self._data, self._cache, self._storage = half, data, cache, storage
        self.window, self._pauses, self._partners = window, pauses, partners
        self.progress: list[FetchProgress] = []
        self.begin()

    def begin(self) -> None:
        self.progress.clear()
        self._stop, self._pool = threading.Event(), ThreadPoolExecutor(1)
        self._fetch = self._pool.submit(
            fetch,
            spec_of(self._data, BATCH),
            lambda uri: self._storage,
            self._cache,
            self._stop,
            self.progress.append,
            lambda: self.window,
            self._pauses,
            self._partners,
        )
        self._corpora = [corpus_of(self._data, self._cache, BATCH, self._show)]

    def _show(self, window: int) -> None:
        self.window = window

    @property
    def is_whole(self) -> bool:
        return bool(self.progress) and self.progress[-1].is_whole

    def close(self) -> None:
        """What was in use may go then. It may begin again."""
        self._stop.set()
        self._fetch.result(DEADLINE_S)
        self._pool.shutdown()
        self._corpora.clear()

    def read(self, window: int) -> list[list[int]]:
        positions = np.arange(window * BATCH, (window + 1) * BATCH)
        (corpus,) = self._corpora
        own = corpus.samples_at(np.array_split(positions, 2)[self._half])
        return [list(row) for row in corpus.batch(own)[1].tolist()]


def test_of_what_is_kept_for_later_the_last_goes_first(
    store: Path, cache: Path, small_limit: int
) -> None:
    data = DataSpec(prepared=(MANY.store(store),), shuffle_gb=SHUFFLED_GB)
    plan, pauses = plan_of(data, small_limit), replace(AT_ONCE, look_s=DEADLINE_S)
    read, held = len(plan.read(0)), [shard_file(cache, shard) for shard in plan.held(0)]
    with closing(CachedNode(0, data, cache, LocalStorage(store), pauses=pauses)) as node:
        eventually(lambda: node.is_whole)
        for left in (*range(len(held) - 1, read - 1, -1), read, read):
            make_room(cache, cached_bytes(cache) - 1)
            assert [path.exists() for path in held] == [at < left for at in range(len(held))]


def test_a_node_that_is_ahead_leaves_others_with_its_cache_their_room(
    store: Path, cache: Path, small_limit: int
) -> None:
    """What it reads later goes for that, and does not come again in place of what others keep."""
    data = DataSpec(prepared=(MANY.store(store),), shuffle_gb=SHUFFLED_GB)
    plan, storage = plan_of(data, small_limit), RecordingStore(store)
    last = next(n for n in range(20, 40) if not {*plan.read(n)} & {*plan.held(n + 1)})

    def rests() -> bool:
        opened = len(storage.opened)
        time.sleep(20 * AT_ONCE.look_s)
        return len(storage.opened) == opened

    with closing(CachedNode(0, data, cache, storage, window=last + 1)) as ahead:
        eventually(lambda: ahead.is_whole)
        with closing(CachedNode(1, data, cache, storage, window=last)) as behind:
            assert behind.read(last) and ahead.read(last + 1)
            eventually(rests)
    assert cached_bytes(cache) <= small_limit


@pytest.mark.parametrize("seed", range(2))
def test_nodes_with_one_cache_do_not_block_each_other(
    store: Path, cache: Path, small_limit: int, seed: int
) -> None:
    """One is a window ahead; processes of the other one start again, and their room is taken
    meanwhile."""
    data = DataSpec(prepared=(MANY.store(store),), shuffle_gb=SHUFFLED_GB)
    random, storage, most = Random(seed), RecordingStore(store), 0
    samples = token_corpus.order_of(data, [MANY.facts], LENGTH, SEED).samples
    read: list[list[list[list[int]]]] = [[], []]
    with ExitStack() as stack:
        made = (CachedNode(half, data, cache, storage) for half in range(2))
        nodes = [stack.enter_context(closing(node)) for node in made]
        while (behind := min(map(len, read))) * BATCH < samples:
            ahead = random.randrange(2)
            while len(read[ahead]) < behind + 2:
                read[ahead].append(nodes[ahead].read(len(read[ahead])))
            most = max(most, cached_bytes(cache))
            if random.random() < 0.5:
                nodes[1 - ahead].close()
                eventually(lambda: nodes[ahead].is_whole)  # noqa: B023
                nodes[1 - ahead].begin()
            if len(read[1 - ahead]) == behind:
                read[1 - ahead].append(nodes[1 - ahead].read(behind))
            most = max(most, cached_bytes(cache))
    assert most <= small_limit
    rows = [row for halves in zip(*read, strict=False) for half in halves for row in half]
    found = [target for row in rows[:samples] for target in row if target != IGNORED]
    assert sorted(found) == sorted(token for tokens in TOKENS for token in tokens[1:])


class IdlePartner:
    """It has no file, and brings none."""

    def __init__(self, partner: Partner) -> None:
        pass

    def which(self, names: Collection[str]) -> set[str]:
        return set()

    def close(self) -> None:
        pass


def partners_of(nodes: Callable[[], Sequence[str]], late_after_s: float) -> PartnerCaches:
    """Those of the first node; the others are idle."""
    caches = lambda: [Partner(node, "h", 1) for node in nodes()]  # noqa: E731
    return PartnerCaches(nodes()[0], cast(Any, IdlePartner), caches, late_after_s)


def test_an_owner_that_brings_nothing_is_not_waited_for_though_later_shards_have_no_room(
    store: Path, cache: Path, small_limit: int
) -> None:
    data = DataSpec(prepared=(MANY.store(store),), shuffle_gb=SHUFFLED_GB)
    plan, other = plan_of(data, small_limit), cache / "other.bin"
    first, *rest = (shard_file(cache, shard).name for shard in plan.held(0))
    read, room = plan.read(0), small_limit - len(MANY.facts.encode())

    def owners(number: int) -> list[str]:
        return [ranked(name, [f"n{number}", f"m{number}"])[0][0] for name in (first, *rest)]

    number = next(n for n in count() if owners(n) == ["m", *"n" * len(rest)])
    cache.mkdir()
    other.write_bytes(bytes(room - sum(shard.nbytes for shard in read)))
    partners = partners_of(lambda: (f"n{number}", f"m{number}"), late_after_s=0.2)
    new_node = partial(CachedNode, 0, data, cache, LocalStorage(store))
    with use_locks.held(other), closing(new_node(partners=partners)) as node:
        assert node.read(0)
        assert reported_trouble(cache, MANY.prepared()) == "", "what is read later may wait"
        assert not node.is_whole


def test_the_reason_of_a_former_window_goes_with_it(
    store: Path, cache: Path, small_limit: int
) -> None:
    data = DataSpec(prepared=(MANY.store(store),), shuffle_gb=SHUFFLED_GB)
    plan = plan_of(data, small_limit)
    missing = plan.read(0)[0]
    far = next(n for n in range(100) if missing not in plan.held(n))
    cache.mkdir()
    for shard in plan.held(far):
        shard_file(cache, shard).write_bytes(MANY.contents[shard])
    (store / missing.object_name).unlink()
    with ExitStack() as stack:
        for shard in plan.held(far):
            stack.enter_context(use_locks.held(shard_file(cache, shard)))
        node = stack.enter_context(closing(CachedNode(0, data, cache, LocalStorage(store))))
        eventually(lambda: reported_trouble(cache, MANY.prepared()))
        node.window = far
        eventually(lambda: node.is_whole)
        assert reported_trouble(cache, MANY.prepared()) == ""


def test_a_fetch_that_has_all_rests_and_ends_though_its_nodes_are_others(
    store: Path, cache: Path, small_limit: int
) -> None:
    data = DataSpec(prepared=(MANY.store(store),), shuffle_gb=SHUFFLED_GB)
    nodes = ["n0"]
    partners, pauses = partners_of(lambda: nodes, 0.0), replace(AT_ONCE, look_s=0.5)
    new_node = partial(CachedNode, 0, data, cache, LocalStorage(store))
    with closing(new_node(pauses=pauses, partners=partners)) as node:
        eventually(lambda: node.is_whole)
        nodes.append("n1")
        before = len(node.progress)
        time.sleep(1.0)
        assert len(node.progress) <= before + 10


def test_a_node_without_ranks_takes_no_room_from_others(
    store: Path, cache: Path, small_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache may keep all, until others use a part of it."""
    nbytes = sum(map(len, MANY.contents.values()))
    limit = len(MANY.facts.encode()) + nbytes
    monkeypatch.setenv(LIMIT_VARIABLE, f"{limit / 1e9:.9f}")
    data = DataSpec(prepared=(MANY.store(store),), shuffle_gb=SHUFFLED_GB)
    pauses = replace(AT_ONCE, look_s=0.05)
    new_node = partial(CachedNode, 0, data, cache, LocalStorage(store))
    with closing(new_node(window=None, pauses=pauses)) as node:
        eventually(lambda: node.is_whole and node.progress[-1].is_all)
        assert make_room(cache, limit - 1, or_kept=True) == 1
        other = cache / "other.bin"
        other.write_bytes(bytes(nbytes // 2))
        with use_locks.held(other):
            assert make_room(cache, limit) == 0
            eventually(lambda: make_room(cache, 0, or_kept=True) == limit - nbytes + nbytes // 2)
            assert not node.progress[-1].is_all
