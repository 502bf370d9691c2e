"""Pretraining of a decoder language model: FSDP2 × tensor parallel, AdamW, byte-level text.

The state of a step is: parameters, both moments of the optimizer, what the guards remember, and
the step itself, from which learning rate and random numbers follow. So ranks that differ in
`dp_replicate` alone hold the same payload, byte for byte. A step reads the window of the sample
order that the ledger gives it, in micro-batches dealt to the data-parallel ranks; the loss is the
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

from holdfast_workers.data.corpus import Corpus, open_corpus
from holdfast_workers.data.sample_order import micro_batch_positions, samples_at, samples_digest
from holdfast_workers.models.llama import Llama, initial_values
from holdfast_workers.optim.adamw import LocalAdamW, clip, squared_norm
from holdfast_workers.optim.schedule import learning_rate
from holdfast_workers.parallelize.fake_mesh import imaginary_peers
from holdfast_workers.parallelize.in_place_recovery import CannotRebind, forget_step, rebind_groups
from holdfast_workers.parallelize.mesh import (
    TENSOR_AXIS,
    data_index,
    data_mesh,
    data_parallel,
    make_mesh,
)
from holdfast_workers.parallelize.shard import (
    SMALL_MODEL_BYTES,
    apply_fully_shard,
    set_last_micro_batch,
    whole_bytes,
)
from holdfast_workers.parallelize.tensor import apply_tensor_parallel
from holdfast_workers.recipes.parameter_checksum import Seal
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.layout import StateLayout
from holdfast_workers.state.rank_state import (
    Box,
    Piece,
    RankState,
    Snapshot,
    StateMismatch,
    box_of,
    local_of,
)
from holdfast_workers.state.replicas import REPLICATED_AXIS
from holdfast_workers.training.guards import Decision, Place
from holdfast_workers.training.nonfinite_tracing import Tracer, all_finite
from holdfast_workers.training.recipe import (
    Agree,
    Gate,
    GuardTripped,
    NonFiniteStep,
    Phase,
    Recipe,
    StepOutcome,
    World,
)
from holdfast_workers.training.step_agreement import Contribution
from holdfast_workers.training.step_seeds import seed_generators


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
    seal: Seal
    """On the parameters, between two steps; it has nothing to look at where it is of no use."""


class PretrainRecipe(Recipe):
    """The built-in recipe `pretrain`."""

    def __init__(self, spec: TrainingSpec, cache_dir: Path) -> None:
        super().__init__(spec, cache_dir)
        self._corpus: Corpus | None = None
        self._living: _Living | None = None
        self._expected: _Living | None = None
        self._losses: list[Tensor] = []
        """Of the micro-batches of the step that was computed last."""

    @property
    def model(self) -> Llama:
        """The living model, sharded as it stands on the mesh."""
        return self._alive().model

    def local_tensors(self, what: str) -> dict[str, Tensor]:
        living = self._alive()
        if what == "gradient":
            found = [_gradient(parameter) for parameter in living.parameters]
        else:
            found = living.locals if what == "parameter" else living.optimizer.exp_avg
        return dict(zip(living.names, found, strict=True))

    # --- making and remaking ----------------------------------------------------------------

    def prepare(self) -> None:
        self._corpus = open_corpus(self.spec.data, self.cache_dir, self.spec.model.sequence_length)

    def expect(self, world: World) -> bool:
        if self._expected is not None:  # forked from a process that had made it ready
            return True
        if self.spec.model.compile or world.device != "cpu":
            return False
        with imaginary_peers(world):
            mesh, model = self._sharded_model(world)
            if whole_bytes(model) <= SMALL_MODEL_BYTES:
                self._expected = self._settled(world, mesh, model)
                self._rehearse(self._expected)
        return self._expected is not None

    def _rehearse(self, living: _Living) -> None:
        """Go once through a step's computation, on zeros: torch finds out then, and remembers, how
        each operation is sharded. What comes out is nothing's."""
        for local in living.locals:
            local.zero_()
        train, length = self.spec.train, self.spec.model.sequence_length
        tokens = torch.zeros((train.micro_batch, length), dtype=torch.int64)
        set_last_micro_batch(living.model, True)
        torch.autograd.backward(living.model(tokens).float().sum())
        squared_norm([_gradient(parameter) for parameter in living.parameters])
        forget_step(living.model)

    def build(self, world: World) -> None:
        self._living = None
        self.applied_step = -1
        self._living, self._expected = self._expected, None
        if self._living is None:
            self._living = self._settled(world, *self._sharded_model(world))
        else:
            self.rebind(world)

    def _settled(self, world: World, mesh: DeviceMesh | None, model: Llama) -> _Living:
        model.to_empty(device=world.device)
        model.reset_tables()
        model.train()
        return self._stand(world, mesh, model)

    def initialize(self) -> None:
        living, seed = self._alive(), self.spec.train.seed
        layers = self.spec.model.layers
        for name, box, local in zip(living.names, living.boxes, living.locals, strict=True):
            whole = initial_values(name, box.global_shape, layers, seed)
            local.copy_(whole[box.slices()])
        living.optimizer.zero_state()
        self.guard_memory.reset()
        living.seal.close()
        self.applied_step = 0

    def rebind(self, world: World) -> None:
        living = self._alive()
        if (world.mesh, world.rank) != (living.world.mesh, living.world.rank):
            raise ValueError(f"cannot rebind from {living.world} to {world}: build instead")
        if living.mesh is not None:
            try:
                rebind_groups(living.model, living.mesh, self._mesh(world))
            except CannotRebind:
                self.build(world)
                return
        living.world = world

    def abandon_step(self) -> None:
        if self._living is not None:
            forget_step(self._living.model)

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
        self.guard_memory.was_read(step)
        living.optimizer.set_steps_taken(step)
        living.seal.close()
        self.applied_step = step
        return step

    def state_digest(self, step: int) -> str:
        return self._alive().state.digest(self._small_state(step))

    def parameters(self) -> int | None:
        return sum(math.prod(box.global_shape) for box in self._alive().boxes)

    # --- one step ---------------------------------------------------------------------------

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: Phase) -> StepOutcome:
        living, train = self._alive(), self.spec.train
        # Tensor-parallel peers compute the same activations: they need the same dropout masks.
        seed_generators(train.seed, step, data_index(living.world), living.world.device)
        share = self._forward_backward(step, phase)
        gradients = [_gradient(parameter) for parameter in living.parameters]
        phase("agree", step)
        agreed = agree(share)
        if agreed.trip is not None and agreed.trip.decision is not Decision.REPORT:
            raise GuardTripped(agreed.trip)
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
        self.guard_memory.applied(step, agreed.loss, agreed.grad_norm)
        living.seal.close()
        self.applied_step = step
        return StepOutcome(agreed=agreed, lr=lr, tokens=self._targets())

    def seen(self) -> Place | None:
        living = self._alive()
        for index, loss in enumerate(self._losses):
            if not all_finite([loss]):
                return Place(living.world.rank, index, 0, "", "loss", again=False)
        # Backwards from a layer on: it began where the last of them is.
        for name, parameter in reversed([*zip(living.names, living.parameters, strict=True)]):
            if not all_finite([_gradient(parameter)]):
                return Place(living.world.rank, -1, 0, name, "gradient", again=False)
        return None

    def trace(self, step: int) -> Place | None:
        living = self._alive()
        seed_generators(self.spec.train.seed, step, data_index(living.world), living.world.device)
        state = [*living.locals, *living.optimizer.exp_avg, *living.optimizer.exp_avg_sq]
        sound = all_finite(state)
        with Tracer(living.model, living.world.rank) as tracer:
            for index in range(self._micro_batches()):
                tracer.begin(index)
                tokens, _ = self._read(step, index)
                # Nothing is reduced: what one rank has must not reach the others.
                set_last_micro_batch(living.model, False)
                loss = self._loss(tokens)
                tracer.look([loss], "the loss", "output")
                torch.autograd.backward(loss / self._targets())
        # Said only now: the passes need all ranks.
        where = Place(living.world.rank, -1, 0, "the parameters or moments", "state")
        return tracer.found if sound else where

    def _micro_batches(self) -> int:
        train = self.spec.train
        return train.global_batch // (train.micro_batch * data_parallel(self._alive().world))

    def _loss(self, tokens: Tensor) -> Tensor:
        """Summed over the targets of a micro-batch."""
        logits = self._alive().model(tokens[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")

    def _forward_backward(self, step: int, phase: Phase) -> Contribution:
        living, train = self._alive(), self.spec.train
        micro_batches = self._micro_batches()
        loss_sum = torch.zeros((), dtype=torch.float64, device=living.world.device)
        digest, waited = 0, 0.0
        self._losses = []
        for index in range(micro_batches):
            phase("load", step, index)
            began = time.perf_counter()
            tokens, share = self._read(step, index)
            digest = (digest + share) % (1 << 64)
            waited += time.perf_counter() - began
            self.leave_if_over()
            set_last_micro_batch(living.model, index == micro_batches - 1)
            phase("forward", step, index)
            loss = self._loss(tokens)
            phase("backward", step, index)
            torch.autograd.backward(loss / self._targets())
            self._losses.append(loss.detach())
            loss_sum += loss.detach()
        return self._share(float(loss_sum), micro_batches * train.micro_batch, digest, waited)

    def _read(self, step: int, micro_batch_index: int) -> tuple[Tensor, int]:
        """Tokens (micro_batch, sequence_length + 1) on the device, and their samples' digest."""
        living, train, corpus = self._alive(), self.spec.train, self._opened_corpus()
        length = self.spec.model.sequence_length
        positions = micro_batch_positions(
            self.guard_memory.ledger.window(step),
            micro_batch_index,
            data_index=data_index(living.world),
            data_parallel=data_parallel(living.world),
            micro_batch=train.micro_batch,
            global_batch=train.global_batch,
        )
        samples = samples_at(positions, corpus.samples(length), train.seed)
        tokens = torch.from_numpy(corpus.batch(samples, length))
        return tokens.to(living.world.device), samples_digest(positions, samples)

    def _share(self, loss_sum: float, samples: int, digest: int, waited: float) -> Contribution:
        """This rank's contribution; what peers and replicas hold alike is brought by one."""
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
            data_index=data_index(living.world),
            samples=digest,
            sample_count=samples,
            nonfinite=not (math.isfinite(loss_sum) and math.isfinite(grad_sq)),
            changed=living.seal.is_broken(),
            loader_wait_s=waited,
        )

    # --- parts ------------------------------------------------------------------------------

    def _mesh(self, world: World) -> DeviceMesh:
        return make_mesh(world, self.spec.detection.collective_timeout_s)

    def _sharded_model(self, world: World) -> tuple[DeviceMesh | None, Llama]:
        spec = self.spec.model
        dtype = getattr(torch, spec.dtype)
        with torch.device("meta"):
            model = Llama(spec, self._opened_corpus().vocabulary)
        # Mixed precision is FSDP's work, so it is applied even where there is nothing to shard.
        sharded = data_parallel(world) > 1 or dtype is not torch.float32
        cut = world.size(TENSOR_AXIS) > 1
        mesh = self._mesh(world) if sharded or cut else None
        if mesh is not None and cut:
            apply_tensor_parallel(model, mesh[TENSOR_AXIS])
        if spec.compile:
            for block in model.blocks:
                block.compile()
        if mesh is not None and sharded:
            apply_fully_shard(model, data_mesh(mesh), dtype)
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
        pieces += self.guard_memory.pieces(primary=world.rank == 0)
        compared = self.spec.checks.replica_digest_every_steps and world.size(REPLICATED_AXIS) > 1
        return _Living(
            world=world,
            mesh=mesh,
            model=model,
            parameters=parameters,
            names=names,
            boxes=boxes,
            locals=locals_,
            optimizer=optimizer,
            state=RankState(pieces),
            seal=Seal(locals_ if compared else ()),
        )

    def _small_state(self, step: int) -> dict[str, Any]:
        train = self.spec.train
        return {
            "step": step,
            "global_batch": train.global_batch,
            "seed": train.seed,
            "schedule": train.schedule.model_dump(),
            "corpus": self._opened_corpus().fingerprint,
        }

    def _targets(self) -> int:
        return self.spec.train.global_batch * self.spec.model.sequence_length

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
