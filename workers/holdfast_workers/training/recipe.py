"""The interface of a training program that Holdfast keeps running through faults.

A recipe owns the live training state of one rank: parameters, optimizer, schedule, RNG and data
position. It receives its world as plain numbers and never learns why an attempt ended. Its state
can be copied out and in as one flat payload (:mod:`holdfast_workers.state.layout`). At equal step,
seed and mesh, the payload is bitwise the same however often the run was interrupted.

Users write recipes, so this module is a contract with them (`docs/recipes.md`): the abstract
methods are all that a recipe must have, and a method added later has a default. Users import it
from :mod:`holdfast_workers.recipes`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from holdfast_workers.protocol.findings import TripReport
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.layout import StateLayout
from holdfast_workers.training.early_stop import EvaluationMemory
from holdfast_workers.training.evaluation import EvaluationShare
from holdfast_workers.training.guard_memory import GuardMemory
from holdfast_workers.training.guards import GuardAction, NonfiniteOrigin, describe_trip
from holdfast_workers.training.step_agreement import Agreed, Contribution

if TYPE_CHECKING:
    from torch import Tensor, nn

    from holdfast_workers.state.rank_state import Snapshot

Agree = Callable[[Contribution], Agreed]
"""World-wide agreement on a step; raises if any rank is in another attempt or at another step."""

Gate = Callable[[int], None]
"""Final check before a step is applied; raises if this rank may not commit the step."""


class PhaseReporter(Protocol):
    """Reports that a rank enters a phase of a step, and of one of its micro-batches."""

    def __call__(self, name: str, step: int, micro_batch: int = 0) -> None:
        """Takes well under a microsecond. `name` has at most 16 bytes."""
        ...


class AttemptSteps(Protocol):
    """The steps of one attempt, as a recipe or a user's function drives them.

    The driver calls `apply` and `keep` until `over`, and then `close`.
    `step_loop.Steps` implements it.
    """

    applied: int
    """The step that was applied last."""
    over: bool
    """Whether `applied` is the last step of the attempt."""
    left: bool
    """Whether the attempt is over before the job, because the mesh changes."""

    @property
    def awaits_keep(self) -> bool:
        """Whether a step has been applied and `keep` has not been called for it."""
        ...

    def apply(self) -> None:
        """Compute the next step, agree on it with all ranks, and apply it."""
        ...

    def keep(self) -> None:
        """Save and digest the state after the applied step, where a save or a digest is due."""
        ...

    def phase(self, name: str, micro_batch: int = 0) -> None:
        """Report that phase `name` of the next step begins."""
        ...

    def close(self) -> int:
        """Run the closing agreement and return the last step's number."""
        ...


@dataclass(frozen=True)
class World:
    """A rank's place in an attempt. The default process group exists if `world_size` > 1."""

    rank: int
    world_size: int
    mesh: dict[str, int]
    """Size of each axis, outermost first, e.g. {"dp_shard": 2, "tp": 2}."""
    attempt: int
    device: str
    """ "cpu", or "cuda:0"."""

    def __post_init__(self) -> None:
        if prod(self.mesh.values()) != self.world_size:
            raise ValueError(f"mesh {self.mesh} does not multiply to world size {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is outside a world of {self.world_size}")

    def size(self, axis: str) -> int:
        """Size of a mesh axis; 1 for an axis that the mesh does not have."""
        return self.mesh.get(axis, 1)

    def coordinate(self, axis: str) -> int:
        """This rank's coordinate on a mesh axis; 0 on an axis that the mesh does not have."""
        if axis not in self.mesh:
            return 0
        names = list(self.mesh)
        inner = prod(self.mesh[name] for name in names[names.index(axis) + 1 :])
        return self.rank // inner % self.mesh[axis]


@dataclass(frozen=True)
class StepOutcome:
    """The result of one applied step: the world's agreement, and values only the recipe has."""

    agreed: Agreed
    lr: float
    tokens: int
    """Tokens that the whole world trained on in this step."""


class NonFiniteStep(ArithmeticError):
    """The loss or a gradient of a step is not finite on some rank; no rank applied the step."""


class GuardTripped(Exception):
    """A guard tripped on all ranks in the same step; no rank applied the step."""

    def __init__(self, trip: TripReport, report: TripReport | None = None) -> None:
        super().__init__(describe_trip(report) if report else trip.why)
        self.trip = trip
        self.report = report
        """The trip as it is reported (`guards.trip_report`), set once its origin was searched."""


def raise_if_refused(agreed: Agreed) -> None:
    """Raises GuardTripped or NonFiniteStep if no rank may apply the agreed step."""
    if agreed.trip is not None and agreed.trip.decision is not GuardAction.REPORT:
        raise GuardTripped(agreed.trip)
    if agreed.nonfinite:
        raise NonFiniteStep(
            f"step {agreed.step}: loss {agreed.loss}, gradient norm {agreed.grad_norm}"
        )


@runtime_checkable
class EvaluatedRecipe(Protocol):
    """A recipe that carries out the spec's `evaluate`."""

    evaluation_memory: EvaluationMemory
    """The part of its state that `evaluate.stop` depends on."""

    def evaluate(self, step: int, phase: PhaseReporter) -> EvaluationShare:
        """Evaluate the state after `step`; the state, and all that later steps depend on, stays as
        it is. Called on all ranks, after `train_step`. Raises what that raises."""
        ...


@runtime_checkable
class GrowingState(Protocol):
    """A recipe whose state may outgrow its room in the layout, see `state/object_room.py`."""

    def make_room(self, layout: StateLayout) -> None:
        """Give the objects the room that they have in `layout`, whose payload is read next."""
        ...


