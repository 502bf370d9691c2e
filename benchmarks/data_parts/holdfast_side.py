"""Holdfast's side: batches as a rank of the recipe `pretrain` takes them, from shards in a node's
cache, read ahead by its thread."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

from benchmarks.data_parts.read_loop import Batch
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.data.token_cache import manifest_file, shard_file
from holdfast_workers.data.token_set import TokenSet
from holdfast_workers.recipes.batches_ahead import BatchesAhead, wait_for_data
from holdfast_workers.recipes.micro_batches import MicroBatch, WindowShare, read_window
from holdfast_workers.recipes.task import new_task
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.spec.train import PreparedSpec
from holdfast_workers.training.recipe import World

SPEC = "spec.json"
_CACHE = "node-cache"


def put_into_cache(folder: Path, made: TokenSet, prepared: PreparedSpec) -> None:
    """Leave the files of a set as the fetch does, which is not measured."""
    storage, cache = open_storage(prepared.uri), folder / _CACHE
    cache.mkdir()
    for shard in made.shards:
        shard_file(cache, shard).write_bytes(storage.read(shard.object_name))
    manifest_file(cache, prepared).write_bytes(made.encode())


def epochs(folder: Path, batch: int, setting: str) -> Iterator[Iterator[Batch]]:
    """The batches of each epoch, the last of which has the next epoch's first samples, too.
    `batch` is that of the folder's spec; there is one `setting`."""
    spec = TrainingSpec.model_validate_json((folder / SPEC).read_text())
    world = World(0, 1, spec.parallel.mesh, 1, "cpu")

    def read(share: WindowShare) -> Iterator[MicroBatch]:
        return read_window(share, task, spec.train, None)

    task = new_task(spec, folder / _CACHE, lambda: wait_for_data(_go_on), lambda _: None)
    steps = _steps(BatchesAhead(read), world)
    while True:
        yield islice(steps, -(-task.samples // batch))


def _steps(batches: BatchesAhead[WindowShare, MicroBatch], world: World) -> Iterator[Batch]:
    """As `PretrainRecipe` calls for the batches of its steps."""
    for window in count():
        batches.begin(WindowShare(window, world))
        taken = batches.take(_go_on).on(world.device)
        batches.read_ahead(WindowShare(window + 1, world))
        yield taken.inputs, taken.targets


def _go_on() -> None:
    """The check of a wait of a rank that nothing interrupts."""
