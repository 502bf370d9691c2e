"""Each token of an epoch is a target once, over random corpora, mixtures, faults and meshes."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.data.token_sets import BYTES, MadeSet
from tests.support.ranks.rank_worlds import tiny_spec

from holdfast_workers.data import token_corpus
from holdfast_workers.data.sample_order import micro_batch_positions, samples_digest
from holdfast_workers.data.token_cache import shard_file
from holdfast_workers.data.token_corpus import IGNORED, order_of
from holdfast_workers.parallelize.context import balanced_positions
from holdfast_workers.parallelize.mesh import data_index, data_parallel
from holdfast_workers.recipes.micro_batches import WindowShare, read_window
from holdfast_workers.recipes.task import Task, new_task
from holdfast_workers.spec import DataSpec, SourceSpec, TrainingSpec
from holdfast_workers.training.recipe import World
from holdfast_workers.training.skipped_windows import Ledger

TOKENIZER = replace(BYTES, vocabulary=60_000)
EPOCHS, MOST_STEPS = 2, 400
Targets = dict[int, list[int]]
"""The tokens that are targets of the sample at a position of the run."""


Corpus = list[list[range]]
"""The tokens of each shard of each source."""


@st.composite
def corpora(draw: st.DrawFn) -> Corpus:
    """Sources whose tokens are all different."""
    sizes = st.lists(st.integers(2, 60), min_size=1, max_size=5)
    first, corpus = 1, []
    for shards in draw(st.lists(sizes, min_size=1, max_size=3)):
        corpus.append(
            [
                range(first + sum(shards[:n]), first + sum(shards[: n + 1]))
                for n in range(len(shards))
            ]
        )
        first += sum(shards)
    return corpus


@st.composite
def specs(draw: st.DrawFn, sets: list[MadeSet]) -> TrainingSpec:
    ratios = st.integers(1, 4).map(float)
    mixed = draw(st.booleans())
    data = DataSpec(
        sources=tuple(
            SourceSpec(path=f"/{made.facts.source}", weight=draw(ratios) if mixed else None)
            for made in sets
        ),
        prepared=tuple(made.prepared() for made in sets),
        shuffle_gb=draw(st.integers(1, 500)) / 1e9,
    )
    spec = tiny_spec({}, corpus="unused", sequence_length=draw(st.sampled_from([4, 8])))
    micro_batch, batches = draw(st.integers(1, 2)), draw(st.sampled_from([3, 4, 6]))
    sizes = {"global_batch": batches * micro_batch, "micro_batch": micro_batch}
    train = spec.train.model_copy(update={**sizes, "seed": draw(st.integers(0, 2**31))})
    return spec.model_copy(update={"data": data, "train": train})


meshes = st.fixed_dictionaries(
    {
        "dp_replicate": st.sampled_from([3, 2, 1]),
        "dp_shard": st.sampled_from([2, 1]),
        "cp": st.sampled_from([1, 2]),
    }
)
happenings = st.one_of(
    st.tuples(st.just("steps"), st.integers(1, 9)),
    st.tuples(st.just("restore"), st.integers(0, 9)),  # that many steps before
    st.tuples(st.just("skip"), st.integers(1, 4)),  # windows, by a guard
    st.tuples(st.just("mesh"), meshes),
    st.tuples(st.just("damage"), st.integers(0, 99)),  # a shard
)


@dataclass
class Cache:
    """A node's cache whose fetcher brings a shard while a reader waits for it."""

    folder: Path
    sets: list[MadeSet]

    def fill(self) -> None:
        for made in self.sets:
            made.put_into_cache(self.folder)

    def damage(self, number: int) -> None:
        shards = [shard for made in self.sets for shard in made.shards]
        path = shard_file(self.folder, shards[number % len(shards)])
        path.unlink(missing_ok=True)
        path.write_bytes(b"damaged")

    def waiting(self) -> AbstractContextManager[Callable[[], None]]:
        return nullcontext(self.fill)


