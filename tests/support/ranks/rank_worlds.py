"""Real worlds of real processes for the tests of the training core.

Ranks are forked from a server that has imported torch and started no threads, so a world of four
ranks starts in a fraction of a second. The return values of the ranks' programs arrive by pipe, in
rank order.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from holdfast_workers.protocol.findings import TripReport
from holdfast_workers.protocol.messages import StepRow
from holdfast_workers.spec import DataSpec, ModelSpec, TrainingSpec
from holdfast_workers.training.recipe import Recipe, World
from holdfast_workers.training.step_agreement import Agreed
from holdfast_workers.training.step_loop import DigestSource, Hooks

DEADLINE_S = 120.0
COLLECTIVE_TIMEOUT_S = 60.0
FLAGS: Mapping[str, Any] = {
    "head_size": 16,
    "qkv_bias": True,
    "qk_norm": True,
    "sliding_window": 8,
    "window_from": 1,
    "vocabulary": 300,
}
"""Of the section `model`: all that published families have beside a Llama."""
ALONE = World(0, 1, {"dp_shard": 1, "tp": 1}, 1, "cpu")


def tiny_spec(
    mesh: Mapping[str, Any], *, steps: int = 6, corpus: str | None = None, **model: Any
) -> TrainingSpec:
    """A training run of a second or two; two micro-batches per step on two data-parallel ranks."""
    return TrainingSpec.model_validate(
        {
            "model": {
                "dim": 32,
                "layers": 2,
                "heads": 4,
                "kv_heads": 2,
                "sequence_length": 32,
                **model,
            },
            "data": {"source": corpus or os.environ["HOLDFAST_TEST_CORPUS"]},
            "train": {
                "steps": steps,
                "global_batch": 8,
                "micro_batch": 2,
                "seed": 11,
                "schedule": {"warmup_steps": 2},
                "optimizer": {"lr": 1e-2},
            },
            "parallel": mesh,
        }
    )


def tiny_vit_spec(mesh: Mapping[str, Any], *, steps: int = 6, **model: Any) -> TrainingSpec:
    """The same for images of four classes, 16 patches each."""
    tiny = tiny_spec(mesh, steps=steps, corpus=DataSpec().source)
    sizes = {"image_size": 16, "patch_size": 4, "classes": 4}
    fields = {"family": "vit", "dim": 32, "layers": 2, "heads": 4, **sizes, **model}
    update = {
        "model": ModelSpec.model_validate(fields),
        "data": DataSpec(source=os.environ["HOLDFAST_TEST_IMAGES"]),
    }
    return tiny.model_copy(update=update)


def start_from_seed(recipe: Recipe) -> None:
    """Bring the recipe to step 0, alone in this process."""
    recipe.prepare()
    recipe.build(ALONE)
    recipe.initialize()


class RecordingHooks(Hooks):
    """Hooks that record every call; `on_phase` may raise or kill."""

    def __init__(self, on_phase: Callable[[str, int], None] | None = None) -> None:
        self.rows: list[StepRow] = []
        self.digests: dict[int, str] = {}
        self.phases: list[tuple[str, int]] = []
        self.trips: list[TripReport] = []
        self.on_checkpoint: Callable[[int, Recipe], object] = lambda step, recipe: None
        self._on_phase = on_phase

    def phase(self, name: str, step: int, micro_batch: int = 0) -> None:
        self.phases.append((name, step))
        if self._on_phase is not None:
            self._on_phase(name, step)

    def commit_gate(self, step: int) -> None:
        self.phase("gate", step)

    def evaluation_begins(self, step: int) -> None:
        self.phase("applied", step)

    def tripped(self, report: TripReport) -> None:
        self.trips.append(report)

    def checkpoint(
        self, step: int, recipe: Recipe, agreed: Agreed, last: bool
    ) -> DigestSource | None:
        self.on_checkpoint(step, recipe)
        return None

    def committed(self, row: StepRow) -> None:
        self.rows.append(row)

    def digest(self, step: int, hex: str, of_ranks: tuple[str, ...]) -> None:
        self.digests[step] = hex


class Rank:
    """One running rank: its process, and the pipe of its result."""

    def __init__(self, process: BaseProcess, results: Connection) -> None:
        self.process = process
        self._results = results

    def result(self) -> Any:
        """The program's return value; raises if it raised, died or did not end in time."""
        if not wait([self._results, self.process.sentinel], timeout=DEADLINE_S):
            self.process.kill()
            raise TimeoutError(f"rank process {self.process.pid} did not end")
        if not self._results.poll():
            self.process.join(DEADLINE_S)
            raise ChildProcessError(f"rank process ended with {self.process.exitcode}")
        ok, value = self._results.recv()
        self.process.join(DEADLINE_S)
        if not ok:
            raise AssertionError(f"in a rank process:\n{value}")
        return value


class Worlds:
    """Starts worlds and hosts the store for their rendezvous."""

    def __init__(self, cache_dir: Path) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.support.ranks.rank_imports"])
        self._cache_dir = cache_dir
        self._attempt = 0
        self._results: dict[tuple[Callable[..., Any], str], list[Any]] = {}

    def next_attempt(self) -> int:
        self._attempt += 1
        return self._attempt

    def start(
        self, program: Callable[..., Any], world: World, spec: TrainingSpec, *extra: Any
    ) -> Rank:
        ours, theirs = self._context.Pipe(duplex=False)
        arguments = (theirs, program, self._store.port, self._cache_dir, world, spec, extra)
        process = self._context.Process(target=_rank_main, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return Rank(process, ours)

    def run(self, program: Callable[..., Any], spec: TrainingSpec, *extra: Any) -> list[Any]:
        """Run `program(store_port, cache_dir, world, spec, *extra)` on every rank of a mesh."""
        attempt = self.next_attempt()
        ranks = [
            self.start(program, world_of(spec, rank, attempt), spec, *extra)
            for rank in range(spec.parallel.world_size)
        ]
        return [rank.result() for rank in ranks]

    def once(self, program: Callable[..., Any], spec: TrainingSpec) -> list[Any]:
        """As `run`; for the same program and spec, what it returned the first time."""
        key = (program, spec.model_dump_json())
        if key not in self._results:
            self._results[key] = self.run(program, spec)
        return self._results[key]


def world_of(spec: TrainingSpec, rank: int, attempt: int) -> World:
    return World(rank, spec.parallel.world_size, spec.parallel.mesh, attempt, "cpu")


def _rank_main(
    results: Connection,
    program: Callable[..., Any],
    port: int,
    cache_dir: Path,
    world: World,
    spec: TrainingSpec,
    extra: tuple[Any, ...],
) -> None:
    try:
        results.send((True, program(port, cache_dir, world, spec, *extra)))
    except BaseException:
        results.send((False, traceback.format_exc()))
    results.close()
    os._exit(0)  # threads of a broken process group must not keep the process
