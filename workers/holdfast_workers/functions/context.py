"""What a user's function is called with: its place in the world, its data, its steps.

    def main(ctx):
        model, optimizer = ...
        ctx.register(model=model, optimizer=optimizer)
        for step in ctx.steps():
            for samples in ctx.batches(len(data)):
                ctx.backward(loss_of(model, data[samples]))
            ctx.step()

One turn of the loop is one step: all that the turn changes belongs to it. What a function draws
at random is a function of the seed, the step and its place in the world, so it is no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from holdfast_workers.data.sample_order import micro_batch_positions, samples_at, samples_digest
from holdfast_workers.functions.function_errors import FunctionError, Unwound
from holdfast_workers.functions.step_metrics import OwnMetrics
from holdfast_workers.parallelize.mesh import TENSOR_AXIS, data_index, data_mesh, data_parallel
from holdfast_workers.parallelize.shard import set_last_micro_batch
from holdfast_workers.training.step_agreement import Contribution
from holdfast_workers.training.step_seeds import seed_generators

if TYPE_CHECKING:
    from holdfast_workers.functions.function_recipe import FunctionRecipe
    from holdfast_workers.training.step_loop import Steps


class Context:
    """Of one call of the function, that is, of one attempt on one rank."""

    def __init__(self, recipe: FunctionRecipe, begin: Callable[[], Steps]) -> None:
        self._recipe = recipe
        self._begin = begin
        self._steps: Steps | None = None
        self._turn = 0
        """The step for which the generators were seeded."""
        self._loss = torch.zeros((), dtype=torch.float64)
        self._samples = 0
        self._digest = 0
        self._metrics = OwnMetrics()
        self.over_for: Exception | None = None
        """Why this attempt is over, once it is: the function is to be left."""

    # --- place ----------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._recipe.world.rank

    @property
    def world_size(self) -> int:
        return self._recipe.world.world_size

    @property
    def attempt(self) -> int:
        """The number of the formed world: it grows with every recovery."""
        return self._recipe.world.attempt

    @property
    def device(self) -> str:
        """ "cpu", or "cuda:0"."""
        return self._recipe.world.device

    @property
    def mesh(self) -> DeviceMesh:
        """Axes `dp_replicate` (if there are replicas), `dp_shard`, `tp`. Made when first asked
        for, which all ranks must do; `mesh.get_group(axis)` is a process group."""
        with self._leaving():
            return self._recipe.mesh

    @property
    def data_index(self) -> int:
        """Which of the ranks that read different samples this one is."""
        return data_index(self._recipe.world)

    @property
    def data_parallel(self) -> int:
        """How many ranks read different samples."""
        return data_parallel(self._recipe.world)

    @property
    def config(self) -> dict[str, Any]:
        """The spec's section `config`: the function's own settings."""
        return dict(self._recipe.spec.config)

    @property
    def seed(self) -> int:
        return self._recipe.spec.train.seed

    @property
    def last_step(self) -> int:
        """The spec's `train.steps`."""
        return self._recipe.spec.train.steps

    # --- state ----------------------------------------------------------------------------------

    def register(self, **parts: Any) -> None:
        """Parts of the state by name: modules, optimizers, and whatever has `state_dict` and
        `load_state_dict` and is alike on all ranks. All of it before the first step; it is then
        kept in every tier, and restored in place."""
        if self._steps is not None:
            raise FunctionError("register comes before the first step: the state is laid out by it")
        for name, thing in parts.items():
            self._recipe.registry.add(name, thing)

    def shard(self, model: nn.Module, blocks: Sequence[nn.Module] = ()) -> nn.Module:
        """Cut `model` over the data-parallel ranks (FSDP2), in place; each of `blocks` is gathered
        by itself. Before an optimizer is made for it. A model that is not cut is whole on every
        rank, and its gradients are averaged in `step`."""
        if self.world_size > 1:
            over = data_mesh(self.mesh)
            for block in blocks:
                fully_shard(block, mesh=over)
            fully_shard(model, mesh=over)
        return model

    # --- the loop -------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """Numbers of the steps that are still to be made. `step` is called once in each turn."""
        while not self.should_stop:
            before = self._begun().applied
            yield before + 1
            if self._begun().applied == before:
                raise FunctionError(f"step() was not called in the turn of step {before + 1}")

    @property
    def should_stop(self) -> bool:
        """Whether the last step has been made: the spec's, or the one after which the job is to be
        paused or cancelled. Asked between two steps, as `steps` does; what was changed since the
        last one belongs to that."""
        with self._leaving():
            steps = self._begun()
            steps.keep()
            if not steps.over and self._turn != steps.applied + 1:
                self._open_turn(steps)
            return steps.over

    def batches(self, samples: int) -> Iterator[NDArray[Any]]:
        """The samples of this step that are this rank's, one micro-batch after the other, as
        indices below `samples`. Over all ranks and steps each sample of an epoch comes once, in an
        order that the seed alone decides."""
        with self._leaving():
            steps, train = self._begun(), self._recipe.spec.train
            window = self._recipe.guard_memory.ledger.window(steps.applied + 1)
        for index in range(self.micro_batches):
            with self._leaving():
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
                self._samples += train.micro_batch
                for module in self._recipe.registry.modules.values():
                    set_last_micro_batch(module, index == self.micro_batches - 1)
                steps.phase("forward", index)
            yield chosen

    @property
    def micro_batches(self) -> int:
        """How many `batches` gives in each step: with fewer ranks there are more."""
        train = self._recipe.spec.train
        return train.global_batch // (train.micro_batch * self.data_parallel)

    def backward(self, loss: Tensor) -> None:
        """Backward pass of one micro-batch: `loss` is the mean over its samples."""
        with self._leaving():
            self._begun().phase("backward")
        self._loss = self._loss.to(loss.device) + loss.detach().double() / self.micro_batches
        torch.autograd.backward(loss / self.micro_batches)

    def step(
        self,
        loss: float | Tensor | None = None,
        *,
        tokens: int | None = None,
        clip_grad_norm: float | None = None,
        metrics: Mapping[str, float | Tensor] | None = None,
    ) -> None:
        """Agree with all ranks on this step and apply it: every registered optimizer steps, and
        gradients are dropped.

        `loss`: the mean over this rank's samples, if it did not go through `backward`. `tokens`:
        what the whole world trained on, for the throughput; by default samples are counted.
        `metrics`: numbers of one's own by name, each a series of the job beside the loss: the mean
        over the ranks that give it, in whichever steps they do. What is not finite counts as not
        given.
        """
        with self._leaving():
            steps, recipe = self._begun(), self._recipe
            if steps.unkept or steps.over:
                raise FunctionError(
                    "step() was called twice without a look at should_stop in between, or after "
                    "the last step: go through the steps by `for step in ctx.steps()`"
                )
            train, world = recipe.spec.train, recipe.world
            samples = train.global_batch // self.data_parallel
            mean = float(self._loss if loss is None else loss)
            first = world.coordinate(TENSOR_AXIS) == 0  # its peers bring the very same
            recipe.share = Contribution(
                loss_sum=mean * samples if first else 0.0,
                count=samples if first else 0,
                grad_sq=0.0,
                data_index=self.data_index,
                samples=self._digest,
                sample_count=self._samples,
                own=self._metrics.checked(metrics or {}),
            )
            recipe.clip_grad_norm = clip_grad_norm
            recipe.tokens = train.global_batch if tokens is None else tokens
            steps.apply()

    def finish(self) -> int:
        """The function has returned; the last step's number. For who called it."""
        if self.over_for is not None:
            raise self.over_for
        function, steps = self._recipe.spec.function, self._steps
        if steps is None:
            raise FunctionError(f"{function} returned without a step")
        steps.keep()
        if not steps.over:
            raise FunctionError(
                f"{function} returned after step {steps.applied} of {self.last_step}: it is to go "
                "on until should_stop"
            )
        return steps.close()

    # --- parts ----------------------------------------------------------------------------------

    def _begun(self) -> Steps:
        if self._steps is None:
            self._recipe.settle()
            self._steps = self._begin()
        return self._steps

    def _open_turn(self, steps: Steps) -> None:
        self._turn = steps.applied + 1
        self._loss = torch.zeros((), dtype=torch.float64)
        self._samples, self._digest = 0, 0
        seed_generators(self.seed, self._turn, self.data_index, self.device)
        self._recipe.leave_if_over()
        steps.phase("load")

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Once the attempt is over, each word to the context leads out of the function."""
        if self.over_for is not None:
            raise Unwound(self.over_for)
        try:
            yield
        except FunctionError:
            raise
        except Exception as error:
            self.over_for = error
            raise Unwound(error) from error
