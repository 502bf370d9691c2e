"""Recipes that fail or delay on purpose."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from tests.support.ranks import may_end
from torch import Tensor, nn

from holdfast_workers.progress import beacon
from holdfast_workers.recipes.micro_batches import MicroBatch, WindowShare
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.state.rank_state import Snapshot
from holdfast_workers.training.recipe import (
    Agree,
    Gate,
    NonFiniteStep,
    PhaseReporter,
    StepOutcome,
    World,
)


class PacedSteps(PretrainRecipe):
    """Its steps take a tenth of a second more, so that a test can act between them."""

    takes_s = 0.1

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        time.sleep(self.takes_s)
        return super().train_step(step, agree, gate, phase)


SLOW_WHILE = "SLOW_WHILE"


class SlowWhile(PretrainRecipe):
    """Its steps take longer while the file exists that the job's variable `SLOW_WHILE` names: the
    test makes few of them meanwhile, which a replay without the file repeats quickly."""

    takes_s = 0.3

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        if Path(os.environ[SLOW_WHILE]).exists():
            time.sleep(self.takes_s)
        return super().train_step(step, agree, gate, phase)


class EndsWhenTold(PretrainRecipe):
    """Its last step waits for the test (`SupervisedRun.wait_end`): the job cannot end before the
    test has caused all its faults, however late a busy machine lets it see a step."""

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        if step == self.spec.train.steps:
            may_end.wait()
        return super().train_step(step, agree, gate, phase)


class RaisesAtStepTen(PretrainRecipe):
    """A mistake of the user at step 10, on every rank."""

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        if step == 10:
            raise ValueError("the user's own mistake")
        return super().train_step(step, agree, gate, phase)


class NotFiniteInAttemptTwo(PretrainRecipe):
    """The state that attempt 2 restores makes its first step non-finite, on every rank."""

    _attempt = 0

    def build(self, world: World) -> None:
        self._attempt = world.attempt
        super().build(world)

    def rebind(self, world: World) -> None:
        self._attempt = world.attempt
        super().rebind(world)

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        if self._attempt == 2:
            raise NonFiniteStep(f"step {step}: loss nan")
        return super().train_step(step, agree, gate, phase)


class PoisonedWindow(PretrainRecipe):
    """On the data of window 9, one layer of one rank overflows, in one micro-batch."""

    WINDOW, RANK, MICRO_BATCH, LAYER = 9, 2, 1, "blocks.1.feed_forward.up"

    _reads = (-1, -1)

    def build(self, world: World) -> None:
        super().build(world)
        place = (self.WINDOW, self.MICRO_BATCH)

        def overflow(module: nn.Module, given: Any, output: Tensor) -> Tensor | None:
            there = world.rank == self.RANK and self._reads == place
            return output * float("inf") if there else None

        self.model.get_submodule(self.LAYER).register_forward_hook(overflow)

    def _read(self, step: int, micro_batch_index: int) -> MicroBatch:
        self._reads = (self.guard_memory.ledger.window(step), micro_batch_index)
        return super()._read(step, micro_batch_index)


class DiesReadingAhead(PretrainRecipe):
    """One rank dies in attempt 1 while it reads window 9, with the step before computing."""

    WINDOW, RANK = 9, 2

    def _read_window(self, share: WindowShare) -> Iterator[MicroBatch]:
        for batch in super()._read_window(share):
            if (share.window, share.world.rank, share.world.attempt) == (self.WINDOW, self.RANK, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch


class SlowSnapshot(Snapshot):
    """Its copy takes longer than the next forward and backward."""

    takes_s = 0.1

    def write(self, payload: memoryview, stopped: Callable[[], bool] = lambda: False) -> str:
        time.sleep(self.takes_s)
        return super().write(payload, stopped)


class CopiesSlowly(PretrainRecipe):
    """A change of the state before its capture changes the digests."""

    def freeze(self, step: int) -> Snapshot:
        frozen = super().freeze(step)
        return SlowSnapshot(frozen.layout, frozen.sources)


class ImportsSlowly(PretrainRecipe):
    """A zygote takes as long as in production; a test's own zygote does not import torch."""

    def prepare(self) -> None:
        time.sleep(3.0)
        super().prepare()


class StartsThreadAhead(PretrainRecipe):
    """A template of it would have a thread."""

    def expect(self, world: World) -> bool:
        threading.Thread(target=time.sleep, args=(600.0,), daemon=True).start()
        return super().expect(world)


class SlowRankOne(PretrainRecipe):
    """Rank 1 computes more slowly, so the others wait for it. The delay is much larger than the
    differences between ranks that compute at the same time on a busy machine."""

    takes_s = 0.15
    _slow = False

    def build(self, world: World) -> None:
        self._slow = world.rank == 1
        super().build(world)

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        if self._slow:
            time.sleep(self.takes_s)
        return super().train_step(step, agree, gate, phase)


class LeavesOutACollective(PretrainRecipe):
    """Rank 2 skips an all-reduce over its tensor-parallel peers, once, at step 20."""

    _world: World | None = None

    def build(self, world: World) -> None:
        self._world = world
        super().build(world)

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        world = self._world
        assert world is not None
        if step == 20 and world.rank == 2 and world.attempt == 1:
            _skip_next_call(dist, "all_reduce")
        return super().train_step(step, agree, gate, phase)


def _skip_next_call(module: ModuleType, name: str) -> None:
    """The next call of the function does nothing."""
    original = getattr(module, name)

    def skip(*args: object, **kwargs: object) -> None:
        setattr(module, name, original)

    setattr(module, name, skip)


class WaitsInManyWays(PretrainRecipe):
    """Long waits without any fault: all ranks wait for the loader, all evaluate, and one rank alone
    runs a declared phase."""

    takes_s = 1.6
    _rank = 0

    def build(self, world: World) -> None:
        self._rank = world.rank
        super().build(world)

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        if step == 20:
            phase("load", step)
            time.sleep(self.takes_s)
        if step == 30:
            with beacon.phase("evaluate", bound_s=0.4):
                time.sleep(self.takes_s)
        if step == 40 and self._rank == 1:
            with beacon.phase("user", bound_s=60.0):
                time.sleep(self.takes_s)
        return super().train_step(step, agree, gate, phase)
