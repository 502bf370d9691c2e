"""What is read ahead is what a direct reading of each position yields, whatever comes between."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.data.token_sets import MadeSet, random_shards
from tests.support.ranks.rank_worlds import ALONE, RecordingHooks, start_from_seed, tiny_spec
from tests.support.waiting import eventually

from holdfast_workers.data.sample_order import Indices, micro_batch_positions, samples_digest
from holdfast_workers.data.token_cache import shard_file
from holdfast_workers.data.token_corpus import IGNORED
from holdfast_workers.parallelize.context import balanced_positions
from holdfast_workers.parallelize.mesh import data_index, data_parallel
from holdfast_workers.recipes import batches_ahead
from holdfast_workers.recipes.micro_batches import MicroBatch, WindowShare
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.recipes.task import Task
from holdfast_workers.spec import DataSpec, SourceSpec
from holdfast_workers.training.recipe import World
from holdfast_workers.training.skipped_windows import Ledger
from holdfast_workers.training.step_loop import train

SETS = (
    MadeSet("web", random_shards(1, [75, 40, 34, 12, 140, 3])),
    MadeSet("code", random_shards(2, [50, 9, 70])),
)
LENGTH, GLOBAL_BATCH, MICRO_BATCH, STEPS = 32, 8, 2, 4


class Watched(PretrainRecipe):
    """Notes the windows that it reads."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.windows: list[int] = []

    def _read_window(self, share: WindowShare) -> Iterator[MicroBatch]:
        self.windows.append(share.window)
        return super()._read_window(share)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    for made in SETS:
        made.put_into_cache(folder)
    return folder


def started(cache: Path) -> Watched:
    data = DataSpec(
        sources=(SourceSpec(path="/web", weight=0.7), SourceSpec(path="/code", weight=0.3)),
        prepared=tuple(made.prepared() for made in SETS),
        shuffle_gb=4e-7,
    )
    spec = tiny_spec({}, corpus="unused", steps=STEPS).model_copy(update={"data": data})
    recipe = Watched(spec, cache)
    start_from_seed(recipe)
    return recipe


@pytest.fixture(scope="module")
def recipe(cache: Path) -> Iterator[Watched]:
    made = started(cache)
    yield made
    made.abandon_step()
    eventually(lambda: not reading())


@pytest.fixture(scope="module")
def task(cache: Path) -> Task:
    """Of another recipe: a thread may be reading the data of the first one."""
    return started(cache)._require_task()


def reading() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == batches_ahead._THREAD_NAME]


def read_directly(task: Task, world: World, window: int, index: int) -> MicroBatch:
    """Each part looked up on its own."""
    positions = micro_batch_positions(
        window,
        index,
        data_index=data_index(world),
        data_parallel=data_parallel(world),
        micro_batch=MICRO_BATCH,
        global_batch=GLOBAL_BATCH,
    )
    samples = task.samples_at(positions)
    inputs, targets = task.batch(samples) if len(samples) else task.stand_in()
    if world.size("cp") > 1:
        own = balanced_positions(LENGTH, world.coordinate("cp"), world.size("cp"))
        inputs, targets = inputs[:, own], targets[:, own]
    every: Indices = np.arange(window * GLOBAL_BATCH, (window + 1) * GLOBAL_BATCH)
    return MicroBatch(
        inputs,
        targets,
        len(samples),
        int((targets != IGNORED).sum()),
        samples_digest(positions, samples),
        task.targets_of(np.concatenate([task.samples_at(every[i : i + 1]) for i in range(8)])),
    )


meshes = st.fixed_dictionaries(
    {
        "dp_replicate": st.integers(1, 3),
        "dp_shard": st.integers(1, 2),
        "cp": st.sampled_from([1, 2]),
    }
)


