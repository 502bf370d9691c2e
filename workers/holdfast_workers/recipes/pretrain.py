"""Pretraining of a decoder language model: FSDP2 × tensor parallel, AdamW, byte-level text.

The state of a step is: parameters, both moments of the optimizer, the random generators of the
rank, and the step itself, from which learning rate and data position follow. A step reads one
window of the sample order, in micro-batches dealt to the data-parallel ranks; the loss is the
sum over targets divided by the targets of the whole global batch.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from holdfast_workers.agreement import Contribution
from holdfast_workers.data.corpus import Corpus, open_corpus
from holdfast_workers.layout import StateLayout
from holdfast_workers.models.llama import Llama, initial_values
from holdfast_workers.optim.adamw import LocalAdamW, clip, squared_norm
from holdfast_workers.optim.schedule import learning_rate
from holdfast_workers.parallelize.mesh import DATA_AXIS, TENSOR_AXIS, make_mesh
from holdfast_workers.parallelize.recovery import CannotRebind, forget_step, rebind_groups
from holdfast_workers.parallelize.shard import apply_fully_shard, set_last_micro_batch
from holdfast_workers.parallelize.tensor import apply_tensor_parallel
from holdfast_workers.recipes.base import Agree, Gate, Phase, Recipe, StepOutcome, World
from holdfast_workers.recipes.random_state import generators, seed_generators
from holdfast_workers.sample_order import micro_batch_positions, samples_at, samples_digest
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state import Box, Piece, RankState, Snapshot, StateMismatch, box_of, local_of


class NonFiniteStep(ArithmeticError):
    """Loss or gradient of a step is not finite on some rank; the step was not applied."""


@dataclass
class _Living:
    """All that exists once the recipe stands on a mesh."""

    world: World
    mesh: DeviceMesh | None
    model: Llama
    parameters: list[torch.nn.Parameter]
    names: list[str]
    boxes: list[Box]
    locals: list[Tensor]
    optimizer: LocalAdamW
    state: RankState


class PretrainRecipe(Recipe):
    """The built-in recipe `pretrain`."""

    def __init__(self, spec: TrainingSpec, cache_dir: Path) -> None:
        super().__init__(spec, cache_dir)
        self._corpus: Corpus | None = None
        self._living: _Living | None = None
        self._random_before: list[Tensor] | None = None

    @property
    def model(self) -> Llama:
        """The living model, sharded as it stands on the mesh."""
        return self._alive().model

    # --- making and remaking ----------------------------------------------------------------

    def prepare(self) -> None:
        self._corpus = open_corpus(self.spec.data, self.cache_dir, self.spec.model.sequence_length)

    def build(self, world: World) -> None:
        self._living = None
        self.applied_step = -1
        mesh, model = self._sharded_model(world)
        model.to_empty(device=world.device)
        model.reset_tables()
        model.train()
        self._living = self._stand(world, mesh, model)

    def initialize(self) -> None:
        living, seed = self._alive(), self.spec.train.seed
        layers = self.spec.model.layers
        for name, box, local in zip(living.names, living.boxes, living.locals, strict=True):
            whole = initial_values(name, box.global_shape, layers, seed)
            local.copy_(whole[box.slices()])
        living.optimizer.zero_state()
        # Tensor-parallel peers compute the same activations: they need the same dropout masks.
        seed_generators(seed, living.world.coordinate(DATA_AXIS), living.world.device)
        self.applied_step = 0

    def rebind(self, world: World) -> None:
        living = self._alive()
        if (world.mesh, world.rank) != (living.world.mesh, living.world.rank):
            raise ValueError(f"cannot rebind from {living.world} to {world}: build instead")
        if living.mesh is not None:
            try:
                rebind_groups(living.model, living.mesh, make_mesh(world))
            except CannotRebind:
                self.build(world)
                return
        living.world = world

    def abandon_step(self) -> None:
        if self._living is None:
            return
        forget_step(self._living.model)
        if self._random_before is not None:
            for generator, state in zip(self._generators(), self._random_before, strict=True):
                generator.put(state)
            self._random_before = None

    # --- state ------------------------------------------------------------------------------

    def layout(self) -> StateLayout:
        return self._alive().state.layout

    def freeze(self, step: int) -> Snapshot:
        return self._alive().state.freeze(self._small_state(step))

    def read_state(self, payload: memoryview) -> int:
        living = self._alive()
        self.applied_step = -1
        small = living.state.read(payload)
        step = int(small.get("step", -1))
        if small != self._small_state(step):
            raise StateMismatch(
                f"the state is of another run: {small}, here {self._small_state(step)}"
            )
        living.optimizer.set_steps_taken(step)
        self._random_before = None
        self.applied_step = step
        return step

    def state_digest(self, step: int) -> str:
        return self._alive().state.digest(self._small_state(step))

    def parameters(self) -> int | None:
        return sum(math.prod(box.global_shape) for box in self._alive().boxes)

    # --- one step ---------------------------------------------------------------------------

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: Phase) -> StepOutcome:
        living, train = self._alive(), self.spec.train
        self._random_before = [generator.get() for generator in self._generators()]
        share = self._forward_backward(step, phase)
        gradients = [_gradient(parameter) for parameter in living.parameters]
        phase("agree", step)
        agreed = agree(share)
        if agreed.nonfinite:
            raise NonFiniteStep(
                f"step {step}: loss {agreed.loss}, gradient norm {agreed.grad_norm}"
            )
        gate(step)
        phase("optimizer", step)
        lr = learning_rate(train, step)
        self.applied_step = -1
        clip(gradients, agreed.grad_norm, train.clip_grad_norm)
        living.optimizer.step(gradients, lr)
        for parameter in living.parameters:
            parameter.grad = None
        self.applied_step = step
        self._random_before = None
        return StepOutcome(agreed=agreed, lr=lr, tokens=self._targets())

    def _forward_backward(self, step: int, phase: Phase) -> Contribution:
        living, train = self._alive(), self.spec.train
        data_parallel = living.world.size(DATA_AXIS)
        micro_batches = train.global_batch // (train.micro_batch * data_parallel)
        loss_sum = torch.zeros((), dtype=torch.float64, device=living.world.device)
        digest, waited = 0, 0.0
        for index in range(micro_batches):
            began = time.perf_counter()
            tokens, share = self._read(step, index)
            digest = (digest + share) % (1 << 64)
            waited += time.perf_counter() - began
            set_last_micro_batch(living.model, index == micro_batches - 1)
            phase("forward", step)
            logits = living.model(tokens[:, :-1]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            phase("backward", step)
            torch.autograd.backward(loss / self._targets())
            loss_sum += loss.detach()
        return self._share(float(loss_sum), micro_batches * train.micro_batch, digest, waited)

    def _read(self, step: int, micro_batch_index: int) -> tuple[Tensor, int]:
        """Tokens (micro_batch, sequence_length + 1) on the device, and their samples' digest."""
        living, train, corpus = self._alive(), self.spec.train, self._opened_corpus()
        length = self.spec.model.sequence_length
        positions = micro_batch_positions(
            step,
            micro_batch_index,
            data_index=living.world.coordinate(DATA_AXIS),
            data_parallel=living.world.size(DATA_AXIS),
            micro_batch=train.micro_batch,
            global_batch=train.global_batch,
        )
        samples = samples_at(positions, corpus.samples(length), train.seed)
        tokens = torch.from_numpy(corpus.batch(samples, length))
        return tokens.to(living.world.device), samples_digest(positions, samples)

    def _share(self, loss_sum: float, samples: int, digest: int, waited: float) -> Contribution:
        """This rank's contribution; what tensor-parallel peers hold alike is brought by one."""
        living = self._alive()
        counted = [
            _gradient(parameter)
            for parameter, box in zip(living.parameters, living.boxes, strict=True)
            if box.primary
        ]
        grad_sq = squared_norm(counted)
        first_peer = living.world.coordinate(TENSOR_AXIS) == 0
        return Contribution(
            loss_sum=loss_sum if first_peer else 0.0,
            count=samples * self.spec.model.sequence_length if first_peer else 0,
            grad_sq=grad_sq,
            data_index=living.world.coordinate(DATA_AXIS),
            samples=digest,
            sample_count=samples,
            nonfinite=not (math.isfinite(loss_sum) and math.isfinite(grad_sq)),
            loader_wait_s=waited,
        )

    # --- parts ------------------------------------------------------------------------------

    def _sharded_model(self, world: World) -> tuple[DeviceMesh | None, Llama]:
        spec = self.spec.model
        dtype = getattr(torch, spec.dtype)
        with torch.device("meta"):
            model = Llama(spec, self._opened_corpus().vocabulary)
        # Mixed precision is FSDP's work, so it is applied even where there is nothing to shard.
        sharded = world.size(DATA_AXIS) > 1 or dtype is not torch.float32
        cut = world.size(TENSOR_AXIS) > 1
        mesh = make_mesh(world) if sharded or cut else None
        if mesh is not None and cut:
            apply_tensor_parallel(model, mesh[TENSOR_AXIS])
        if spec.compile:
            for block in model.blocks:
                block.compile()
        if mesh is not None and sharded:
            apply_fully_shard(model, mesh[DATA_AXIS], dtype)
        return mesh, model

    def _stand(self, world: World, mesh: DeviceMesh | None, model: Llama) -> _Living:
        named = list(model.named_parameters())
        names = [name for name, _ in named]
        parameters = [parameter for _, parameter in named]
        here = {axis: world.coordinate(axis) for axis in world.mesh}
        boxes = [box_of(parameter, here) for parameter in parameters]
        locals_ = [local_of(parameter) for parameter in parameters]
        optimizer = LocalAdamW(
            locals_, [len(box.global_shape) > 1 for box in boxes], self.spec.train.optimizer
        )
        pieces = [
            Piece(f"{prefix}.{name}", tensor, box)
            for prefix, tensors in (
                ("model", locals_),
                ("optim.exp_avg", optimizer.exp_avg),
                ("optim.exp_avg_sq", optimizer.exp_avg_sq),
            )
            for name, tensor, box in zip(names, tensors, boxes, strict=True)
        ]
        state = RankState(pieces, generators(world.device))
        return _Living(world, mesh, model, parameters, names, boxes, locals_, optimizer, state)

    def _small_state(self, step: int) -> dict[str, Any]:
        train, corpus = self.spec.train, self._opened_corpus()
        position = step * train.global_batch
        samples = corpus.samples(self.spec.model.sequence_length)
        return {
            "step": step,
            "position": position,
            "epoch": position // samples,
            "seed": train.seed,
            "schedule": train.schedule.model_dump(),
            "corpus": corpus.fingerprint,
        }

    def _targets(self) -> int:
        return self.spec.train.global_batch * self.spec.model.sequence_length

    def _generators(self) -> list[Any]:
        return generators(self._alive().world.device)

    def _alive(self) -> _Living:
        if self._living is None:
            raise RuntimeError("the recipe has not been built")
        return self._living

    def _opened_corpus(self) -> Corpus:
        if self._corpus is None:
            raise RuntimeError("the recipe has not been prepared")
        return self._corpus


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("a parameter took no part in the loss")
    return local_of(parameter.grad)
