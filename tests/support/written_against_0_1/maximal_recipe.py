"""A recipe with every method and attribute that a recipe may have, written against Holdfast 0.1.

NEVER EDIT THIS FILE. It stands for the programs of users, which a change of Holdfast does not edit
either (docs/recipes.md, "What is promised"). If it breaks, mend Holdfast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holdfast_workers.progress import beacon
from holdfast_workers.recipes import (
    Agree,
    Agreed,
    AttemptSteps,
    Contribution,
    Gate,
    GuardAction,
    GuardTripped,
    NonfiniteOrigin,
    NonFiniteStep,
    PhaseReporter,
    RankBytes,
    RankState,
    Recipe,
    Snapshot,
    StateLayout,
    StateMismatch,
    StateTensor,
    StepOutcome,
    TrainingSpec,
    World,
    data_index,
    data_parallel,
    micro_batch_positions,
    samples_at,
    samples_digest,
    seed_generators,
    shard_box_of,
)

SAMPLES = 96
LEARNING_RATE = 0.05


class MaximalRecipe(Recipe):
    """A linear model that is whole on every rank; the gradients are averaged."""

    repeats_steps = True

    def __init__(self, spec: TrainingSpec, cache_dir: Path) -> None:
        super().__init__(spec, cache_dir)
        self._world: World | None = None
        self._applied = torch.zeros(1, dtype=torch.uint8)
        self._loss = 0.0

    @property
    def model(self) -> nn.Linear:
        return self._model

    def prepare(self) -> None:
        generator = torch.Generator().manual_seed(self.spec.train.seed)
        self._inputs = torch.randn(SAMPLES, 4, generator=generator)
        self._outputs = self._inputs.sum(dim=1, keepdim=True)

    def expect(self, world: World) -> bool:
        return super().expect(world)

    def build(self, world: World) -> None:
        self.applied_step = -1
        self._world = world
        self._model = nn.Linear(4, 1).to(world.device)
        place = {axis: world.coordinate(axis) for axis in world.mesh}
        parts = [
            StateTensor(name, parameter, shard_box_of(parameter, place))
            for name, parameter in self._model.named_parameters()
        ]
        parts += self.guard_memory.pieces(primary=world.rank == 0)
        own = RankBytes("applied", self._applied.clone, self._load_applied)
        self._state = RankState(parts, [own])

    @torch.no_grad()
    def initialize(self) -> None:
        for parameter in self._model.parameters():
            parameter.fill_(0.5)
        self._applied.zero_()
        self.guard_memory.reset()
        self.applied_step = 0

    def rebind(self, world: World) -> None:
        self._world = world

    def abandon_step(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None

    def layout(self) -> StateLayout:
        return self._state.layout

    def freeze(self, step: int) -> Snapshot:
        return self._state.freeze({"step": step})

    def write_state(self, payload: memoryview, step: int) -> str:
        return super().write_state(payload, step)

    def read_state(self, payload: memoryview) -> int:
        self.applied_step = -1
        step = int(self._state.read(payload).get("step", -1))
        if step < 0:
            raise StateMismatch("the payload has no step")
        self.guard_memory.adopt_loaded_state(step)
        self.applied_step = step
        return step

    def state_digest(self, step: int) -> str:
        return self._state.digest({"step": step})

    def local_tensors(self, what: str) -> dict[str, Tensor]:
        named = dict(self._model.named_parameters())
        if what == "gradient":
            return {name: value.grad for name, value in named.items() if value.grad is not None}
        return {name: value.detach() for name, value in named.items()}

    def parameters(self) -> int | None:
        return sum(parameter.numel() for parameter in self._model.parameters())

    def run(self, begin: Callable[[], AttemptSteps]) -> int:
        steps = begin()
        while not steps.over:
            steps.phase("between steps")
            steps.apply()
            if steps.awaits_keep:
                steps.keep()
            assert steps.applied == self.applied_step
        return steps.close()

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        assert self._world is not None
        world, train = self._world, self.spec.train
        seed_generators(train.seed, step, data_index(world), world.device)
        share = self._computed(step, phase)
        phase("agree", step)
        agreed: Agreed = agree(share)
        if agreed.trip is not None and agreed.trip.decision is not GuardAction.REPORT:
            raise GuardTripped(agreed.trip)
        if agreed.nonfinite:
            raise NonFiniteStep(f"step {step}: loss {agreed.loss}, norm {agreed.grad_norm}")
        gate(step)
        phase("optimizer", step)
        self.applied_step = -1
        with torch.no_grad():
            for parameter in self._model.parameters():
                assert parameter.grad is not None
                parameter.sub_(LEARNING_RATE * parameter.grad)
                parameter.grad = None
        self._applied += 1
        self.guard_memory.record_step(step, agreed.loss, agreed.grad_norm)
        self.applied_step = step
        return StepOutcome(agreed=agreed, lr=LEARNING_RATE, tokens=train.global_batch)

    def observed_nonfinite(self) -> NonfiniteOrigin | None:
        assert self._world is not None
        if math.isfinite(self._loss):
            return None
        return NonfiniteOrigin(self._world.rank, 0, 0, "", "loss", again=False)

    def trace(self, step: int) -> NonfiniteOrigin | None:
        self._computed(step, lambda name, step, micro_batch=0: None)
        origin = self.observed_nonfinite()
        if origin is None:
            return None
        return NonfiniteOrigin(origin.rank, 0, 0, "linear", "output", again=True)

    def _load_applied(self, saved: Tensor) -> None:
        self._applied.copy_(saved)

    def _computed(self, step: int, phase: PhaseReporter) -> Contribution:
        assert self._world is not None
        world, train = self._world, self.spec.train
        ranks, digest, self._loss = data_parallel(world), 0, 0.0
        micro_batches = train.global_batch // (train.micro_batch * ranks)
        for index in range(micro_batches):
            self.leave_if_over()
            phase("load", step, index)
            positions = micro_batch_positions(
                self.guard_memory.ledger.window(step),
                index,
                data_index=data_index(world),
                data_parallel=ranks,
                micro_batch=train.micro_batch,
                global_batch=train.global_batch,
            )
            samples = samples_at(positions, SAMPLES, train.seed)
            digest = (digest + samples_digest(positions, samples)) % (1 << 64)
            phase("forward", step, index)
            noise = 0.01 * torch.randn(len(samples), 4)
            loss = (self._model(self._inputs[samples] + noise) - self._outputs[samples]).square()
            phase("backward", step, index)
            torch.autograd.backward(loss.mean() / micro_batches)
            self._loss += float(loss.detach().sum())
        with beacon.phase("reduce", bound_s=60.0):
            grad_sq = self._averaged(world)
        return Contribution(
            loss_sum=self._loss,
            count=train.micro_batch * micro_batches,
            grad_sq=grad_sq if world.rank == 0 else 0.0,
            data_index=data_index(world),
            samples=digest,
            sample_count=train.micro_batch * micro_batches,
            nonfinite=not math.isfinite(self._loss),
            changed=False,
            loader_wait_s=0.0,
            user_metrics={"summed": self._loss},
        )

    def _averaged(self, world: World) -> float:
        """Average the gradients over all ranks; returns their squared norm."""
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        for gradient in gradients:
            if world.world_size > 1:
                dist.all_reduce(gradient)
                gradient.div_(world.size("dp_shard"))
        return sum(float(gradient.square().sum()) for gradient in gradients)