@dataclass
class Run:
    """The steps of a job that count, as its ranks read them."""

    spec: TrainingSpec
    task: Task
    mesh: dict[str, int]
    steps: list[Targets] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)

    def step(self) -> None:
        window = self.ledger.window(len(self.steps) + 1)
        size = int(np.prod(list(self.mesh.values()), dtype=int))
        read: Targets = {}
        digest = 0
        for rank in range(size):
            world = World(rank, size, self.mesh, 1, "cpu")
            for position, targets, own_digest in self._of_rank(WindowShare(window, world)):
                read.setdefault(position, []).extend(targets)
                digest += own_digest
        self.steps.append(read)
        batch = self.spec.train.global_batch
        positions = np.arange(window * batch, (window + 1) * batch)
        expected = samples_digest(positions, self.task.samples_at(positions))
        ranks_of_a_sample = self.mesh["cp"]
        assert digest % 2**64 == expected * ranks_of_a_sample % 2**64
        assert sorted(read) == positions.tolist()

    def _of_rank(self, share: WindowShare) -> Iterator[tuple[int, list[int], int]]:
        train, world = self.spec.train, share.world
        own = None
        if (parts := world.size("cp")) > 1:
            length = self.spec.model.sequence_length
            own = balanced_positions(length, world.coordinate("cp"), parts).numpy()
        for number, batch in enumerate(read_window(share, self.task, train, own)):
            positions = micro_batch_positions(
                share.window,
                number,
                data_index=data_index(world),
                data_parallel=data_parallel(world),
                micro_batch=train.micro_batch,
                global_batch=train.global_batch,
            )
            digest = batch.digest
            for position, row in zip(positions.tolist(), batch.targets.tolist(), strict=False):
                yield position, [token for token in row if token != IGNORED], digest
                digest = 0

    def restore(self, back: int) -> None:
        del self.steps[max(0, len(self.steps) - back) :]
        self.ledger = self.ledger.passed(len(self.steps))

    def skip(self, windows: int) -> None:
        first = self.ledger.window(len(self.steps) + 1)
        self.ledger |= Ledger.of([(first, first + windows)])

    def targets(self) -> Targets:
        """Of all positions so far; those of skipped windows as they lie in the corpus."""
        found = {position: each for step in self.steps for position, each in step.items()}
        batch = self.spec.train.global_batch
        for start, end in self.ledger.passed(len(self.steps)).ranges:
            for position in range(start * batch, end * batch):
                _, targets = self.task.batch(self.task.samples_at(np.array([position])))
                found[position] = targets[targets != IGNORED].tolist()
        return found


@pytest.fixture(autouse=True, scope="module")
def short_waits() -> Iterator[None]:
    """A reader looks for a shard that comes at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_corpus, "_POLL_S", 0.001)
        yield


@pytest.mark.seconds
@settings(deadline=None, max_examples=40)
@given(corpus=corpora(), data=st.data(), first=meshes, events=st.lists(happenings, max_size=12))
def test_each_token_of_an_epoch_is_a_target_once_through_faults_and_changes_of_size(
    corpus: Corpus, data: st.DataObject, first: dict[str, int], events: list[tuple[str, object]]
) -> None:
    sets = [MadeSet(f"source-{n}", shards, TOKENIZER) for n, shards in enumerate(corpus)]
    spec = data.draw(specs(sets))
    length = spec.model.sequence_length
    order = order_of(spec.data, [made.facts for made in sets], length, spec.train.seed)
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder), sets)
        cache.fill()
        run = Run(spec, new_task(spec, cache.folder, cache.waiting, lambda _: None), first)
        for kind, value in events:
            match kind, value:
                case "steps", int(number):
                    for _ in range(number):
                        run.step()
                case "restore", int(back):
                    run.restore(back)
                case "skip", int(windows):
                    run.skip(windows)
                case "damage", int(number):
                    cache.damage(number)
                case _, dict(mesh):
                    run.mesh = mesh
        while (read := len(run.steps)) < MOST_STEPS:
            end = (run.ledger.window(read) + 1) * spec.train.global_batch if read else 0
            if min(order.epochs_before(end)) >= EPOCHS:
                break
            run.step()
        found = run.targets()
        assert sorted(found) == list(range(len(found)))
        pools = corpus if spec.data.sources[0].weight is not None else [[*itertools.chain(*corpus)]]
        for shards in pools:
            tokens = {token for shard in shards for token in shard[1:]}
            own = [found[position] for position in sorted(found) if tokens >= {*found[position]}]
            size = sum(ceil((len(shard) - 1) / length) for shard in shards)
            assert read == MOST_STEPS or len(own) >= EPOCHS * size
            for start in range(0, len(own) - size + 1, size):
                of_epoch = Counter(itertools.chain(*own[start : start + size]))
                assert of_epoch == Counter(tokens)