@settings(deadline=None, max_examples=60)
@given(
    mesh=meshes,
    happenings=st.lists(st.sampled_from(["", "skip", "retry", "rebind"])),
    data=st.data(),
)
def test_a_step_is_what_its_positions_yield(
    recipe: Watched, task: Task, mesh: dict[str, int], happenings: list[str], data: st.DataObject
) -> None:
    """Windows that are skipped, steps that are computed again, and other worlds come between."""
    size = int(np.prod(list(mesh.values())))
    recipe.guard_memory.set_ledger(Ledger())
    step = 1
    for attempt, happening in enumerate(["rebind", *happenings]):
        if happening == "rebind":
            rank = data.draw(st.integers(0, size - 1))
            put_into(recipe, world := World(rank, size, mesh, attempt, "cpu"))
        window = recipe.guard_memory.ledger.window(step)
        for index in range(recipe._micro_batches()):
            found = recipe._read(step, index)
            if index == 0:
                recipe._batches.read_ahead(recipe._window_share(step + 1))
            assert_equal(found, read_directly(task, world, window, index))
        if happening == "skip":
            recipe.guard_memory.skip(window + 1, window + 3)
        if happening != "retry":
            step += 1


def put_into(recipe: PretrainRecipe, world: World) -> None:
    """As if the recipe had been built for a rank of this world."""
    recipe.abandon_step()
    built = recipe._require_built()
    recipe._built = replace(built, world=world)
    own = balanced_positions(LENGTH, world.coordinate("cp"), world.size("cp"))
    built.model.positions = own if world.size("cp") > 1 else torch.arange(LENGTH)


def assert_equal(found: MicroBatch, expected: MicroBatch) -> None:
    assert torch.equal(found.inputs, expected.inputs)
    assert torch.equal(found.targets, expected.targets)
    assert (found.inputs.dtype, found.targets.dtype) == (torch.int64, torch.int64)
    for name in ("samples", "counted", "digest", "targets_of_step"):
        assert getattr(found, name) == getattr(expected, name)


def test_each_window_is_read_once_and_none_after_the_last(cache: Path) -> None:
    recipe = started(cache)
    train(recipe, ALONE, recipe.spec, RecordingHooks(), 0)
    assert recipe.windows == list(range(STEPS))
    eventually(lambda: not reading())


def test_a_recipe_has_no_thread_before_its_first_step_or_after_its_last_attempt(
    cache: Path,
) -> None:
    recipe = started(cache)
    assert not reading()
    for leave in (recipe.abandon_step, lambda: recipe.build(ALONE), lambda: recipe.rebind(ALONE)):
        recipe._read(1, 0)
        recipe._batches.read_ahead(recipe._window_share(2))
        leave()
        eventually(lambda: not reading())
        with pytest.raises(RuntimeError, match="no share has been begun"):
            recipe._read(1, 1)


def test_the_wait_for_data_is_what_the_training_thread_waited(cache: Path) -> None:
    """A batch that takes a time to read costs the first step that time, and the second one none if
    its own was read meanwhile."""
    slow_s, micro_batches = 0.4, GLOBAL_BATCH // MICRO_BATCH
    recipe = started(cache)
    task = recipe._require_task()
    batch, ready = task.batch, threading.Semaphore(0)
    numbers = itertools.count()

    def slowly(samples: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        if next(numbers) in (0, micro_batches):
            threading.Event().wait(slow_s)
        ready.release()
        return batch(samples)

    task.batch = slowly  # type: ignore[method-assign]

    def await_next(phase: str, step: int) -> None:
        if phase == "agree" and step < STEPS:
            for _ in range(micro_batches * (2 if step == 1 else 1)):
                assert ready.acquire(timeout=60)

    hooks = RecordingHooks(await_next)
    train(recipe, ALONE, recipe.spec, hooks, 0)
    first, *others = hooks.rows
    assert first.loader_wait_s > slow_s > max(row.loader_wait_s for row in others)
    assert {row.fetch_wait_s for row in hooks.rows} == {0.0}


def test_the_wait_for_a_shard_is_a_part_of_the_wait_for_data(tmp_path: Path) -> None:
    for made in SETS:
        made.put_into_cache(tmp_path)
    recipe = started(tmp_path)
    shards = [shard_file(tmp_path, shard) for made in SETS for shard in made.shards]
    for path in shards:
        path.rename(path.with_suffix(".away"))

    def bring() -> None:
        for path in shards:
            if recipe._batches.fetch_waited_s and not path.exists():
                path.with_suffix(".away").rename(path)

    recipe.leave_if_over = bring
    hooks = RecordingHooks()
    train(recipe, ALONE, recipe.spec, hooks, 0)
    first, *others = hooks.rows
    assert 0 < first.fetch_wait_s <= first.loader_wait_s
    assert {row.fetch_wait_s for row in others} == {0.0}
