"""What is done once a guard has tripped: find the place, tell, and settle what comes next.

All ranks come here in the same step with the same trip, so all may meet in collectives. Healthy
steps never do.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any, Protocol

from holdfast_workers.training.guards import (
    Decision,
    Kind,
    Place,
    Trip,
    in_words,
    judge,
    origin,
    retried,
    told,
)
from holdfast_workers.training.recipe import GuardTripped, NonFiniteStep, Recipe, World
from holdfast_workers.training.step_agreement import gather_packed

_PLACE_BYTES = 1024
_LAYER_CHARACTERS = 500


class TripHooks(Protocol):
    """What the surroundings of a rank see of a trip; of the step loop's hooks."""

    def phase(self, name: str, step: int) -> None: ...
    def commit_gate(self, step: int) -> None: ...
    def tripped(self, report: dict[str, Any]) -> None: ...


class Guards:
    """The guards of one attempt. `start_step`: that of the state it was given; 0 is the seed's."""

    def __init__(self, recipe: Recipe, world: World, hooks: TripHooks, start_step: int) -> None:
        self._recipe = recipe
        self._world = world
        self._hooks = hooks
        self._start_step = start_step
        self._retried: tuple[int, int] | None = None
        """Step and window that were computed again last."""

    def judge(self, step: int, loss: float, grad_norm: float, *, nonfinite: bool) -> Trip | None:
        """What they have against a step that all ranks have agreed on."""
        spec, memory = self._recipe.spec.guards, self._recipe.guard_memory
        losses, grad_norms = memory.before(step, spec.window + 1)
        return judge(
            spec,
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            nonfinite=nonfinite,
            losses=losses,
            grad_norms=grad_norms,
            ledger=memory.ledger,
        )

    def settle(self, trip: Trip) -> None:
        """Return if the step is to be computed again: from the next window, or from the same one,
        once, where it turned out to be finite on looking closer.

        Raises GuardTripped if the attempt ends by it; NonFiniteStep if the data is not at fault,
        but the state: its own values are not finite, or it was restored just now.
        """
        step = trip.step
        begun, ranks = self._find(trip)
        if not self._recipe.repeats_steps:  # the next attempt does, without the window
            raise GuardTripped(trip, told(trip, begun, ranks))
        chance = trip.kind is Kind.NONFINITE and (begun is None or not begun.again)
        first = self._retried != (step, trip.window)
        if chance and first and trip.decision is not Decision.STOP:
            self._retried = (step, trip.window)
            self._hooks.tripped(told(retried(trip), begun, ranks))
            return
        report = told(trip, begun, ranks)
        of_state = begun is not None and begun.what == "state"
        restored = 0 < self._start_step == step - 1
        if trip.kind is Kind.NONFINITE and (of_state or restored):
            raise NonFiniteStep(f"step {step}: {trip.why}: {in_words(report)}")
        if trip.decision is not Decision.SKIP or trip.skipped is None:
            raise GuardTripped(trip, report)
        self._hooks.tripped(report)
        self._hooks.commit_gate(step)
        self._recipe.guard_memory.skip(*trip.skipped)
        self._hooks.phase("skipped", step)

    def _find(self, trip: Trip) -> tuple[Place | None, tuple[int, ...]]:
        """Where it began, and on which ranks; and all is dropped that was computed."""
        if trip.kind is not Kind.NONFINITE:
            self._recipe.abandon_step()
            return None, ()
        self._hooks.phase("trace", trip.step)
        seen = self._recipe.seen()
        self._recipe.abandon_step()
        mine = self._recipe.trace(trip.step) or seen
        self._recipe.abandon_step()
        packed = b"" if mine is None else json.dumps(asdict(_short(mine))).encode()
        everybody = gather_packed(packed.ljust(_PLACE_BYTES), self._world.world_size)
        return origin([Place(**json.loads(one)) for one in everybody if one.strip()])


def _short(place: Place) -> Place:
    return replace(place, layer=place.layer[:_LAYER_CHARACTERS])
