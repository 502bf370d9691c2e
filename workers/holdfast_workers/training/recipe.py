"""What a training program must be able to do so that Holdfast can hold it through faults.

A recipe owns the live training state of one rank: parameters, optimizer, schedule, RNG and data
position. It knows its world as plain numbers and never why an attempt ended. Its state can be
copied out and in as one flat payload (:mod:`holdfast_workers.state.layout`), and at equal step,
seed and mesh the payload is bitwise the same however often the run was interrupted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.layout import StateLayout
from holdfast_workers.training.guard_memory import GuardMemory
from holdfast_workers.training.guards import Place, Trip, in_words
from holdfast_workers.training.step_agreement import Agreed, Contribution

if TYPE_CHECKING:
    from torch import Tensor, nn

    from holdfast_workers.state.rank_state import Snapshot
    from holdfast_workers.training.step_loop import Steps

Agree = Callable[[Contribution], Agreed]
"""World-wide agreement on a step; raises if any rank speaks of another attempt or step."""

Gate = Callable[[int], None]
"""Last word before a step is applied; raises if this rank may not commit it."""


class Phase(Protocol):
    """Says which phase of which step, and of which of its micro-batches, is being entered."""

    def __call__(self, name: str, step: int, micro_batch: int = 0) -> None:
        """Costs next to nothing. `name` has 16 bytes at most."""
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
        """Size of a mesh axis; 1 for one that the mesh does not have."""
        return self.mesh.get(axis, 1)

    def coordinate(self, axis: str) -> int:
        """This rank's coordinate on a mesh axis; 0 on one that the mesh does not have."""
        if axis not in self.mesh:
            return 0
        names = list(self.mesh)
        inner = prod(self.mesh[name] for name in names[names.index(axis) + 1 :])
        return self.rank // inner % self.mesh[axis]


@dataclass(frozen=True)
class StepOutcome:
    """What one applied step was: the world's agreement on it, and what only the recipe knows."""

    agreed: Agreed
    lr: float
    tokens: int
    """Tokens the whole world trained on in this step."""


class NonFiniteStep(ArithmeticError):
    """Loss or gradient of a step is not finite on some rank; no rank has applied the step."""


class GuardTripped(Exception):
    """A guard has tripped on all ranks in the same step; no rank has applied the step."""

    def __init__(self, trip: Trip, report: dict[str, Any] | None = None) -> None:
        super().__init__(in_words(report) if report else trip.why)
        self.trip = trip
        self.report = report
        """What is told of it, once the place where it began has been looked for."""


class Recipe(ABC):
    """One rank's training program. Called from one thread, in the order of the methods below.

    `prepare` → `build` → `run`: (`initialize` | `read_state`) → `train_step`*. After a fault:
    `abandon_step`, then `rebind` on the new process groups and `run`; or a new process goes through
    the first line.
    """

    repeats_steps = True
    """Whether it can compute a step again in place: for `trace`, from another window of data."""

    def __init__(self, spec: TrainingSpec, cache_dir: Path) -> None:
        self.spec = spec
        self.cache_dir = cache_dir
        self.applied_step = -1
        """Steps that the live state has applied; -1 while it is no whole state of any step."""
        self.guard_memory = GuardMemory()
        """A part of the state: what the guards and the order of the data depend on."""
        self.leave_if_over: Callable[[], None] = _goes_on
        """Raises once the attempt that this rank computes for is over: who computes for long in a
        row, without a collective, may ask now and then, rather than finish for nobody. What it
        raises is to leave `train_step`. Set by who runs the attempt."""

    @abstractmethod
    def prepare(self) -> None:
        """All that needs no world (open or build the corpus). Starts no thread."""

    def expect(self, world: World) -> bool:
        """Make ready what can be for the `build` for this very place, which is the only one that
        may follow. There is no process group yet, and none is left; nor is any thread started.
        Asked again, it says the same. False: there is nothing that could be made ready."""
        return False

    @abstractmethod
    def build(self, world: World) -> None:
        """Make model and optimizer on the mesh; values stay uninitialised, the layout is fixed."""

    @abstractmethod
    def initialize(self) -> None:
        """Put in the state of step 0: a function of the seed alone, on whatever mesh."""

    @abstractmethod
    def rebind(self, world: World) -> None:
        """Put new process groups under the living model: same mesh, same rank, next attempt.

        Values survive where torch allows it, but a `read_state` must follow all the same.
        """

    @abstractmethod
    def abandon_step(self) -> None:
        """Forget a step that an exception left anywhere: no trace of it may reach the next."""

    @abstractmethod
    def layout(self) -> StateLayout:
        """Where each local tensor lies in the payload; fixed from `build` on."""

    @abstractmethod
    def freeze(self, step: int) -> Snapshot:
        """All state of this rank, which has applied `step` steps, to be copied before the next
        step changes it: until then, by any thread."""

    def write_state(self, payload: memoryview, step: int) -> str:
        """Copy all state of this rank, which has applied `step` steps, into `payload`; its digest.

        `payload` has `layout().payload_bytes` bytes; every byte is written, padding as zero.
        """
        return self.freeze(step).write(payload)

    @abstractmethod
    def read_state(self, payload: memoryview) -> int:
        """Take over the state in `payload`, in place; return its step."""

    @abstractmethod
    def state_digest(self, step: int) -> str:
        """Digest of the payload that `write_state` would write now, without writing it."""

    @property
    def model(self) -> nn.Module:
        """The living model, for who looks into it or tampers with it."""
        raise NotImplementedError(f"{type(self).__name__} does not show its model")

    def local_tensors(self, what: str) -> dict[str, Tensor]:
        """Local tensors of the living state by the name of their parameter; `what` is
        `parameter`, `gradient` or `moment`."""
        raise NotImplementedError(f"{type(self).__name__} does not show its tensors")

    def parameters(self) -> int | None:
        """How many parameters the whole model has; None if the recipe cannot tell."""
        return None

    @abstractmethod
    def train_step(self, step: int, agree: Agree, gate: Gate, phase: Phase) -> StepOutcome:
        """Compute step number `step` (1 is the first), agree on it, and apply it.

        Calls `agree` exactly once, after the backward pass; then `gate`; then changes state.
        An exception before or inside `gate` leaves the state as it was. So does GuardTripped,
        which it raises if a guard has tripped: the step may then be computed again, from another
        window of data.
        """

    def run(self, begin: Callable[[], Steps]) -> int:
        """Train to the end of one attempt; the last step's number. After `build` or `rebind`.

        `begin` puts in the state and gives the attempt's steps: called once `layout` is fixed.
        """
        steps = begin()
        while not steps.over:
            steps.apply()
            steps.keep()
        return steps.close()

    @abstractmethod
    def seen(self) -> Place | None:
        """Where, as far as is known without computing anything, this rank has met what is not
        finite in the step that was computed last. Called before `abandon_step`."""

    @abstractmethod
    def trace(self, step: int) -> Place | None:
        """Compute the micro-batches of `step` again and find where this rank first meets what is
        not finite. Called on all ranks, after `abandon_step`, which is to be called again."""


def _goes_on() -> None:
    """What a recipe is told that nobody can call away."""
