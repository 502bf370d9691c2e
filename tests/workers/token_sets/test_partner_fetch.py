"""Nodes have token sets from each other's caches, over their data channels."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.data.token_sets import MadeSet, random_shards
from tests.support.memory.certificates import certified, new_authority
from tests.support.memory.data_nodes import PATIENT, QUICK
from tests.support.memory.shm import SECRET
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.storage import ObjectReader, Storage, TransientStorageError
from holdfast_workers.data import fetch_plan
from holdfast_workers.data.token_cache import manifest_file, reported_trouble, shard_file
from holdfast_workers.data.token_corpus import order_of
from holdfast_workers.memory import wire
from holdfast_workers.memory.cache_transfer import (
    CacheUnreachable,
    RemoteCache,
)
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.peer_tls import PeerTls
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.memory.wire import Timeouts
from holdfast_workers.node_cache.cached_file import LIMIT_VARIABLE
from holdfast_workers.protocol.messages import Partner
from holdfast_workers.spec import DataSpec, ModelSpec, PreparedSpec, TrainingSpec
from holdfast_workers.token_sets.node_fetch import FetchProgress, Pauses, fetch
from holdfast_workers.token_sets.partner_caches import PartnerCaches, ranked

PAUSES = Pauses((0.0,), round_s=0.02, room_s=0.02, look_s=0.02)
NEVER_S = 3600.0
MANY = MadeSet("many", random_shards(1, [300 + n for n in range(24)]))
HUNDRED = MadeSet("hundred", random_shards(2, [100 + n for n in range(100)]))
"""More than are looked at together."""


class CountingStore(LocalStorage):
    """Counts the objects that all its users open; without content while `is_away`. Each takes
    `takes_s`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened: Counter[str] = Counter()
        self.is_away = False
        self.takes_s = 0.0

    @contextmanager
    def open(self, name: str) -> Iterator[ObjectReader]:
        self.note(name)
        time.sleep(self.takes_s)
        with super().open(name) as source:
            yield source

    def read(self, name: str) -> bytes:
        self.note(name)
        return super().read(name)

    def note(self, name: str) -> None:
        self.opened[name] += 1
        if self.is_away:
            raise TransientStorageError(name, "the bucket is away")


class CacheNode:
    """A node with a cache and its data channel; `fetch` brings a set there."""

    def __init__(self, folder: Path, name: str, tls: PeerTls | None = None) -> None:
        self.cache = folder / name
        self.cache.mkdir()
        self.name = name
        self._tls = tls
        self._stop = threading.Event()
        memory = SegmentStore(folder / f"{name}-memory", "tp=1")
        self.server = DataServer(memory, SECRET, "127.0.0.1", tls=tls, cache_dir=self.cache)
        self.progress: list[FetchProgress] = []

    @property
    def partner(self) -> Partner:
        return Partner(self.name, "127.0.0.1", self.server.port)

    def fetch(
        self,
        prepared: PreparedSpec,
        store: Storage,
        nodes: Sequence[Partner],
        late_after_s: float = NEVER_S,
        secret: bytes = SECRET,
        data: DataSpec | None = None,
        window: Callable[[], int] = lambda: 0,
        timeouts: Timeouts = PATIENT,
        pauses: Pauses = PAUSES,
    ) -> None:
        """Until all is there."""

        def keep(now: FetchProgress) -> None:
            self.progress.append(now)
            if now.is_whole and now.is_all:
                self._stop.set()

        connect = partial(RemoteCache, secret, tls=self._tls, timeouts=timeouts)
        self.partners = PartnerCaches(self.name, connect, lambda: nodes, late_after_s)
        data = data or DataSpec(prepared=(prepared,))
        spec = TrainingSpec(data=data, model=ModelSpec(sequence_length=16))
        what = (spec, lambda _: store, self.cache, self._stop, keep, window, pauses, self.partners)
        fetch(*what)

    def stop(self) -> None:
        """End the fetch; others may go on to ask this node."""
        self._stop.set()

    def close(self) -> None:
        self.stop()
        self.server.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., CacheNode]]:
    with ExitStack() as stack:

        def start(name: str, **options: Any) -> CacheNode:
            return stack.enter_context(closing(CacheNode(tmp_path, name, **options)))

        yield start


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "store")


