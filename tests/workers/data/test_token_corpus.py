"""Samples of token sets, read from a node's cache as soon as their files are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.support.data.token_sets import BYTES, MadeSet, random_shards

from holdfast_workers.data import token_corpus
from holdfast_workers.data.corpus import CorpusError, DataUnavailable
from holdfast_workers.data.token_cache import manifest_file, report_trouble, shard_file
from holdfast_workers.data.token_corpus import IGNORED, PATIENCE_S, TokenCorpus
from holdfast_workers.data.token_set import ShardFacts, shard_digest
from holdfast_workers.node_cache import use_locks
from holdfast_workers.node_cache.cached_file import LIMIT_VARIABLE, InvalidCacheLimit, make_room
from holdfast_workers.spec import DataSpec, PreparedSpec, SourceSpec, TimeoutsSpec
from holdfast_workers.token_sets.node_fetch import Pauses

LENGTH = 4
FIRST = MadeSet("first", [[1, 2, 3, 4, 5, 6, 0], [7, 8, 0]])
SECOND = MadeSet("second", random_shards(3, [30, 21]))


def data_of(*prepared: PreparedSpec, weights: tuple[float, ...] = ()) -> DataSpec:
    sources = tuple(SourceSpec(path="/nowhere", weight=weight) for weight in weights)
    return DataSpec(prepared=prepared, sources=sources)


def opened(cache: Path, *sets: MadeSet, patience_s: float = 0.0) -> TokenCorpus:
    data = data_of(*(each.prepared() for each in sets))
    return TokenCorpus.open(data, cache, LENGTH, 7, patience_s)


def test_windows_share_one_token_and_the_last_one_is_padded(tmp_path: Path) -> None:
    FIRST.put_into_cache(tmp_path)
    corpus = opened(tmp_path, FIRST)
    inputs, targets = corpus.batch(np.array([0, 1, 2]))
    assert corpus.samples == 3
    assert corpus.vocabulary == 256
    assert targets.tolist() == [
        [2, 3, 4, 5],
        [6, 0, IGNORED, IGNORED],
        [8, 0, IGNORED, IGNORED],
    ]
    assert inputs.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 0, 0]]
    assert corpus.targets_of(np.array([0, 2])) == 6


def test_ids_of_large_vocabularies_are_read(tmp_path: Path) -> None:
    large = MadeSet("large", [[70_000, 1, 99_999]], replace(BYTES, vocabulary=100_000))
    large.put_into_cache(tmp_path)
    corpus = opened(tmp_path, large)
    inputs, targets = corpus.batch(np.array([0]))
    assert inputs[0, :2].tolist() == [70_000, 1]
    assert targets[0, :2].tolist() == [1, 99_999]
    assert corpus.vocabulary == 100_000


def test_an_epoch_of_all_sources_has_all_their_tokens(tmp_path: Path) -> None:
    for each in (FIRST, SECOND):
        each.put_into_cache(tmp_path)
    corpus = opened(tmp_path, FIRST, SECOND)
    _, targets = corpus.batch(corpus.samples_at(np.arange(corpus.samples)))
    read = sorted(targets[targets != IGNORED].tolist())
    shards = [[1, 2, 3, 4, 5, 6, 0], [7, 8, 0], *random_shards(3, [30, 21])]
    assert read == sorted(token for shard in shards for token in shard[1:])


def test_the_fingerprint_changes_with_all_that_the_order_depends_on(tmp_path: Path) -> None:
    first, second = FIRST.put_into_cache(tmp_path), SECOND.put_into_cache(tmp_path)
    moved = first.model_copy(update={"uri": "s3://elsewhere/set"})
    both = data_of(first, second)

    def fingerprint(data: DataSpec, length: int = LENGTH) -> str:
        return TokenCorpus.open(data, tmp_path, length, 7, 0.0).fingerprint

    assert fingerprint(both) == fingerprint(data_of(moved, second))
    others = [
        fingerprint(both),
        fingerprint(data_of(second, first)),
        fingerprint(data_of(first)),
        fingerprint(data_of(first, second, weights=(1, 1))),
        fingerprint(data_of(first, second, weights=(1, 2))),
        fingerprint(both.model_copy(update={"shuffle_gb": 1e-6})),
        fingerprint(both, LENGTH + 1),
    ]
    assert len(set(others)) == len(others)


@pytest.mark.parametrize(
    "late", ["manifest", "shard", "short shard", "damaged manifest", "damaged shard"]
)
def test_a_file_that_comes_late_is_waited_for(tmp_path: Path, late: str) -> None:
    prepared = FIRST.put_into_cache(tmp_path)
    path = shard_file(tmp_path, FIRST.shards[1])
    if late.endswith("manifest"):
        path = manifest_file(tmp_path, prepared)
    whole = path.read_bytes()
    path.unlink()
    if late == "damaged shard":
        path.write_bytes(whole[:32] + b"\xff" + whole[33:])
    elif " " in late:
        path.write_bytes(whole[:-8])
    polls = 0

    @contextmanager
    def waiting() -> Iterator[Callable[[], None]]:
        def poll() -> None:
            nonlocal polls
            polls += 1
            (tmp_path / "new").write_bytes(whole)
            (tmp_path / "new").replace(path)

        yield poll

    corpus = TokenCorpus.open(data_of(prepared), tmp_path, LENGTH, 7, 60.0, waiting)
    _, targets = corpus.batch(np.array([2, 0]))
    assert targets[0, :2].tolist() == [8, 0]
    assert polls >= 1


@pytest.mark.parametrize("how", ["a bit", "its end", "all of it"])
def test_a_damaged_shard_is_removed_and_named_and_not_read(
    tmp_path: Path, how: str, logs_on_stderr: None, capfd: pytest.CaptureFixture[str]
) -> None:
    FIRST.put_into_cache(tmp_path)
    corpus = opened(tmp_path, FIRST)
    damaged, other = (shard_file(tmp_path, shard) for shard in FIRST.shards)
    content = damaged.read_bytes()
    flipped = content[:40] + bytes([content[40] ^ 1]) + content[41:]
    damaged.write_bytes({"a bit": flipped, "its end": content[:-8], "all of it": b""}[how])
    with pytest.raises(DataUnavailable, match="did not come"):
        corpus.batch(np.array([0]))
    assert f"{damaged} is damaged" in capfd.readouterr().err
    assert not damaged.exists()
    assert corpus.batch(np.array([2]))[1][0, 0] == 8
    assert other.exists()
    damaged.write_bytes(content)
    assert corpus.batch(np.array([0]))[1][0, 0] == 2


def test_a_new_file_in_the_place_of_a_damaged_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FIRST.put_into_cache(tmp_path)
    corpus = opened(tmp_path, FIRST, patience_s=60.0)
    path = shard_file(tmp_path, FIRST.shards[0])
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\xff")

    def replaced(buffer: memoryview) -> str:
        monkeypatch.setattr(token_corpus, "shard_digest", shard_digest)
        path.unlink()
        path.write_bytes(content)
        return shard_digest(buffer)

    monkeypatch.setattr(token_corpus, "shard_digest", replaced)
    inode = path.stat().st_ino
    assert corpus.batch(np.array([0]))[1][0, 0] == 2
    assert path.stat().st_ino != inode


def test_a_file_that_does_not_come_is_named_with_the_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    logs_on_stderr: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    prepared = FIRST.put_into_cache(tmp_path)
    shard_file(tmp_path, FIRST.shards[0]).unlink()
    corpus = opened(tmp_path, FIRST)
    with pytest.raises(
        DataUnavailable, match=r"shard-\w+\.bin of the .*/store did not.*not fetched"
    ):
        corpus.batch(np.array([0]))
    report_trouble(tmp_path, prepared, "the bucket is on fire")
    monkeypatch.setattr(token_corpus, "FIRST_NOTE_S", 0.0)
    corpus = opened(tmp_path, FIRST, patience_s=0.3)
    with pytest.raises(DataUnavailable, match="within 0 s: the bucket is on fire"):
        corpus.batch(np.array([0]))
    assert "waits for data" in capfd.readouterr().err


def test_all_manifests_have_one_short_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read while a process starts, which is ended without a reason if it takes longer."""
    assert token_corpus.MANIFEST_PATIENCE_S < TimeoutsSpec().start_s < PATIENCE_S
    assert 2 * Pauses().round_s < token_corpus.MANIFEST_PATIENCE_S
    now = 0.0
    first, second = FIRST.put_into_cache(tmp_path), SECOND.put_into_cache(tmp_path)
    manifest = manifest_file(tmp_path, first)
    content = manifest.read_bytes()
    manifest.unlink()
    manifest_file(tmp_path, second).unlink()

    def passes(seconds: float) -> None:
        nonlocal now
        now += 1.0
        if now == 50.0:
            manifest.write_bytes(content)

    clock = SimpleNamespace(monotonic=lambda: now, sleep=passes)
    monkeypatch.setattr(token_corpus, "time", clock)
    with pytest.raises(DataUnavailable, match="within 10 s"):
        TokenCorpus.open(data_of(first, second), tmp_path, LENGTH, 7)
    assert now == token_corpus.MANIFEST_PATIENCE_S


