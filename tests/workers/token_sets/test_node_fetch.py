"""Token sets come into a node's cache verified, through faults of the store and of processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.support.data.node_fetches import (
    AT_ONCE,
    LENGTH,
    SEED,
    RecordingStore,
    bring,
    fetched,
    local,
    spec_of,
)
from tests.support.data.token_sets import MadeSet, random_shards
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.storage import (
    StorageDenied,
    TransientStorageError,
)
from holdfast_workers.data.corpus import CorpusError
from holdfast_workers.data.token_cache import manifest_file, reported_trouble, shard_file
from holdfast_workers.data.token_corpus import TokenCorpus
from holdfast_workers.node_cache.cached_file import LIMIT_VARIABLE, make_room
from holdfast_workers.spec import (
    DataSpec,
    EvaluateSpec,
    PreparedSpec,
    SourceSpec,
)
from holdfast_workers.spec.train import ValidationSpec
from holdfast_workers.token_sets.node_fetch import FetchProgress, fetch

FIRST = MadeSet("first", random_shards(1, [300, 500, 400]))
"""A run with SEED reads its shards in their order."""
SECOND = MadeSet("second", [*random_shards(2, [200]), *random_shards(1, [300])])
"""Its last shard is the first one of FIRST."""
USER = """
import sys, threading
from pathlib import Path
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.token_sets.node_fetch import Pauses, fetch

class HangingStore(LocalStorage):
    def open(self, name):
        if sys.argv[3] == "hang" and name == sys.argv[4]:
            print("opens", flush=True)
            stop.wait()
        return super().open(name)

spec = TrainingSpec.model_validate_json(sys.argv[1])
cache, stop, pauses = Path(sys.argv[2]), threading.Event(), Pauses((0.0,), 0.05)

def tell(progress):
    if progress.is_whole:
        print("done", flush=True)

def open_set(uri):
    return HangingStore(Path(uri))

what = (spec, open_set, cache, stop, tell, lambda: 0, pauses)
threading.Thread(target=fetch, args=what, daemon=True).start()
sys.stdin.read()
"""


@contextmanager
def fetching(cache: Path, *prepared: PreparedSpec) -> Iterator[Future[list[FetchProgress]]]:
    """A fetch in a thread, which is stopped at the end of the block if it is not done."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(fetched, cache, *prepared, stop=stop)
        finally:
            stop.set()