@pytest.fixture
def prepared(store: CountingStore, tmp_path: Path) -> PreparedSpec:
    return MANY.store(tmp_path / "store")


def assert_whole(node: CacheNode) -> None:
    for shard, content in MANY.contents.items():
        assert shard_file(node.cache, shard).read_bytes() == content
    assert manifest_file(node.cache, MANY.prepared()).read_bytes() == MANY.facts.encode()


def together(nodes: Sequence[CacheNode], prepared: PreparedSpec, store: Storage) -> None:
    with ThreadPoolExecutor(len(nodes)) as pool:
        partners = [node.partner for node in nodes]
        for future in [pool.submit(node.fetch, prepared, store, partners) for node in nodes]:
            future.result(DEADLINE_S)


@contextmanager
def running(node: CacheNode, *what: Any, **options: Any) -> Iterator[Future[None]]:
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(node.fetch, *what, **options)
        finally:
            node.close()


def test_each_file_leaves_the_store_once_for_all_nodes(
    node: Callable[..., CacheNode], store: CountingStore, prepared: PreparedSpec
) -> None:
    nodes = [node(f"n{n}") for n in range(3)]
    together(nodes, prepared, store)
    for each in nodes:
        assert_whole(each)
        assert each.progress[-1].from_partners > 0
    manifests = store.opened.pop("manifest.json")
    assert manifests <= 3
    assert store.opened == dict.fromkeys((s.object_name for s in MANY.shards), 1)


def test_a_node_that_comes_later_needs_no_store(
    node: Callable[..., CacheNode], store: CountingStore, prepared: PreparedSpec
) -> None:
    """As when a node is replaced while the bucket is away: it is itself one of those that others
    would ask, so some files had another node before."""
    nodes = [node("n0"), node("n1")]
    together(nodes, prepared, store)
    store.is_away, before = True, store.opened.total()
    late = node("n2")
    late.fetch(prepared, store, [each.partner for each in (*nodes, late)])
    assert_whole(late)
    assert store.opened.total() == before
    standby = node("standby")  # is none of those that others ask
    standby.fetch(prepared, store, [each.partner for each in nodes])
    assert_whole(standby)
    assert store.opened.total() == before


def test_what_others_have_comes_while_the_store_is_away(
    node: Callable[..., CacheNode], store: CountingStore, prepared: PreparedSpec
) -> None:
    first, second = node("n0"), node("n1")
    MANY.put_into_cache(first.cache)
    for shard in MANY.shards[::3]:
        shard_file(first.cache, shard).unlink()
    store.is_away = True
    both = [first.partner, second.partner]
    with running(second, prepared, store, both, late_after_s=0.1) as result:
        kept = [s for number, s in enumerate(MANY.shards) if number % 3]
        eventually(lambda: all(shard_file(second.cache, s).exists() for s in kept))
        assert "the bucket is away" in reported_trouble(second.cache, prepared)
        assert not result.done()
        store.is_away = False
        result.result(DEADLINE_S)
    assert_whole(second)


def test_a_node_that_cannot_be_reached_costs_no_shard(
    node: Callable[..., CacheNode], store: CountingStore, prepared: PreparedSpec
) -> None:
    own, gone = node("n0"), node("n1")
    gone.close()
    own.fetch(prepared, store, [own.partner, gone.partner])
    assert_whole(own)


def opened(store: CountingStore) -> int:
    """How many shards have left the store."""
    return store.opened.total() - store.opened["manifest.json"]


def test_nodes_that_bring_nothing_are_waited_for_once_and_together(
    node: Callable[..., CacheNode], store: CountingStore, tmp_path: Path
) -> None:
    """Not one after the other, nor for each shard; what this node owns comes meanwhile."""
    prepared = HUNDRED.store(tmp_path / "store")
    own, *idle = [node(f"n{n}") for n in range(6)]
    late_after_s, began = 1.0, time.monotonic()
    own.fetch(prepared, store, [each.partner for each in (own, *idle)], late_after_s)
    assert opened(store) == 100
    assert own.partners._late.keys() == {each.name for each in idle}
    assert time.monotonic() - began < 3 * late_after_s