def test_a_slow_set_is_waited_for_while_its_shards_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = MadeSet("many", random_shards(5, [5] * 6))
    many.put_into_cache(tmp_path)
    wanted, *others = many.shards
    for shard in many.shards:
        shard_file(tmp_path, shard).unlink()
    now = 0.0

    def passes(seconds: float) -> None:
        """Shards of the job come for 2,500 seconds; later, only those of others, and the first one
        again and again."""
        nonlocal now
        now += 250.0
        if now % 500 == 0 and now <= 2500:
            shard = others[int(now / 500) - 1]
            shard_file(tmp_path, shard).write_bytes(many.contents[shard])
        elif now > 2500:
            report_trouble(tmp_path, many.prepared(), f"it is {now}")
            (tmp_path / f"shard-{now}.bin").write_bytes(b"of another job")
            again = shard_file(tmp_path, others[0])
            again.unlink() if again.exists() else again.write_bytes(many.contents[others[0]])

    begins: list[float] = []

    @contextmanager
    def waiting() -> Iterator[Callable[[], None]]:
        begins.append(now)
        yield lambda: None

    data = data_of(many.prepared())
    corpus = TokenCorpus.open(data, tmp_path, LENGTH, 7, 600.0, waiting)
    clock = SimpleNamespace(monotonic=lambda: now, sleep=passes)
    monkeypatch.setattr(token_corpus, "time", clock)
    with pytest.raises(DataUnavailable, match="within 3250 s: it is 3250"):
        corpus.batch(np.array([many.shards.index(wanted)]))
    assert begins == [0.0, 500.0, 1000.0, 1500.0, 2000.0, 2500.0], "each has a limit of its own"