def user(prepared: PreparedSpec, cache: Path, how: str = "", at: str = "") -> subprocess.Popen[str]:
    """A process that fetches a set, and lives until its input ends."""
    spec = spec_of(DataSpec(prepared=(prepared,)))
    return subprocess.Popen(
        [sys.executable, "-c", USER, spec.model_dump_json(), str(cache), how, at],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def names(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {"build.lock"}


def whole(cache: Path, *sets: MadeSet) -> bool:
    """Whether the cache has the shards of the sets, with their content, and no others."""
    expected = {
        shard_file(cache, s): content for made in sets for s, content in made.contents.items()
    }
    there = {path: path.read_bytes() for path in cache.glob("shard-*")}
    return there == expected


def test_ranks_read_what_was_fetched(store: Path, cache: Path) -> None:
    prepared = [FIRST.store(store / "1"), SECOND.store(store / "2")]
    progress = fetched(cache, *prepared)
    assert whole(cache, FIRST, SECOND)
    last = progress[-1]
    assert (last.shards, last.shards_there, last.trouble) == (4, 4, "")
    assert (
        last.nbytes
        == last.bytes_there
        == sum(map(len, {**FIRST.contents, **SECOND.contents}.values()))
    )
    assert names(cache) == {
        *(manifest_file(cache, each).name for each in prepared),
        *(shard_file(cache, shard).name for made in (FIRST, SECOND) for shard in made.shards),
    }
    corpus = TokenCorpus.open(DataSpec(prepared=tuple(prepared)), cache, LENGTH, SEED, 0.0)
    inputs, _ = corpus.batch(corpus.samples_at(np.arange(corpus.samples)))
    assert inputs.shape == (corpus.samples, 16)


@pytest.mark.parametrize("every_steps", [0, 5])
@pytest.mark.parametrize("share", [False, True], ids=["files", "share"])
def test_documents_of_validation_come_if_a_run_evaluates(
    store: Path, cache: Path, share: bool, every_steps: int
) -> None:
    made = MadeSet("mixed", random_shards(1, [300, 500]), held_out=random_shards(2, [60, 40]))
    validation = ValidationSpec(share=0.1)
    if not share:
        validation = ValidationSpec(path="/held", prepared=SECOND.store(store / "2"))
    data = DataSpec(prepared=(made.store(store / "1"),), validation=validation)
    spec = spec_of(data).model_copy(update={"evaluate": EvaluateSpec(every_steps=every_steps)})
    bring(spec, cache)
    trained = {shard_file(cache, shard) for shard in made.shards}
    held = made.facts.held_out if share else SECOND.shards
    evaluated = {shard_file(cache, shard) for shard in held} if every_steps else set()
    assert {*cache.glob("shard-*")} == trained | evaluated
    if every_steps:
        corpus = TokenCorpus.open_validation(data, cache, LENGTH, 0.0)
        inputs, _ = corpus.batch(corpus.samples_at(np.arange(corpus.samples)))
        assert len(inputs) == corpus.samples == sum(-(-(s.tokens - 1) // LENGTH) for s in held)


@pytest.mark.parametrize("window", [0, 40, 1000])
def test_shards_come_in_the_order_in_which_a_run_reads_them(
    store: Path, cache: Path, window: int
) -> None:
    made = [MadeSet(str(i), random_shards(i, [60] * 12)) for i in range(2)]
    prepared = tuple(each.store(store / each.facts.source) for each in made)
    sources = tuple(SourceSpec(path="/nowhere", weight=weight) for weight in (1.0, 1.0))
    data = DataSpec(prepared=prepared, sources=sources, shuffle_gb=1e-9)
    opened: list[str] = []

    def open_set(uri: str) -> LocalStorage:
        return RecordingStore(Path(uri), opened.append)

    fetched(cache, open_set=open_set, data=data, window=window)
    corpus = TokenCorpus.open(data, cache, LENGTH, SEED, 0.0)
    names = [shard.object_name for each in made for shard in each.shards]
    positions = np.arange(2 * corpus.samples) + window
    numbers, _ = corpus.order.windows_of(corpus.samples_at(positions))
    assert opened == list(dict.fromkeys(names[shard] for shard in numbers.tolist())) != names


def test_what_is_there_is_not_fetched_again(store: Path, cache: Path) -> None:
    prepared = FIRST.store(store)
    fetched(cache, prepared)
    shard_file(cache, FIRST.shards[1]).write_bytes(b"short")
    manifest_file(cache, prepared).write_bytes(b"damaged")
    again = RecordingStore(store)
    progress = fetched(cache, prepared, open_set=lambda uri: again)
    assert again.opened == [FIRST.shards[1].object_name]
    assert progress[-1].shards_there == 3
    assert whole(cache, FIRST)


def test_a_damaged_shard_is_named_and_comes_once_it_is_restored(store: Path, cache: Path) -> None:
    prepared = FIRST.store(store)
    damaged = FIRST.shards[1]
    path = store / damaged.object_name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\xff")
    with fetching(cache, prepared) as result:
        eventually(lambda: reported_trouble(cache, prepared) != "")
        eventually(lambda: shard_file(cache, FIRST.shards[2]).exists())
        why = reported_trouble(cache, prepared)
        assert f"{path} is damaged: its digest is " in why
        assert f"not {damaged.digest}" in why
        assert not shard_file(cache, damaged).exists()
        path.write_bytes(content + b"more")
        eventually(lambda: f"{len(content) + 1} bytes of" in reported_trouble(cache, prepared))
        path.write_bytes(content)
        progress = result.result(DEADLINE_S)
    assert whole(cache, FIRST)
    assert reported_trouble(cache, prepared) == progress[-1].trouble == ""
    assert any("is damaged" in each.trouble for each in progress)
    assert not [*cache.glob("*.part")]


@pytest.mark.parametrize("while_others_come", [False, True])
def test_a_file_that_goes_comes_again(store: Path, cache: Path, while_others_come: bool) -> None:
    """As a reader removes a damaged one; others may come for hours."""
    prepared = FIRST.store(store)
    first, last = shard_file(cache, FIRST.shards[0]), store / FIRST.shards[2].object_name
    content = last.read_bytes()
    if while_others_come:
        last.unlink()
    stop, progress = threading.Event(), list[FetchProgress]()
    data = DataSpec(prepared=(prepared,))
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(
            fetch, spec_of(data), local, cache, stop, progress.append, lambda: 0, AT_ONCE
        )
        try:
            eventually(lambda: len([*cache.glob("shard-*.bin")]) == 3 - while_others_come)
            for path in (first, manifest_file(cache, prepared), first):
                path.unlink()
                eventually(path.exists)
            last.write_bytes(content)
            eventually(lambda: progress[-1].is_whole)
            links = [*Path("/proc/self/fd").iterdir()]
            opened = [str(link.readlink()) for link in links if link.is_symlink()]
        finally:
            stop.set()
        result.result(DEADLINE_S)
    assert whole(cache, FIRST)
    assert f"{first} (deleted)" not in opened
    assert str(first) in opened


@pytest.mark.parametrize("what", ["shard", "manifest", "other manifest"])
def test_an_object_that_appears_later_is_fetched_then(store: Path, cache: Path, what: str) -> None:
    prepared = FIRST.store(store)
    path = store / (FIRST.shards[0].object_name if what == "shard" else "manifest.json")
    content = path.read_bytes()
    path.unlink()
    if what == "other manifest":
        path.write_bytes(SECOND.facts.encode())
    with fetching(cache, prepared) as result:
        eventually(lambda: reported_trouble(cache, prepared) != "")
        expected = "prepared again" if what == "other manifest" else "it does not exist"
        assert expected in reported_trouble(cache, prepared)
        (store / "new").write_bytes(content)
        (store / "new").replace(path)
        result.result(DEADLINE_S)
    assert whole(cache, FIRST)


@pytest.mark.parametrize("error", [StorageDenied, TransientStorageError])
def test_a_store_that_refuses_is_asked_again(
    store: Path, cache: Path, error: Callable[[str, str], Exception]
) -> None:
    prepared = FIRST.store(store)
    refusals = 4
    reasons: list[str] = []

    def refuse(name: str) -> None:
        nonlocal refusals
        reasons.append(reported_trouble(cache, prepared))
        if refusals:
            refusals -= 1
            raise error(str(store), "no entry")

    storage = RecordingStore(store, refuse)
    fetched(cache, prepared, open_set=lambda uri: storage)
    assert f"{store}: no entry" in reasons
    first, *others = (shard.object_name for shard in FIRST.shards)
    # What refuses one object is not asked for the others before it is asked again for this one.
    assert storage.opened == [first] * 5 + others
    assert whole(cache, FIRST)
    assert reported_trouble(cache, prepared) == ""


def test_the_reason_of_a_try_is_gone_before_all_is_said_to_be_there(
    store: Path, cache: Path
) -> None:
    prepared = FIRST.store(store)
    failing, reasons, stop = {FIRST.facts.shards[2].object_name}, [], threading.Event()

    def at_open(name: str) -> None:
        if name in failing:
            failing.remove(name)
            raise TransientStorageError(name, "is away")

    def keep(now: FetchProgress) -> None:
        reasons.append((now.is_whole, reported_trouble(cache, prepared)))
        if now.is_whole:
            stop.set()

    spec = spec_of(DataSpec(prepared=(prepared,)))
    recording = RecordingStore(store, at_open)
    fetch(spec, lambda uri: recording, cache, stop, keep, lambda: 0, AT_ONCE)
    assert not failing
    assert (True, "") in reasons
    assert {reason for is_whole, reason in reasons if is_whole} == {""}


def test_a_killed_fetch_goes_on_in_the_next_process(store: Path, cache: Path) -> None:
    prepared = FIRST.store(store)
    with user(prepared, cache, "hang", FIRST.shards[1].object_name) as process:
        assert said(process) == "opens"
        process.send_signal(signal.SIGKILL)
    assert [path.name for path in cache.glob("*.part")] == [f"shard-{FIRST.shards[1].digest}.part"]
    assert shard_file(cache, FIRST.shards[0]).exists()
    fetched(cache, SECOND.store(store / "other"))
    assert not [*cache.glob("*.part")], "it may be of a set that is never wanted again"
    rest = RecordingStore(store)
    fetched(cache, prepared, open_set=lambda uri: rest)
    assert rest.opened == [shard.object_name for shard in FIRST.shards[1:]]
    assert whole(cache, FIRST, SECOND)
    assert not [*cache.glob("*.part")]


def test_two_jobs_of_a_node_fetch_each_shard_once(store: Path, cache: Path) -> None:
    prepared = FIRST.store(store)
    together = threading.Barrier(2)
    stores = [RecordingStore(store, lambda name: None) for _ in range(2)]

    def one(own: RecordingStore) -> None:
        together.wait(DEADLINE_S)
        fetched(cache, prepared, open_set=lambda uri: own)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, stores))
    opened = stores[0].opened + stores[1].opened
    assert sorted(opened) == sorted(shard.object_name for shard in FIRST.shards)
    assert whole(cache, FIRST)
    assert not [*cache.glob("*.part")]


def test_a_shard_that_another_process_fetches_is_waited_for(store: Path, cache: Path) -> None:
    prepared = FIRST.store(store)
    with user(prepared, cache, "hang", FIRST.shards[1].object_name) as process:
        assert said(process) == "opens"
        with fetching(cache, prepared) as result:
            eventually(lambda: "another process of this node" in reported_trouble(cache, prepared))
            assert not result.done()
            process.kill()
            result.result(DEADLINE_S)
    assert whole(cache, FIRST)


def test_a_stopped_fetch_leaves_nothing_unfinished(store: Path, cache: Path) -> None:
    prepared = FIRST.store(store)
    stop = threading.Event()
    storage = RecordingStore(store, lambda name: stop.set())
    fetched(cache, prepared, open_set=lambda uri: storage, stop=stop)
    assert len(storage.opened) == 1
    assert names(cache) == {manifest_file(cache, prepared).name}


def test_shards_stay_while_a_process_that_fetched_them_lives(store: Path, cache: Path) -> None:
    prepared = FIRST.store(store)
    with user(prepared, cache) as first, user(prepared, cache) as second:
        assert (said(first), said(second)) == ("done", "done")
        make_room(cache, 0)
        assert whole(cache, FIRST)
        first.communicate()
        make_room(cache, 0)
        assert whole(cache, FIRST)
        second.communicate()
    make_room(cache, 0)
    assert names(cache) == set()


def test_shards_that_nobody_uses_make_room_for_new_ones(
    store: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = MadeSet("old", random_shards(9, [400, 400, 400]))
    old.store(store / "old")
    prepared = FIRST.store(store / "first")
    old.put_into_cache(cache)
    limit = sum(map(len, FIRST.contents.values())) + len(FIRST.facts.encode()) + 1000
    monkeypatch.setenv(LIMIT_VARIABLE, str(limit / 1e9))
    fetched(cache, prepared)
    total = sum(path.stat().st_size for path in cache.glob("*-*"))
    assert total <= limit
    assert all(shard_file(cache, shard).exists() for shard in FIRST.shards)


def test_what_other_jobs_use_leaves_no_room_until_they_end(
    store: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = MadeSet("other", random_shards(9, [400, 400]))
    prepared, of_other = FIRST.store(store / "first"), other.store(store / "other")
    limit = sum(map(len, FIRST.contents.values())) + len(FIRST.facts.encode()) + 1000
    monkeypatch.setenv(LIMIT_VARIABLE, str(limit / 1e9))
    with user(of_other, cache) as process:
        assert said(process) == "done"
        with fetching(cache, prepared) as result:
            eventually(lambda: "in use by other jobs" in reported_trouble(cache, prepared))
            assert LIMIT_VARIABLE in reported_trouble(cache, prepared)
            kept = [*cache.glob("shard-*.bin"), *cache.glob("tokens-*.json")]
            assert sum(path.stat().st_size for path in kept) <= limit
            process.communicate()
            result.result(DEADLINE_S)
    for shard, content in FIRST.contents.items():
        assert shard_file(cache, shard).read_bytes() == content
    assert reported_trouble(cache, prepared) == ""


def test_sets_that_the_cache_may_not_keep_are_refused(
    store: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = FIRST.store(store)
    monkeypatch.setenv(LIMIT_VARIABLE, "0.000001")
    with pytest.raises(CorpusError, match=r"have 2\.\d+e-06 GB, .* 1e-06 GB: .* set HOLDFAST_"):
        fetched(cache, prepared)
    assert "HOLDFAST_CACHE_LIMIT_GB" in reported_trouble(cache, prepared)
    assert not [*cache.glob("shard-*")]


def test_a_full_disk_is_a_reason_and_not_the_end(store: Path, small_file_system: Path) -> None:
    cache = small_file_system / "cache"
    large = MadeSet("large", random_shards(4, [3_000_000]))
    prepared = large.store(store)
    filler = small_file_system / "filler"
    filler.write_bytes(bytes(4 << 20))
    with user(prepared, cache) as process:
        eventually(lambda: "No space left" in reported_trouble(cache, prepared))
        assert f"{cache}: " in reported_trouble(cache, prepared)
        filler.unlink()
        assert process.stdout is not None
        assert "done\n" in process.stdout
        process.communicate()
    assert whole(cache, large)
    assert reported_trouble(cache, prepared) == ""
