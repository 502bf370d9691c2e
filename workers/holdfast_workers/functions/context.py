"""The argument of a user's function: its place in the world, its data, and its steps.

    def main(ctx):
        model, optimizer = ...
        ctx.register(model=model, optimizer=optimizer)
        for step in ctx.steps():
            for samples in ctx.batches(len(data)):
                ctx.backward(loss_of(model, data[samples]))
            ctx.step()

One iteration of the loop is one step, and everything that the iteration changes belongs to that
step. The random numbers of a function depend only on the seed, the step and the data index, so no
RNG state is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from holdfast_workers.data.sample_order import (
    micro_batch_positions,
    passes,
    samples_at,
    samples_digest,
)
from holdfast_workers.functions.function_errors import AttemptEnded, FunctionError, MeshChanges
from holdfast_workers.functions.step_metrics import UserMetrics
from holdfast_workers.parallelize.mesh import TENSOR_AXIS, data_index, data_mesh, data_parallel
from holdfast_workers.training.step_agreement import Contribution
from holdfast_workers.training.step_seeds import seed_generators

if TYPE_CHECKING:
    from holdfast_workers.functions.registry import Registry
    from holdfast_workers.spec import TrainingSpec
    from holdfast_workers.training.guard_memory import GuardMemory
    from holdfast_workers.training.recipe import AttemptSteps, World


class FunctionHost(Protocol):
    """The recipe that runs the function, as far as the context uses it."""

    spec: TrainingSpec
    guard_memory: GuardMemory
    leave_if_over: Callable[[], None]
    share: Contribution | None
    """The function's contribution to the agreement on the next step."""
    clip_grad_norm: float | None
    tokens: int

    @property
    def world(self) -> World: ...
    @property
    def mesh(self) -> DeviceMesh: ...
    @property
    def registry(self) -> Registry: ...
    def close_registration(self) -> None:
        """End the registration and fix the layout of the state."""
        ...