def make_room(recipe: Recipe, layout: StateLayout) -> None:
    """Prepare the recipe to read a payload of `layout`, which may differ from its own in room."""
    if isinstance(recipe, GrowingState):
        recipe.make_room(layout)


class Recipe(ABC):
    """One rank's training program. One thread calls it, in the order of the methods below.

    `prepare` → `build` → `run`: (`initialize` | `read_state`) → `train_step`*. After a fault, the
    worker calls `abandon_step`, then `rebind` on the new process groups, then `run`; or a new
    process starts again with `prepare`. The docstring of a method with a default says what a recipe
    forgoes with it.
    """

    repeats_steps = True
    """Whether the recipe can compute a step again in place: for `trace`, or from another window
    of data."""

    def __init__(self, spec: TrainingSpec, cache_dir: Path) -> None:
        self.spec = spec
        self.cache_dir = cache_dir
        self.applied_step = -1
        """Steps that the live state has applied; -1 while the state is not that of a whole step."""
        self.guard_memory = GuardMemory()
        """The part of the state that the guards and the order of the data depend on."""
        self.leave_if_over: Callable[[], None] = _never_over
        """Raises once the attempt is over. A recipe that computes for long without a collective
        calls it now and then, so that it does not finish a step that cannot commit. The exception
        must leave `train_step`. The attempt's runner sets this attribute."""

    def prepare(self) -> None:  # noqa: B027 (not every recipe has such work)
        """Do the work that needs no world (open or build the corpus). Starts no thread.

        Processes forked later share its result. Default: nothing, so each process does all work.
        """

    def expect(self, world: World) -> bool:
        """Prepare for `build(world)` with this mesh and rank, the only `build` that may follow.

        There is no process group yet; the method leaves no process group and starts no thread.
        A repeated call returns the same value. False, the default, means that nothing can be
        prepared: a process that replaces a dead one builds its model during the recovery.
        """
        return False

    @abstractmethod
    def build(self, world: World) -> None:
        """Create model and optimizer on the mesh. Values stay uninitialised; the layout is fixed
        from here on."""

    @abstractmethod
    def initialize(self) -> None:
        """Load the state of step 0, which depends on the seed alone, not on the mesh; or with
        `published_weights`, of a recipe that takes them."""

    def rebind(self, world: World) -> None:
        """Replace the process groups of the live model: same mesh, same rank, next attempt.

        Values survive where torch allows it, but a `read_state` must follow in any case. Default:
        `build`, so a survivor of a fault builds its model again during the recovery.
        """
        self.build(world)

    @abstractmethod
    def abandon_step(self) -> None:
        """Discard a step that an exception interrupted; nothing of it may affect the next step."""

    @abstractmethod
    def layout(self) -> StateLayout:
        """The position of each local tensor in the payload; fixed from `build` on."""

    @abstractmethod
    def freeze(self, step: int) -> Snapshot:
        """All state of this rank after `step` steps. Any thread may copy the snapshot until the
        next step changes the state."""

    def write_state(self, payload: memoryview, step: int) -> str:
        """Copy all state of this rank after `step` steps into `payload` and return its digest.

        `payload` has `layout().payload_bytes` bytes; every byte is written, padding as zero.
        """
        return self.freeze(step).write(payload)

    @abstractmethod
    def read_state(self, payload: memoryview) -> int:
        """Load the state in `payload`, in place, and return its step."""

    def state_digest(self, step: int) -> str:
        """The digest of the payload that `write_state` would write now, without writing it.

        Default: of `freeze`, which on an accelerator needs host memory for a copy of the state.
        """
        return self.freeze(step).digest()

    @property
    def model(self) -> nn.Module:
        """The live model, for inspection and for fault injection. Default: none, so a fault that
        spoils a layer cannot be injected."""
        raise NotImplementedError(f"{type(self).__name__} does not expose its model")

    def local_tensors(self, what: str) -> dict[str, Tensor]:
        """Local tensors of the live state by parameter name; `what` is `parameter`, `gradient` or
        `moment`. Default: none, so a flipped bit cannot be injected."""
        raise NotImplementedError(f"{type(self).__name__} does not expose its tensors")

    def parameters(self) -> int | None:
        """The number of parameters of the whole model. None, the default: unknown, so no MFU is
        reported."""
        return None

    @abstractmethod
    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        """Compute step number `step` (1 is the first), agree on it, and apply it.

        Calls `agree` exactly once, after the backward pass; then calls `gate`; then changes the
        state. An exception before or inside `gate` leaves the state unchanged. So does
        GuardTripped, which the recipe raises if a guard tripped; the step may then be computed
        again, from another window of data.
        """

    def run(self, begin: Callable[[], AttemptSteps]) -> int:
        """Train to the end of one attempt and return the last step's number.

        Called after `build` or `rebind`. `begin` loads the state and returns the attempt's steps;
        the recipe calls it once `layout` is fixed.
        """
        steps = begin()
        while not steps.over:
            steps.apply()
            steps.keep()
        return steps.close()

    def observed_nonfinite(self) -> NonfiniteOrigin | None:
        """The first non-finite value that this rank observed in the last computed step, as far as
        it is known without computing anything. Called before `abandon_step`. Default: None, so the
        report of a guard does not name the place where the value began."""
        return None

    def trace(self, step: int) -> NonfiniteOrigin | None:
        """Compute the micro-batches of `step` again and return the first non-finite value on this
        rank. Called on all ranks, after `abandon_step`; the caller calls `abandon_step` again.
        Default: None, as of a second computation that was finite, so the step is tried once more
        before its window of data is skipped."""
        return None


def _never_over() -> None:
    """The default of `leave_if_over`: outside of an attempt nothing can end one."""
