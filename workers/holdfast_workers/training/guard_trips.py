"""Handles a tripped guard: finds the origin, reports it, and decides how training continues.

All ranks get here in the same step with the same trip, so collectives are allowed. A healthy step
never gets here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Protocol

from holdfast_workers.protocol.findings import TripReport
from holdfast_workers.training.guards import (
    GuardAction,
    GuardKind,
    NonfiniteOrigin,
    as_retry,
    describe_trip,
    find_origin,
    judge,
    trip_report,
)
from holdfast_workers.training.recipe import GuardTripped, NonFiniteStep, Recipe, World
from holdfast_workers.training.step_agreement import gather_bytes

_ORIGIN_BYTES = 1024
_LAYER_CHARACTERS = 500


class TripHooks(Protocol):
    """The hooks of the step loop that the handling of a trip uses."""

    def phase(self, name: str, step: int) -> None: ...
    def commit_gate(self, step: int) -> None: ...
    def tripped(self, report: TripReport) -> None: ...


class GuardRunner:
    """The guards of one attempt. `start_step` is the step of its start state; 0 is the seed's."""

    def __init__(self, recipe: Recipe, world: World, hooks: TripHooks, start_step: int) -> None:
        self._recipe = recipe
        self._world = world
        self._hooks = hooks
        self._start_step = start_step
        self._retried: tuple[int, int] | None = None
        """Step and window of the last retry."""

    def judge(
        self, step: int, loss: float, grad_norm: float, *, nonfinite: bool
    ) -> TripReport | None:
        """The trip of a step that all ranks have agreed on, if any guard trips."""
        spec, memory = self._recipe.spec.guards, self._recipe.guard_memory
        losses, grad_norms = memory.history_before(step, spec.window + 1)
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

    def handle_trip(self, trip: TripReport) -> None:
        """Return if the step is to be computed again: from the next window, or once from the same
        window if a second computation was finite.

        Raises GuardTripped if the trip ends the attempt. Raises NonFiniteStep if the state is at
        fault and not the data: its own values are not finite, or it was restored just now.
        """
        step = trip.step
        origin, ranks = self._find_origin(trip)
        if not self._recipe.repeats_steps:  # the next attempt does, without the window
            raise GuardTripped(trip, trip_report(trip, origin, ranks))
        transient = trip.kind is GuardKind.NONFINITE and (origin is None or not origin.again)
        first = self._retried != (step, trip.window)
        if transient and first and trip.decision is not GuardAction.STOP:
            self._retried = (step, trip.window)
            self._hooks.tripped(trip_report(as_retry(trip), origin, ranks))
            return
        report = trip_report(trip, origin, ranks)
        in_state = origin is not None and origin.what == "state"
        restored = 0 < self._start_step == step - 1
        if trip.kind is GuardKind.NONFINITE and (in_state or restored):
            raise NonFiniteStep(f"step {step}: {trip.why}: {describe_trip(report)}")
        if trip.decision is not GuardAction.SKIP or trip.skipped is None:
            raise GuardTripped(trip, report)
        self._hooks.tripped(report)
        self._hooks.commit_gate(step)
        self._recipe.guard_memory.skip(*trip.skipped)
        self._hooks.phase("skipped", step)

    def _find_origin(self, trip: TripReport) -> tuple[NonfiniteOrigin | None, tuple[int, ...]]:
        """The origin and its ranks. Discards everything that was computed for the step."""
        if trip.kind is not GuardKind.NONFINITE:
            self._recipe.abandon_step()
            return None, ()
        self._hooks.phase("trace", trip.step)
        observed = self._recipe.observed_nonfinite()
        self._recipe.abandon_step()
        own = self._recipe.trace(trip.step) or observed
        self._recipe.abandon_step()
        packed = b"" if own is None else json.dumps(asdict(_shortened(own))).encode()
        gathered = gather_bytes(packed.ljust(_ORIGIN_BYTES), self._world.world_size)
        return find_origin([NonfiniteOrigin(**json.loads(raw)) for raw in gathered if raw.strip()])


def _shortened(origin: NonfiniteOrigin) -> NonfiniteOrigin:
    return replace(origin, layer=origin.layer[:_LAYER_CHARACTERS])
