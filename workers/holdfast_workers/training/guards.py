"""The guards: decide whether a step may be applied, and the action if it may not. Pure.

They compare the agreed values of a step (loss, gradient norm, whether anything was not finite)
with the history of earlier steps in the state. So all ranks decide alike in the same step, without
any communication beyond the agreement, and a restored run decides like an uninterrupted one.

A spike is a value far above the median of the last steps, in units of their median absolute
deviation (Iglewicz and Hoaglin 1993, "How to Detect and Handle Outliers", the modified z-score).
Both measures are robust against outliers in the history. Gradient norms vary by factors, so their
logarithms are compared. A sudden decrease is not a spike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from holdfast_workers.protocol.findings import GuardAction, GuardKind, TripReport
from holdfast_workers.spec import GuardsSpec, SpikeGuardSpec
from holdfast_workers.training.skipped_windows import Ledger

__all__ = [
    "MAX_RANGES",
    "MIN_VALUES",
    "GuardAction",
    "GuardKind",
    "NonfiniteOrigin",
    "as_retry",
    "describe_trip",
    "find_origin",
    "judge",
    "trip_report",
]

MAX_RANGES = 256
"""The number of separate ranges of windows that fit in a state."""
MIN_VALUES = 16
"""Fewest steps to compare with: with fewer, no value counts as a spike."""
_DEVIATION = 1.4826  # of a normal distribution's median absolute deviation
_MIN_SPREAD = 0.01
"""Least spread, as a fraction of the median: if the values hardly differ, a small difference is not
a spike."""
_MIN_LOG_SPREAD = 0.1
_MIN_NORM = 1e-30


@dataclass(frozen=True)
class NonfiniteOrigin:
    """The place where a rank first observed a non-finite value."""

    rank: int
    micro_batch: int
    order: int
    """The number of modules checked before in the micro-batch; the same count on every rank."""
    layer: str
    what: str
    """ "output", "gradient", "loss", or "state": the parameters or moments themselves."""
    again: bool = True
    """Whether it also appeared when the step was computed a second time."""


def judge(
    spec: GuardsSpec,
    *,
    step: int,
    loss: float,
    grad_norm: float,
    nonfinite: bool,
    losses: Sequence[float],
    grad_norms: Sequence[float],
    ledger: Ledger,
) -> TripReport | None:
    """The trip with the most severe action, if any guard trips. `losses` and `grad_norms` are the
    values of the steps applied before, oldest first."""
    if nonfinite:
        policy = GuardAction(spec.nonfinite.policy)
        why = f"loss {loss:g}, gradient norm {grad_norm:g}"
        trip = TripReport(
            GuardKind.NONFINITE, step, ledger.window(step), policy, why, grad_norm, loss, grad_norm
        )
        return _with_skipped_windows(trip, spec, ledger)
    if step <= spec.warmup_steps:
        return None
    trips = []
    for kind, guard, value, before in (
        (GuardKind.LOSS_SPIKE, spec.loss_spike, loss, losses),
        (GuardKind.GRAD_NORM_SPIKE, spec.grad_norm_spike, grad_norm, grad_norms),
    ):
        off = guard.policy == "off"
        bounds = None if off else _exceeded_bounds(kind, guard, value, before, spec.window)
        if bounds is not None:
            middle, limit = bounds
            name = "loss" if kind is GuardKind.LOSS_SPIKE else "gradient norm"
            trip = TripReport(
                kind=kind,
                step=step,
                value=value,
                loss=loss,
                grad_norm=grad_norm,
                window=ledger.window(step),
                decision=GuardAction(guard.policy),
                why=f"{name} {value:.4g} exceeds the limit {limit:.4g} (median {middle:.4g})",
                middle=middle,
                limit=limit,
            )
            trips.append(_with_skipped_windows(trip, spec, ledger))
    severity = list(GuardAction)
    return max(trips, key=lambda trip: severity.index(trip.decision), default=None)


def find_origin(
    places: Sequence[NonfiniteOrigin],
) -> tuple[NonfiniteOrigin | None, tuple[int, ...]]:
    """The earliest place, and all ranks that observed it there.

    Tensor-parallel peers and later layers only see what spread from the earliest place. If a
    gradient was finite in the second computation, the rank is unknown, because after the reduction
    all ranks have the non-finite gradient.
    """
    places = [place for place in places if place.again] or places
    places = [place for place in places if place.again or place.what != "gradient"] or places
    if not places:
        return None, ()
    first = min(places, key=lambda place: (place.micro_batch, place.order, place.rank))
    if first.what == "gradient" and not first.again:
        return first, ()
    earliest = (first.micro_batch, first.order)
    ranks = {place.rank for place in places if (place.micro_batch, place.order) == earliest}
    return first, tuple(sorted(ranks))


def as_retry(trip: TripReport) -> TripReport:
    """The trip as a retry, for a non-finite value that a second computation did not reproduce:
    neither the data nor the state is bad."""
    why = f"{trip.why}; a second computation from the same data was finite: check the machine"
    return replace(trip, decision=GuardAction.RETRY, why=why, skipped=None, back_to=None)


def trip_report(
    trip: TripReport, origin: NonfiniteOrigin | None, ranks: tuple[int, ...]
) -> TripReport:
    """A trip as it is reported, with its origin and the ranks that observed it there."""
    return replace(
        trip,
        value=_finite_or_none(trip.value),
        loss=_finite_or_none(trip.loss),
        grad_norm=_finite_or_none(trip.grad_norm),
        ranks=ranks,
        layer=origin.layer or None if origin else None,
        what=origin.what if origin else None,
        micro_batch=origin.micro_batch if origin and origin.micro_batch >= 0 else None,
    )


def describe_trip(report: TripReport) -> str:
    """One line about a trip: the kind, the place, and the data window."""
    where = ""
    if report.what:
        ranks = ", ".join(str(rank) for rank in report.ranks)
        where = f"; began on rank {ranks}" if ranks else "; began on an unknown rank"
        where += f" in the {report.what}"
        where += f" of {report.layer}" if report.layer else ""
        if report.micro_batch is not None:
            where += f", micro-batch {report.micro_batch}"
    return f"{report.kind} at step {report.step} (window {report.window}): {report.why}{where}"


def _exceeded_bounds(
    kind: GuardKind, guard: SpikeGuardSpec, value: float, before: Sequence[float], window: int
) -> tuple[float, float] | None:
    """Median and limit, if `value` exceeds the limit. Under the policy `report`, an excursion is
    reported only when it begins, not while the step before also exceeded its own limit."""
    bounds_of = _norm_bounds if kind is GuardKind.GRAD_NORM_SPIKE else _bounds
    bounds = bounds_of(guard.z, before[-window:])
    if bounds is None or value <= bounds[1]:
        return None
    if guard.policy == "report":
        earlier = bounds_of(guard.z, before[-window - 1 : -1])
        if earlier is not None and before[-1] > earlier[1]:
            return None
    return bounds


def _bounds(
    z: float, values: Sequence[float], min_spread: float | None = None
) -> tuple[float, float] | None:
    """The median, and the highest value that is not a spike."""
    if len(values) < MIN_VALUES:
        return None
    middle = median(values)
    spread = _DEVIATION * median(abs(value - middle) for value in values)
    least = _MIN_SPREAD * abs(middle) if min_spread is None else min_spread
    return middle, middle + z * max(spread, least)


def _norm_bounds(z: float, values: Sequence[float]) -> tuple[float, float] | None:
    logarithms = [math.log(max(value, _MIN_NORM)) for value in values]
    bounds = _bounds(z, logarithms, _MIN_LOG_SPREAD)
    return None if bounds is None else (math.exp(bounds[0]), math.exp(min(bounds[1], 700.0)))


def _with_skipped_windows(trip: TripReport, spec: GuardsSpec, ledger: Ledger) -> TripReport:
    """The trip with the windows that it adds to the ledger, or a stop if those are too many."""
    if trip.decision in (GuardAction.REPORT, GuardAction.STOP):
        return trip
    back_to, first = None, trip.window
    if trip.decision is GuardAction.ROLLBACK:
        back_to = max(0, trip.step - spec.rollback_steps)
        first = ledger.window(back_to + 1)
    skipped = (first, trip.window + 1)
    extended = ledger | Ledger((skipped,))
    recent = extended.count(trip.window + 1 - spec.skip_span, trip.window + 1)
    if recent > spec.max_skips or len(extended.ranges) > MAX_RANGES:
        why = (
            f"{trip.why}; {recent} of the last {spec.skip_span} windows would be skipped, "
            f"guards.max_skips allows {spec.max_skips}"
            if recent > spec.max_skips
            else f"{trip.why}; the ledger has no room for more than {MAX_RANGES} ranges"
        )
        return replace(trip, decision=GuardAction.STOP, why=why)
    return replace(trip, skipped=skipped, back_to=back_to)


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
