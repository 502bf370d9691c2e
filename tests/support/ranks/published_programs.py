"""The programs of ranks that begin with published weights; each returns plain values."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.ranks.rank_programs import begin, join, make
from tests.support.ranks.rank_worlds import RecordingHooks

from holdfast_workers.parallelize import process_groups
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.training.recipe import World
from holdfast_workers.training.step_loop import train

_SAMPLE_S = 0.002


@dataclass(frozen=True)
class Began:
    """What a rank began with, and where its first steps led."""

    pieces: dict[str, tuple[tuple[slice, ...], Any]]
    """Of each parameter: where the rank's piece of it is, and its values."""
    losses: list[float]


def began(port: int, cache_dir: Path, world: World, spec: TrainingSpec) -> Began:
    join(port, world)
    recipe = make(cache_dir, spec)
    recipe.build(world)
    begin(recipe)
    pieces = pieces_of(recipe)
    hooks = RecordingHooks()
    train(recipe, world, spec, hooks, 0)
    process_groups.leave()
    return Began(pieces, [row.loss for row in hooks.rows])


def pieces_of(recipe: PretrainRecipe) -> dict[str, tuple[tuple[slice, ...], Any]]:
    built = recipe._require_built()
    return {
        name: (box.slices(), local.detach().numpy().copy())
        for name, box, local in zip(built.names, built.boxes, built.locals, strict=True)
    }


@dataclass(frozen=True)
class Memory:
    """Anonymous memory of a rank, in bytes."""

    peak: int
    """The most while it loaded, above what it had before it built its model."""
    share: int
    """Of its parameters and moments."""
    largest: int
    """Of the largest whole tensor as a parameter."""


def memory(port: int, cache_dir: Path, world: World, spec: TrainingSpec) -> Memory:
    """Build a model and load its weights, while a thread watches this process."""
    join(port, world)
    recipe = make(cache_dir, spec)
    before = _anonymous()
    with _watched() as samples:
        recipe.build(world)
        begin(recipe)
    built = recipe._require_built()
    local = [local.numel() * local.element_size() for local in built.locals]
    whole = [shape.numel() * 4 for shape in (p.shape for p in built.parameters)]
    process_groups.leave()
    return Memory(max(samples) - before, 3 * sum(local), max(whole))


@contextmanager
def _watched() -> Iterator[list[int]]:
    samples, done = [_anonymous()], threading.Event()

    def watch() -> None:
        while not done.wait(_SAMPLE_S):
            samples.append(_anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield samples
    finally:
        done.set()
        watcher.join()
        samples.append(_anonymous())


def _anonymous() -> int:
    """Resident memory of this process that is of no file. Of shared memory, /proc counts none."""
    for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise LookupError("RssAnon")