def test_a_manifest_of_other_tokens_is_not_read(tmp_path: Path) -> None:
    SECOND.put_into_cache(tmp_path)
    manifest_file(tmp_path, FIRST.prepared()).write_bytes(SECOND.facts.encode())
    with pytest.raises(CorpusError, match="the source was prepared again"):
        opened(tmp_path, FIRST)


def test_sets_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    other = MadeSet("other", [[1, 2]], replace(BYTES, digest="c" * 32))
    first, _ = FIRST.put_into_cache(tmp_path), other.put_into_cache(tmp_path)
    with pytest.raises(CorpusError, match="'first' and 'other' were prepared with") as found:
        opened(tmp_path, FIRST, other)
    assert found.type is CorpusError, "no later attempt would find it otherwise"
    with pytest.raises(CorpusError, match=r"2 sources, and data\.prepared 1 token sets"):
        TokenCorpus.open(data_of(first, weights=(1, 2)), tmp_path, LENGTH, 7)
    short = MadeSet("short", [[1]])
    short.put_into_cache(tmp_path)
    with pytest.raises(CorpusError, match="at least two tokens"):
        opened(tmp_path, short)


def test_sets_larger_than_the_cache_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SECOND.put_into_cache(tmp_path)
    limit = len(SECOND.facts.encode()) + 100
    monkeypatch.setenv(LIMIT_VARIABLE, f"{limit / 1e9:.9f}")
    sizes = r"have \d(\.\d+)?e-07 GB, .* set HOLDFAST_CACHE_LIMIT_GB on the nodes to at least "
    with pytest.raises(CorpusError, match=sizes) as found:
        opened(tmp_path, SECOND)
    assert found.type is CorpusError


def test_a_limit_that_is_no_number_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "many")
    with pytest.raises(InvalidCacheLimit, match="'many' is not a number"):
        opened(tmp_path, FIRST)


def test_a_mapped_shard_is_not_removed_and_an_unused_one_is(tmp_path: Path) -> None:
    FIRST.put_into_cache(tmp_path)
    corpus = opened(tmp_path, FIRST)
    corpus.batch(np.array([0]))
    make_room(tmp_path, 0)
    paths = [shard_file(tmp_path, shard) for shard in FIRST.shards]
    assert [path.exists() for path in paths] == [True, False]
    del corpus
    make_room(tmp_path, 0)
    assert not paths[0].exists()