class Context:
    """One call of the function: one attempt on one rank."""

    def __init__(self, recipe: FunctionHost, begin: Callable[[], AttemptSteps]) -> None:
        self._recipe = recipe
        self._begin = begin
        self._steps: AttemptSteps | None = None
        self._seeded_step = 0
        """The step for which the generators were seeded."""
        self._loss = torch.zeros((), dtype=torch.float64)
        self._samples = 0
        self._counts = True  # whether the present micro-batch has weight
        self._awaits_weight = False  # whether nothing has asked for it, although they differ
        self._weighs = False  # whether the function multiplies its losses by their weights
        self._digest = 0
        self._metrics = UserMetrics()
        self.ended_by: Exception | None = None
        """The exception that ended the attempt, once it is over; the function must return."""

    # --- place ----------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._recipe.world.rank

    @property
    def world_size(self) -> int:
        return self._recipe.world.world_size

    @property
    def attempt(self) -> int:
        """The number of the attempt; it grows with every recovery."""
        return self._recipe.world.attempt

    @property
    def device(self) -> str:
        """The rank's device: "cpu" or "cuda:0"."""
        return self._recipe.world.device

    @property
    def mesh(self) -> DeviceMesh:
        """Axes `dp_replicate` (if there are replicas), `dp_shard`, `tp`; a function has no `pp` and
        no `cp`. The first access creates
        the mesh, so all ranks must access it; `mesh.get_group(axis)` is a process group."""
        with self._unwinding():
            return self._recipe.mesh

    @property
    def data_index(self) -> int:
        """The index of this rank among the ranks that read different samples."""
        return data_index(self._recipe.world)

    @property
    def data_parallel(self) -> int:
        """The number of ranks that read different samples."""
        return data_parallel(self._recipe.world)

    @property
    def config(self) -> dict[str, Any]:
        """The section `config` of the spec: the function's own settings."""
        return dict(self._recipe.spec.config)

    @property
    def seed(self) -> int:
        return self._recipe.spec.train.seed

    @property
    def last_step(self) -> int:
        """The spec's `train.steps`."""
        return self._recipe.spec.train.last_step

    # --- state ----------------------------------------------------------------------------------

    def register(self, **parts: Any) -> None:
        """Register parts of the state by name: modules, optimizers, and any object that has
        `state_dict` and `load_state_dict`; of an object, each rank gets its own state back on the
        same mesh. Everything must be registered before the first step; it is then saved in every
        tier and restored in place."""
        if self._steps is not None:
            raise FunctionError(
                "register() was called after the first step: register everything before, because "
                "it determines the layout of the state"
            )
        for name, part in parts.items():
            self._recipe.registry.add(name, part)

    def shard(self, model: nn.Module, blocks: Sequence[nn.Module] = ()) -> nn.Module:
        """Shard `model` over the data-parallel ranks (FSDP2), in place; each of `blocks` is
        gathered separately. Call it before creating the optimizer. An unsharded model is whole on
        every rank, and `step` averages its gradients, unless it is wrapped in DDP."""
        if self.world_size > 1:
            over = data_mesh(self.mesh)
            for block in blocks:
                fully_shard(block, mesh=over)
            fully_shard(model, mesh=over)
        return model

    # --- the loop -------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """The numbers of the remaining steps. Call `step` exactly once in each iteration."""
        while not self.should_stop:
            before = self._started().applied
            yield before + 1
            if self._started().applied == before:
                raise FunctionError(f"step() was not called in the iteration of step {before + 1}")

    @property
    def should_stop(self) -> bool:
        """Whether the last step has been applied: the spec's last step, or the step after which the
        job is paused or cancelled. Read it between two steps, as `steps` does; every change since
        the last step belongs to that step."""
        with self._unwinding():
            steps = self._started()
            steps.keep()
            if steps.left:
                raise MeshChanges
            if not steps.over and self._seeded_step != steps.applied + 1:
                self._prepare_step(steps)
            return steps.over

    def batches(self, samples: int) -> Iterator[NDArray[Any]]:
        """This rank's samples of this step, one micro-batch after the other, as indices below
        `samples`. Over all ranks and steps, each sample of an epoch comes exactly once, in an order
        that depends on the seed alone.

        Where the micro-batches are not dealt evenly, ranks without one in the last pass get samples
        of another rank, so that all ranks run the same passes; `backward` gives them no weight. A
        backward pass of one's own multiplies the mean loss of each micro-batch by `loss_weight`.
        """
        with self._unwinding():
            steps, train = self._started(), self._recipe.spec.train
            window = self._recipe.guard_memory.ledger.window(steps.applied + 1)
        uneven = self.micro_batches * train.micro_batch * self.data_parallel != train.global_batch
        for index in range(self.micro_batches):
            with self._unwinding():
                self._check_weighted()
                self._recipe.leave_if_over()
                steps.phase("load", index)
                positions = micro_batch_positions(
                    window,
                    index,
                    data_index=self.data_index,
                    data_parallel=self.data_parallel,
                    micro_batch=train.micro_batch,
                    global_batch=train.global_batch,
                )
                chosen = samples_at(positions, samples, train.seed)
                self._digest = (self._digest + samples_digest(positions, chosen)) % (1 << 64)
                self._samples += len(chosen)
                self._counts = len(chosen) > 0
                if not self._counts:
                    start = window * train.global_batch
                    stand_ins = np.arange(start, start + train.micro_batch, dtype=np.int64)
                    chosen = samples_at(stand_ins, samples, train.seed)
                self._recipe.registry.set_last_micro_batch(index == self.micro_batches - 1)
                steps.phase("forward", index)
                self._awaits_weight = uneven
            yield chosen

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of `batches` in each step; it grows with fewer ranks."""
        train = self._recipe.spec.train
        return passes(train.global_batch, train.micro_batch, self.data_parallel)

    @property
    def loss_weight(self) -> float:
        """The weight of the present micro-batch's mean loss in the rank's mean loss. `backward`
        applies it; a backward pass of one's own multiplies the loss by it. It is 0 for samples of
        another rank."""
        self._awaits_weight, self._weighs = False, True
        return 1.0 / self._share if self._counts else 0.0

    @property
    def _share(self) -> float:
        """The number of micro-batches per rank and step, if they were dealt evenly."""
        train = self._recipe.spec.train
        return train.global_batch / (train.micro_batch * self.data_parallel)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of one micro-batch; `loss` is the mean over its samples."""
        with self._unwinding():
            self._started().phase("backward")
        self._awaits_weight = False
        if not self._counts:
            loss = loss * 0.0
        self._loss = self._loss.to(loss.device) + loss.detach().double() / self._share
        torch.autograd.backward(loss / self._share)

    def step(
        self,
        loss: float | Tensor | None = None,
        *,
        tokens: int | None = None,
        clip_grad_norm: float | None = None,
        metrics: Mapping[str, float | Tensor] | None = None,
    ) -> None:
        """Agree with all ranks on this step and apply it: every registered optimizer steps, and
        gradients are cleared.

        `loss`: the mean over this rank's samples, if it did not go through `backward`; where it was
        multiplied by `loss_weight`, the sum of these products. `tokens`:
        the tokens that the whole world trained on, for the throughput; by default samples are
        counted. `metrics`: the user's metrics by name. Each is a series of the job, like the loss,
        with the mean over the ranks that pass it in a step; a step may omit it. A value that is
        not finite counts as omitted.
        """
        with self._unwinding():
            steps, recipe = self._started(), self._recipe
            if steps.awaits_keep or steps.over:
                raise FunctionError(
                    "step() was called twice without reading should_stop in between, or after the "
                    "last step: iterate with `for step in ctx.steps()`"
                )
            self._check_weighted()
            train, world = recipe.spec.train, recipe.world
            share = train.global_batch / self.data_parallel  # of the global batch, if dealt evenly
            samples = self._samples or round(share)
            by_share = loss is None or self._weighs
            mean = float(self._loss if loss is None else loss)
            first = world.coordinate(TENSOR_AXIS) == 0  # tensor-parallel peers have the same loss
            recipe.share = Contribution(
                loss_sum=mean * (share if by_share else samples) if first else 0.0,
                count=samples if first else 0,
                grad_sq=0.0,
                data_index=self.data_index,
                samples=self._digest,
                sample_count=self._samples,
                user_metrics=self._metrics.validated(metrics or {}),
            )
            recipe.clip_grad_norm = clip_grad_norm
            recipe.tokens = train.global_batch if tokens is None else tokens
            recipe.registry.refuse_sparse_gradients()
            steps.apply()

    @property
    def has_left(self) -> bool:
        """Whether the function was unwound because the mesh changes."""
        return isinstance(self.ended_by, MeshChanges)

    def finish(self) -> int:
        """Called by the recipe after the function returned, or was unwound because the mesh
        changes; the last step's number."""
        if self.ended_by is not None and not self.has_left:
            raise self.ended_by
        function, steps = self._recipe.spec.function_name, self._steps
        if steps is None:
            raise FunctionError(f"{function} returned before its first step")
        steps.keep()
        if not steps.over:
            raise FunctionError(
                f"{function} returned after step {steps.applied} of {self.last_step}: it must "
                "continue until should_stop is true"
            )
        return steps.close()

    # --- internal -------------------------------------------------------------------------------

    def _started(self) -> AttemptSteps:
        """The attempt's steps; the first call ends the registration and loads the state."""
        if self._steps is None:
            self._recipe.close_registration()
            self._steps = self._begin()
        return self._steps

    def _check_weighted(self) -> None:
        if self._awaits_weight:
            train = self._recipe.spec.train
            raise FunctionError(
                f"a global batch of {train.global_batch} in micro-batches of {train.micro_batch} "
                f"is not dealt evenly to {self.data_parallel} ranks, and ctx.backward() was not "
                "called: use it, or multiply the loss of each micro-batch by ctx.loss_weight "
                "before a backward pass of your own"
            )

    def _prepare_step(self, steps: AttemptSteps) -> None:
        self._seeded_step = steps.applied + 1
        self._loss = torch.zeros((), dtype=torch.float64)
        self._samples, self._digest = 0, 0
        self._awaits_weight, self._weighs = False, False
        seed_generators(self.seed, self._seeded_step, self.data_index, self.device)
        self._recipe.leave_if_over()
        steps.phase("load")

    @contextmanager
    def _unwinding(self) -> Iterator[None]:
        """Once the attempt is over, every call of the context raises AttemptEnded."""
        if self.ended_by is not None:
            raise AttemptEnded(self.ended_by)
        try:
            yield
        except FunctionError:
            raise
        except Exception as error:
            self.ended_by = error
            raise AttemptEnded(error) from error
