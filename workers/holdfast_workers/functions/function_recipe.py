"""Runs a user's function or script as a recipe: it computes, this module commits each step.

Agreement, gate, optimizer step and state work as for any recipe. The function is called again for
each attempt, so its objects need not outlive the process groups that they were built on.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from holdfast_workers.functions import former_call
from holdfast_workers.functions.context import Context
from holdfast_workers.functions.equal_copies import FIRST_STEPS, EqualCopies, is_due
from holdfast_workers.functions.function_errors import AttemptEnded, FunctionError
from holdfast_workers.functions.gradient_reduction import (
    GradientReduction,
    check_divisions,
    data_axes,
    ranks_along,
)
from holdfast_workers.functions.registry import Registry
from holdfast_workers.optim.gradients import clip, squared_norm
from holdfast_workers.parallelize.mesh import make_mesh
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.layout import StateLayout
from holdfast_workers.state.rank_state import Snapshot, StateMismatch, local_of
from holdfast_workers.training.guards import NonfiniteOrigin
from holdfast_workers.training.nonfinite_tracing import all_finite
from holdfast_workers.training.rank_log import log_differing_objects, log_unsaved_buffers
from holdfast_workers.training.recipe import (
    Agree,
    AttemptSteps,
    Gate,
    PhaseReporter,
    Recipe,
    StepOutcome,
    World,
    raise_if_refused,
)
from holdfast_workers.training.step_agreement import Contribution
from holdfast_workers.training.step_seeds import seed_generators

Load = Callable[[], Callable[[Context], object]]


class FunctionRecipe(Recipe):
    """The recipe of `spec.function_name`; implements `context.FunctionHost`."""

    repeats_steps = False  # only the function could compute a step again; so `trace` is None

    def __init__(self, spec: TrainingSpec, cache_dir: Path, load: Load | None = None) -> None:
        """`load()` finds what is called in each attempt; None: `spec.function`."""
        super().__init__(spec, cache_dir)
        self._load = load or (lambda: load_function(str(spec.function)))
        self._function: Callable[[Context], object] | None = None
        self._world: World | None = None
        self._mesh: DeviceMesh | None = None
        self._registry: Registry | None = None
        self._reduction: GradientReduction | None = None
        self._copies: EqualCopies | None = None
        self._differing: set[str] = set()
        """Objects that differ between ranks, as far as it has been logged."""
        self._steps_of_attempt = 0
        self.share: Contribution | None = None
        """The function's contribution to the agreement on the next step."""
        self.clip_grad_norm: float | None = None
        self.tokens = 0

    # --- one attempt ----------------------------------------------------------------------------

    def prepare(self) -> None:
        self._function = self._load()

    def build(self, world: World) -> None:
        """Store the world; the function itself builds the model once it is called."""
        if self._world is not None:  # the objects of the last call are garbage only now
            self.abandon_step()
            former_call.delete_objects()
        self._world = world

    def run(self, begin: Callable[[], AttemptSteps]) -> int:
        assert self._function is not None
        world = self.world
        seed_generators(self.spec.train.seed, 0, 0, world.device)
        self._registry = Registry({axis: world.coordinate(axis) for axis in world.mesh})
        self._copies, self._steps_of_attempt = None, 0
        context = Context(self, begin)
        try:
            self._function(context)
        except AttemptEnded as unwound:
            if not context.has_left:
                raise unwound.cause from None
        except Exception:
            if context.ended_by is None:
                raise
            if not context.has_left:  # the function replaced the exception by its own
                raise context.ended_by from None
        return context.finish()

    def abandon_step(self) -> None:
        """Drop all objects of the function: an accelerator has no room for them twice."""
        self._registry, self._mesh, self.share = None, None, None
        self._reduction, self._copies = None, None
        self.applied_step = -1

    # --- FunctionHost ---------------------------------------------------------------------------

    @property
    def world(self) -> World:
        if self._world is None:
            raise RuntimeError("the recipe has not been built")
        return self._world

    @property
    def registry(self) -> Registry:
        if self._registry is None:
            raise RuntimeError("the function is not running")
        return self._registry

    @property
    def mesh(self) -> DeviceMesh:
        if self._mesh is None:
            self._mesh = make_mesh(self.world, self.spec.detection.collective_timeout_s)
        return self._mesh

    def close_registration(self) -> None:
        """End the registration and fix the layout of the state."""
        if not self.registry.optimizers:
            raise FunctionError("register a model and its optimizer before the first step")
        registry = self.registry
        registry.collect()
        self._reduction = GradientReduction.of(
            self.world, registry.parameters(), registry.modules.values(), registry.wrappers
        )
        check_divisions(self.world, registry.tensors())
        registry.fix_layout(self.guard_memory.pieces(primary=self.world.rank == 0))

    # --- state ----------------------------------------------------------------------------------

    def initialize(self) -> None:
        """The state of step 0 is the one that the function built; unsharded tensors take the
        values of the first rank of those that read different samples. Before, all of it is saved
        and loaded on trial."""
        world, axes = self.world, data_axes(self.world)
        self.registry.try_state()
        if world.rank == 0 and (names := self.registry.unsaved_buffers()):
            log_unsaved_buffers(names)
        if axes:
            assert self._reduction is not None
            group = self._reduction.group(axes, lambda: self.mesh)
            self.registry.broadcast_from(ranks_along(world, axes)[0], group)
        self._compare_copies()
        self.guard_memory.reset()
        self.applied_step = 0

    def layout(self) -> StateLayout:
        return self.registry.layout

    def make_room(self, layout: StateLayout) -> None:
        self.registry.make_room(layout)

    def freeze(self, step: int) -> Snapshot:
        return self.registry.freeze(self._small_state(step))

    def state_digest(self, step: int) -> str:
        return self.registry.digest(self._small_state(step))

    def read_state(self, payload: memoryview) -> int:
        self.applied_step = -1
        small = self.registry.read(payload)
        step = int(small.get("step", -1))
        if small != self._small_state(step):
            raise StateMismatch(
                f"the state is of another run: {small}, here {self._small_state(step)}"
            )
        self.guard_memory.adopt_loaded_state(step)
        self.applied_step = step
        return step

    @property
    def model(self) -> nn.Module:
        return next(iter(self.registry.modules.values()))

    def local_tensors(self, what: str) -> dict[str, Tensor]:
        parameters = self.registry.parameters()
        if what == "gradient":
            return {n: local_of(p.grad) for n, p in parameters.items() if p.grad is not None}
        return {name: local_of(parameter) for name, parameter in parameters.items()}

    def _small_state(self, step: int) -> dict[str, Any]:
        train = self.spec.train
        return {
            "step": step,
            "global_batch": train.global_batch,
            "seed": train.seed,
            "function": self.spec.function_name,
        }

    # --- committing a step ----------------------------------------------------------------------

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        assert self.share is not None and self._reduction is not None
        self.registry.check_step()
        phase("reduce", step)
        self._reduction.run(lambda: self.mesh)
        trained = self.registry.trained()
        phase("agree", step)
        agreed = agree(self._with_gradients(self.share))
        raise_if_refused(agreed)
        gate(step)
        phase("optimizer", step)
        self.applied_step = -1
        clip([_gradient(p) for _, p, _ in trained], agreed.grad_norm, self.clip_grad_norm)
        first = next(iter(self.registry.optimizers.values()))
        lr = float(first.param_groups[0].get("lr", math.nan))
        self.registry.step()
        self._steps_of_attempt += 1
        if is_due(self._steps_of_attempt):
            self.registry.check_parts()
            self._compare_copies()
        self.guard_memory.record_step(step, agreed.loss, agreed.grad_norm)
        self.applied_step = step
        return StepOutcome(agreed=agreed, lr=lr, tokens=self.tokens)

    def _compare_copies(self) -> None:
        """Compare what must be equal on several ranks. Collective; raises FunctionError."""
        if self.world.world_size == 1:
            return
        pieces = self.registry.equal_pieces()
        repeatable = self.spec.train.deterministic == "strict"
        if self._copies is None:
            self._copies = EqualCopies.gather(self.world, pieces, repeatable=repeatable)
        by_digests = self.spec.checks.replica_digest_every_steps > 0 and repeatable
        early = self._steps_of_attempt <= FIRST_STEPS
        differing = self._copies.compare(pieces, replicas=early or not by_digests)
        if self.world.rank == 0 and (names := set(differing) - self._differing):
            log_differing_objects(sorted(names))
        self._differing.update(differing)

    def _with_gradients(self, share: Contribution) -> Contribution:
        primary = [_gradient(p) for _, p, box in self.registry.trained() if box.primary]
        grad_sq = squared_norm(primary)
        nonfinite = not (math.isfinite(share.loss_sum) and math.isfinite(grad_sq))
        return replace(share, grad_sq=grad_sq, nonfinite=nonfinite)

    def observed_nonfinite(self) -> NonfiniteOrigin | None:
        if self.share is not None and not math.isfinite(self.share.loss_sum):
            return NonfiniteOrigin(self.world.rank, -1, 0, "", "loss", again=False)
        for name, parameter, _ in reversed(self.registry.trained()):
            if not all_finite([_gradient(parameter)]):
                return NonfiniteOrigin(self.world.rank, -1, 0, name, "gradient", again=False)
        return None


def load_function(name: str) -> Callable[[Context], object]:
    """The function `package.module:attribute`. Raises FunctionError if there is no such function;
    an exception of its module on import passes unchanged."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise FunctionError(
                f"function {name!r}: there is no module {error.name!r} in the uploaded code or on "
                "the nodes"
            ) from error
        raise
    target: Any = module
    for part in attribute.split("."):
        target = getattr(target, part, None)
    if not callable(target):
        raise FunctionError(f"function {name!r}: {module_name} has no callable {attribute!r}")
    function: Callable[[Context], object] = target
    return function


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return local_of(parameter.grad)