def test_few_shards_are_mapped_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_corpus, "_MOST_MAPPED", 2)
    many = MadeSet("many", random_shards(5, [5] * 12))
    many.put_into_cache(tmp_path)
    corpus = opened(tmp_path, many)
    expected = corpus.batch(np.arange(12))[1]
    before = len([*Path("/proc/self/fd").iterdir()])
    again = corpus.batch(np.arange(12))[1]
    assert again.tolist() == expected.tolist()
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    assert sum(use_locks.unlink_unless_used(shard_file(tmp_path, s)) for s in many.shards) == 10


def test_shards_of_groups_that_have_been_read_may_be_removed(tmp_path: Path) -> None:
    """Whoever learns of a window may take the room of those that it does not need."""
    many = MadeSet("many", random_shards(5, [17] * 6))
    prepared = many.put_into_cache(tmp_path)
    paths = [shard_file(tmp_path, shard) for shard in many.shards]
    used: list[tuple[int, list[int]]] = []

    def show(window: int) -> None:
        free = [use_locks.is_free(path.open("rb")) for path in paths]
        used.append((window, [shard for shard, is_free in enumerate(free) if not is_free]))

    data = data_of(prepared).model_copy(update={"shuffle_gb": 1e-9})
    corpus = TokenCorpus.open(data, tmp_path, LENGTH, 7, 0.0, window_samples=2, on_window=show)
    for position in range(12):  # four samples of a shard: it is a group
        corpus.batch(corpus.samples_at(np.array([position])))
    corpus.batch(corpus.samples_at(np.array([1])))
    corpus.samples_at(np.arange(0))
    in_use = [(window, len(shards)) for window, shards in used]
    assert in_use[:4] == [(0, 0), (0, 1), (1, 1), (1, 1)]
    assert in_use[4:8] == [(2, 0), (2, 1), (3, 1), (3, 1)]
    assert used[3] != used[5]
    assert in_use[8:] == [(4, 0), (4, 1), (5, 1), (5, 1), (0, 0)]


def test_a_wait_ends_before_the_collective_in_which_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = MadeSet("many", random_shards(5, [5] * 9))
    prepared = many.put_into_cache(tmp_path)
    for shard in many.shards:
        shard_file(tmp_path, shard).unlink()
    now = 0.0

    def passes(seconds: float) -> None:
        nonlocal now
        now += 100.0
        if now % 300 == 0:
            shard = next(s for s in many.shards if not shard_file(tmp_path, s).exists())
            shard_file(tmp_path, shard).write_bytes(many.contents[shard])

    monkeypatch.setattr(token_corpus, "time", SimpleNamespace(monotonic=lambda: now, sleep=passes))
    corpus = TokenCorpus.open(
        data_of(prepared), tmp_path, LENGTH, 7, 600.0, window_samples=9, window_patience_s=1000.0
    )
    for began in (0.0, 1000.0):  # the second wait has all the time again
        with pytest.raises(
            DataUnavailable, match=r"of the node \S+ within \d+ s: .* set detection"
        ):
            corpus.batch(corpus.samples_at(np.arange(9)))
        assert now - began == 1000.0
    corpus.batch(corpus.samples_at(np.arange(9)))
    assert now == 2700.0


def test_shards_that_come_for_a_second_epoch_show_that_the_fetch_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = MadeSet("many", random_shards(5, [5] * 6))
    prepared = many.put_into_cache(tmp_path)
    now, coming = 0.0, list[ShardFacts]()

    def passes(seconds: float) -> None:
        nonlocal now
        now += 500.0
        shard = coming.pop(0)
        shard_file(tmp_path, shard).write_bytes(many.contents[shard])

    monkeypatch.setattr(token_corpus, "time", SimpleNamespace(monotonic=lambda: now, sleep=passes))
    data = data_of(prepared).model_copy(update={"shuffle_gb": 1e-9})
    corpus = TokenCorpus.open(data, tmp_path, LENGTH, 7, 600.0)

    def read_once_it_comes_last(position: int) -> int:
        """All shards have gone, and come again. Returns which of them was read."""
        sample = corpus.samples_at(np.array([position]))
        number = int(corpus.order.windows_of(sample)[0][0])
        for shard in many.shards:
            shard_file(tmp_path, shard).unlink()
        coming[:] = [*(s for s in many.shards if s != many.shards[number]), many.shards[number]]
        corpus.batch(sample)
        return number

    assert read_once_it_comes_last(0) != read_once_it_comes_last(9)
    assert now == 2 * 3000.0