def test_an_owner_that_goes_on_slowly_is_waited_for(
    node: Callable[..., CacheNode], store: CountingStore, tmp_path: Path
) -> None:
    """Much longer than one that brings nothing."""
    prepared = HUNDRED.store(tmp_path / "store")
    own, slow = node("n0"), node("n1")
    stop = threading.Event()

    def bring() -> None:
        for shard, content in HUNDRED.contents.items():
            if stop.wait(0.04):
                return
            name = shard_file(slow.cache, shard).name
            if ranked(name, ["n0", "n1"])[0] == "n1":
                (slow.cache / "new").write_bytes(content)
                (slow.cache / "new").rename(slow.cache / name)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(bring)
        try:
            own.fetch(prepared, store, [own.partner, slow.partner], late_after_s=1.5)
        finally:
            stop.set()
    assert own.partners._late == {}
    names = [shard_file(own.cache, shard).name for shard in HUNDRED.shards]
    owned = sum(ranked(name, ["n0", "n1"])[0] == "n0" for name in names)
    assert opened(store) == owned < 70


def test_a_slow_store_gives_owners_more_time(
    node: Callable[..., CacheNode], store: CountingStore, tmp_path: Path
) -> None:
    few = MadeSet("few", random_shards(2, [100 + n for n in range(8)]))
    prepared = few.store(tmp_path / "store")
    store.takes_s = 0.3
    nodes = [node("n0"), node("n1")]
    partners = [each.partner for each in nodes]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(each.fetch, prepared, store, partners, 0.1) for each in nodes]:
            done.result(DEADLINE_S)
    assert opened(store) <= 9, "no owner had brought its first shard within 0.1 s"


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache holds some six groups of HUNDRED."""
    monkeypatch.setattr(fetch_plan, "LEAST_HELD_BYTES", 0)
    limit = len(HUNDRED.facts.encode()) + 12 * HUNDRED.shards[-1].nbytes
    monkeypatch.setenv(LIMIT_VARIABLE, f"{limit / 1e9:.9f}")


@pytest.mark.usefixtures("small_limit")
def test_nodes_whose_ranks_go_on_leave_each_other_in_peace(
    node: Callable[..., CacheNode], store: CountingStore, tmp_path: Path
) -> None:
    """While the window moves, and faster than the store gives: no node is late or left out, and
    the shards leave the store about once."""
    prepared = HUNDRED.store(tmp_path / "store")
    shuffle_gb = 2 * HUNDRED.shards[-1].nbytes / 1e9
    data = DataSpec(prepared=(prepared,), shuffle_gb=shuffle_gb)
    spec = TrainingSpec(data=data, model=ModelSpec(sequence_length=16))
    order = order_of(data, [HUNDRED.facts], 16, spec.train.seed)
    batch = spec.train.global_batch
    store.takes_s = 0.05
    nodes = [node(f"n{n}") for n in range(3)]
    partners = [each.partner for each in nodes]
    window = 0

    def is_read() -> bool:
        groups = order.groups_between(window * batch, (window + 1) * batch)
        shards = [HUNDRED.shards[number] for group in groups for number in group.shards]
        return all(shard_file(each.cache, shard).exists() for each in nodes for shard in shards)

    with ThreadPoolExecutor(3) as pool:
        for each in nodes:
            pool.submit(each.fetch, prepared, store, partners, data=data, window=lambda: window)
        try:
            for _ in range(order.samples // batch):
                eventually(is_read)
                window += 1
        finally:
            for each in nodes:
                each.stop()  # all of them, before any closes its server
    for each in nodes:
        assert each.partners._late == {}
        assert each.partners._away == {}
    assert opened(store) <= 120


@pytest.mark.parametrize(
    "answer", [b"", wire.GREETING + bytes(wire.NONCE_BYTES)], ids=["silent", "greeting"]
)
def test_a_node_that_hangs_is_left_out(
    node: Callable[..., CacheNode], store: CountingStore, prepared: PreparedSpec, answer: bytes
) -> None:
    own = node("n0")
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        kept: list[socket.socket] = []

        def accept() -> None:
            connection, _ = silent.accept()
            connection.sendall(answer)
            kept.append(connection)

        pool.submit(accept)
        hangs = Partner("n1", "127.0.0.1", silent.getsockname()[1])
        own.fetch(prepared, store, [own.partner, hangs], timeouts=QUICK)
        for connection in kept:
            connection.close()
    assert_whole(own)


@pytest.mark.parametrize("how", ["other bytes", "shorter", "longer", "manifest"])
def test_what_is_damaged_on_a_node_comes_from_the_store(
    node: Callable[..., CacheNode], store: CountingStore, prepared: PreparedSpec, how: str
) -> None:
    own, other = node("n0"), node("n1")
    MANY.put_into_cache(other.cache)
    files = [shard_file(other.cache, shard) for shard in MANY.shards]
    for file in [manifest_file(other.cache, prepared)] if how == "manifest" else files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        damaged = {"shorter": content[:-1], "longer": content + b"x" * 9_000_000}
        file.write_bytes(bytes(damaged.get(how, content)))
    own.fetch(prepared, store, [own.partner, other.partner])
    assert_whole(own)
    assert {*store.opened.values()} == {1}
    assert not [*own.cache.glob("*.part")]


@pytest.mark.usefixtures("small_limit")
def test_a_window_that_moves_ends_a_wait(
    node: Callable[..., CacheNode], store: CountingStore, tmp_path: Path
) -> None:
    """For the shards of groups that nobody reads any more; the owner is not late."""
    prepared = HUNDRED.store(tmp_path / "store")
    data = DataSpec(prepared=(prepared,), shuffle_gb=2 * HUNDRED.shards[-1].nbytes / 1e9)
    own, idle = node("n0"), node("n1")
    names = [own.partner, idle.partner]
    window = 0

    def cached() -> set[str]:
        return {path.name for path in own.cache.glob("shard-*.bin")}

    def waits() -> bool:
        """For nothing but what the other one owns."""
        asked = own.partners._asked if hasattr(own, "partners") else set()
        owners = {ranked(name, ["n0", "n1"])[0] for name in asked}
        return owners == {"n1"} and len(cached()) > 0

    with running(own, prepared, store, names, data=data, window=lambda: window):
        eventually(waits)
        before = cached()
        window = 20
        eventually(lambda: cached() - before)
        assert own.partners._late == {}
        assert all(ranked(name, ["n0", "n1"])[0] == "n0" for name in cached())


def test_a_node_that_comes_ends_the_pause_after_a_failure_of_the_store(
    node: Callable[..., CacheNode], store: CountingStore, prepared: PreparedSpec
) -> None:
    own, other = node("n0"), node("n1")
    MANY.put_into_cache(other.cache)
    store.is_away = True
    partners = [own.partner]
    pauses = Pauses((0.0,), round_s=3600.0)
    with running(own, prepared, store, partners, pauses=pauses) as result:
        eventually(lambda: "the bucket is away" in reported_trouble(own.cache, prepared))
        partners.append(other.partner)
        result.result(DEADLINE_S)
    assert_whole(own)


def beside_holders(node: Callable[..., CacheNode], count: int) -> list[CacheNode]:
    """A node with an empty cache, and others that have all of HUNDRED."""
    own, *others = [node(f"n{n}") for n in range(count + 1)]
    for other in others:
        HUNDRED.put_into_cache(other.cache)
    return [own, *others]


def test_one_damaged_file_costs_that_file_only(
    node: Callable[..., CacheNode], store: CountingStore, tmp_path: Path
) -> None:
    """The node that had it is left out, and others have the rest."""
    prepared = HUNDRED.store(tmp_path / "store")
    own, *others = beside_holders(node, 2)
    for other in others:
        path = shard_file(other.cache, HUNDRED.shards[50])
        path.write_bytes(bytes(path.stat().st_size))
    partners = [each.partner for each in (own, *others)]
    own.fetch(prepared, store, partners)
    (of_other,) = {HUNDRED.shards[50].object_name} & store.opened.keys()
    assert store.opened[of_other] == 1
    assert len(own.partners._away) == 2, "both had it"


def test_a_node_that_dies_costs_no_shard(
    node: Callable[..., CacheNode], store: CountingStore, tmp_path: Path
) -> None:
    prepared = HUNDRED.store(tmp_path / "store")
    own, *others = beside_holders(node, 2)
    store.is_away = True
    before, partners = own.progress, [each.partner for each in (own, *others)]
    with running(own, prepared, store, partners) as result:
        eventually(lambda: before and before[-1].from_partners > 3)
        others[0].server.close()
        result.result(DEADLINE_S)
    assert len(own.progress) > 90
    assert store.opened.total() == 0


def test_files_come_from_all_nodes_that_have_them(
    node: Callable[..., CacheNode], store: CountingStore, tmp_path: Path
) -> None:
    prepared = HUNDRED.store(tmp_path / "store")
    own, *others = beside_holders(node, 3)
    read: Counter[str] = Counter()
    original = RemoteCache.open

    def counted(cache: RemoteCache, name: str) -> Any:
        read[cache.partner.agent] += 1
        return original(cache, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteCache, "open", counted)
        own.fetch(prepared, store, [each.partner for each in (own, *others)])
    assert read.keys() == {other.name for other in others}
    assert min(read.values()) > 15
    assert own.partners._remote == {}, "connections end once all is there"


@pytest.mark.parametrize("what", ["other tokens", "too large"])
def test_only_the_manifest_of_the_same_tokens_is_taken(
    node: Callable[..., CacheNode], store: CountingStore, prepared: PreparedSpec, what: str
) -> None:
    own, other = node("n0"), node("n1")
    manifest = manifest_file(other.cache, prepared)
    manifest.write_bytes(HUNDRED.facts.encode())
    if what == "too large":
        os.truncate(manifest, 1 << 42)
    own.fetch(prepared, store, [own.partner, other.partner], late_after_s=0.1)
    assert_whole(own)
    assert store.opened["manifest.json"] == 1


def test_a_full_disk_is_not_the_fault_of_the_node_that_sends(
    node: Callable[..., CacheNode],
    store: CountingStore,
    small_file_system: Path,
) -> None:
    large = MadeSet("large", random_shards(4, [3_000_000]))
    prepared = large.store(Path(store.uri.removeprefix("file://")))
    own, other = node("n0"), node("n1")
    large.put_into_cache(other.cache)
    own.cache = small_file_system / "cache"
    filler = small_file_system / "filler"
    filler.write_bytes(bytes(4 << 20))
    store.is_away = True
    with running(own, prepared, store, [own.partner, other.partner]) as result:
        eventually(lambda: "No space left" in reported_trouble(own.cache, prepared))
        filler.unlink()
        result.result(DEADLINE_S)
    assert shard_file(own.cache, large.shards[0]).stat().st_size == large.shards[0].nbytes


def test_with_tls_and_only_with_the_secret_of_the_job(
    node: Callable[..., CacheNode], store: CountingStore, prepared: PreparedSpec, tmp_path: Path
) -> None:
    authority = new_authority()
    tls = [PeerTls(certified(tmp_path / f"tls{n}", authority)) for n in range(2)]
    own, other = node("n0", tls=tls[0]), node("n1", tls=tls[1])
    MANY.put_into_cache(other.cache)
    store.is_away = True
    both = [own.partner, other.partner]
    own.fetch(prepared, store, both)
    assert_whole(own)
    stranger = node("stranger", tls=tls[0])
    with running(stranger, prepared, store, both, secret=b"other") as result:
        eventually(lambda: "the bucket is away" in reported_trouble(stranger.cache, prepared))
        assert not result.done()
        assert not [*stranger.cache.glob("*.bin")]


names = st.lists(st.text("ab01", min_size=1, max_size=3), min_size=1, max_size=9, unique=True)


@given(st.text(max_size=5), names, st.data())
def test_nodes_that_leave_do_not_change_the_order_of_the_rest(
    file: str, nodes: list[str], data: st.DataObject
) -> None:
    left = data.draw(st.sets(st.sampled_from(nodes)))
    order = ranked(file, data.draw(st.permutations(nodes)))
    assert sorted(order) == sorted(nodes)
    assert ranked(file, left) == [node for node in order if node in left]


def test_the_files_are_shared_out_about_evenly() -> None:
    nodes = [f"n{n}" for n in range(8)]
    firsts = Counter(ranked(f"shard-{n}", nodes)[0] for n in range(8000))
    assert firsts.keys() == {*nodes}
    assert all(800 < count < 1200 for count in firsts.values())


@given(names, st.data())
def test_of_nodes_that_see_each_other_exactly_one_brings_a_file(
    nodes: list[str], data: st.DataObject
) -> None:
    """And a node that sees no other brings all of them, whether it is asked or not."""
    known = [Partner(node, "127.0.0.1", number) for number, node in enumerate(nodes)]
    file = data.draw(st.text(max_size=5))
    connect = partial(RemoteCache, b"")
    clients = {node: PartnerCaches(node, connect, lambda: known) for node in nodes}
    assert sum(client.is_own(file) for client in clients.values()) == 1
    alone = data.draw(st.sampled_from([*nodes, "standby"]))
    client = PartnerCaches(alone, connect, lambda: known, late_after_s=0.0)
    assert client.is_own(file) == (alone in nodes and clients[alone].is_own(file))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteCache, "which", lambda cache, names: set())
        for _ in nodes:
            client.begin()
            client.look([file])
    assert client.is_own(file)


def test_a_node_that_failed_is_asked_again_later_and_less_often(
    node: Callable[..., CacheNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, asked = node("n1"), 0
    name = "shard-" + "1" * 32 + ".bin"
    (own.cache / name).write_bytes(b"tokens")
    client = PartnerCaches("n0", partial(RemoteCache, SECRET), lambda: [own.partner])
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    original = RemoteCache.which

    def failing(cache: RemoteCache, names: list[str]) -> set[str]:
        nonlocal asked
        asked += 1
        if asked <= 3:
            raise CacheUnreachable("it hangs")
        return original(cache, names)

    monkeypatch.setattr(RemoteCache, "which", failing)
    for away_s in (30, 60, 120):
        client.begin()
        client.look([name])
        now += away_s - 1
        before = asked
        client.look([name])
        assert asked == before
        now += 2
    client.look([name])
    assert client.have(name)
    read: list[bytes] = []
    assert client.take(name, lambda reader: read.append(reader.read_all(6)))
    assert read == [b"tokens"]
    assert client._failures == {}


def test_an_owner_is_late_after_a_wait_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was waited for before other files were missing does not count."""
    nodes = [Partner("n1", "127.0.0.1", 1)]
    client = PartnerCaches("standby", partial(RemoteCache, b""), lambda: nodes, late_after_s=10.0)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(RemoteCache, "which", lambda cache, names: set())
    for anew in (True, False):
        client.begin()
        client.look(["a"])
        now += 9
        if anew:
            client.begin()
        client.look(["a"])
        now += 2
        client.look(["a"])
        assert client.is_own("a") != anew


def test_a_file_that_was_let_go_is_no_failure_of_its_node(
    node: Callable[..., CacheNode], store: CountingStore
) -> None:
    own, names = node("n1"), [f"shard-{n * 32}.bin" for n in "12"]
    for name in names:
        (own.cache / name).write_bytes(b"tokens")
    client = PartnerCaches("n0", partial(RemoteCache, SECRET), lambda: [own.partner])
    client.look(names)
    (own.cache / names[0]).unlink()
    assert not client.take(names[0], lambda reader: None)
    assert client.have(names[1])
    assert client._away == {}
