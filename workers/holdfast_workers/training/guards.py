"""The guards: whether a step is fit to be applied, and what is done if it is not. Pure.

They judge what all ranks have agreed on (loss, gradient norm, whether anything was not finite) by
what the state itself remembers of the steps before. So all ranks judge alike in the same step,
without a word more than the agreement, and a run that was restored judges as one that was not.

A spike is a value far above the median of the last steps, in units of their median absolute
deviation (Iglewicz and Hoaglin 1993, "How to Detect and Handle Outliers", the modified z-score).
Both withstand outliers among the values they are taken from. Gradient norms vary by factors, so
they are compared by their logarithms. A fall is no spike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import median
from typing import Any

from holdfast_workers.spec import GuardsSpec, SpikeGuardSpec
from holdfast_workers.training.skipped_windows import Ledger

MAX_RANGES = 256
"""So many separate ranges of windows a state has room for."""
ENOUGH_VALUES = 16
"""With fewer steps to compare with, nothing is called a spike."""
_DEVIATION = 1.4826  # of a normal distribution's median absolute deviation
_LEAST_SPREAD = 0.01
"""Of the median: values that hardly differ make no spike of a small difference."""
_LEAST_LOG_SPREAD = 0.1
_LEAST_NORM = 1e-30


class Kind(StrEnum):
    NONFINITE = "nonfinite"
    LOSS_SPIKE = "loss_spike"
    GRAD_NORM_SPIKE = "grad_norm_spike"


class Decision(StrEnum):
    REPORT = "report"  # the step is applied all the same
    RETRY = "retry"  # it was finite when it was computed again: it is computed from the same data
    SKIP = "skip"  # it is computed again from the next window, on all ranks at once
    ROLLBACK = "rollback"  # training goes on from an older step, without the windows since
    STOP = "stop"  # the job ends


@dataclass(frozen=True)
class Trip:
    """A guard has tripped: what was seen, against which bounds, and what is decided."""

    kind: Kind
    step: int
    value: float
    """The loss of a loss spike, else the gradient norm."""
    loss: float
    grad_norm: float
    window: int
    decision: Decision
    why: str
    middle: float | None = None
    limit: float | None = None
    """Of a spike: the median of the steps before, and what the value may be."""
    skipped: tuple[int, int] | None = None
    """The windows, half-open, that are entered in the ledger."""
    back_to: int | None = None
    """Of a rollback: no step after this one is kept."""


@dataclass(frozen=True)
class Place:
    """Where a rank first met what is not finite."""

    rank: int
    micro_batch: int
    order: int
    """How many modules had been looked at in the micro-batch: the same count on every rank."""
    layer: str
    what: str
    """ "output", "gradient", "loss", or "state": the parameters or moments themselves."""
    again: bool = True
    """Whether it was met when the step was computed once more."""


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
) -> Trip | None:
    """The trip of the guard that decides most, if any trips. `losses` and `grad_norms` are those
    of the steps applied before, oldest first."""
    if nonfinite:
        policy = Decision(spec.nonfinite.policy)
        what = f"loss {loss:g}, gradient norm {grad_norm:g}"
        trip = Trip(
            Kind.NONFINITE, step, grad_norm, loss, grad_norm, ledger.window(step), policy, what
        )
        return _bounded(trip, spec, ledger)
    if step <= spec.warmup_steps:
        return None
    found = []
    for kind, guard, value, before in (
        (Kind.LOSS_SPIKE, spec.loss_spike, loss, losses),
        (Kind.GRAD_NORM_SPIKE, spec.grad_norm_spike, grad_norm, grad_norms),
    ):
        off = guard.policy == "off"
        bounds = None if off else _exceeded(kind, guard, value, before, spec.window)
        if bounds is not None:
            middle, limit = bounds
            name = "loss" if kind is Kind.LOSS_SPIKE else "gradient norm"
            trip = Trip(
                kind=kind,
                step=step,
                value=value,
                loss=loss,
                grad_norm=grad_norm,
                window=ledger.window(step),
                decision=Decision(guard.policy),
                why=f"{name} {value:.4g}, beyond {limit:.4g} (median {middle:.4g})",
                middle=middle,
                limit=limit,
            )
            found.append(_bounded(trip, spec, ledger))
    order = list(Decision)
    return max(found, key=lambda one: order.index(one.decision), default=None)


def origin(places: Sequence[Place]) -> tuple[Place | None, tuple[int, ...]]:
    """Where it began: the place met first, and all ranks that met it there. What tensor-parallel
    peers and later layers see is what the first one spread. Of a gradient that was finite the
    second time the rank is not known: after the reduction, all have it."""
    places = [one for one in places if one.again] or places
    places = [one for one in places if one.again or one.what != "gradient"] or places
    if not places:
        return None, ()
    first = min(places, key=lambda one: (one.micro_batch, one.order, one.rank))
    if first.what == "gradient" and not first.again:
        return first, ()
    alike = (first.micro_batch, first.order)
    ranks = {one.rank for one in places if (one.micro_batch, one.order) == alike}
    return first, tuple(sorted(ranks))


def retried(trip: Trip) -> Trip:
    """What is done the first time with what did not come back: neither data nor state is bad."""
    why = f"{trip.why}; computed again from the same data it was finite: look at the machine"
    fields = {"decision": Decision.RETRY, "why": why, "skipped": None, "back_to": None}
    return Trip(**{**trip.__dict__, **fields})


def told(trip: Trip, begun: Place | None, ranks: tuple[int, ...]) -> dict[str, Any]:
    """A trip as it is reported; JSON, so what is not finite is null."""
    numbers = ("value", "loss", "grad_norm")
    fields = {name: value for name, value in asdict(trip).items() if name not in numbers}
    return {
        **fields,
        "kind": trip.kind.value,
        "decision": trip.decision.value,
        **{name: _finite_or_none(getattr(trip, name)) for name in numbers},
        "ranks": list(ranks),
        "layer": begun.layer or None if begun else None,
        "what": begun.what if begun else None,
        "micro_batch": begun.micro_batch if begun and begun.micro_batch >= 0 else None,
    }


def in_words(report: dict[str, Any]) -> str:
    """One line of what `told` gives: what, where, which data."""
    where = ""
    if report["what"]:
        ranks = ", ".join(str(rank) for rank in report["ranks"])
        where = f"; began on rank {ranks}" if ranks else "; began on a rank that is not known"
        where += f" in the {report['what']}"
        where += f" of {report['layer']}" if report["layer"] else ""
        if report["micro_batch"] is not None:
            where += f", micro-batch {report['micro_batch']}"
    return f"{report['kind']} at step {report['step']} (window {report['window']}): " + (
        f"{report['why']}{where}"
    )


def _exceeded(
    kind: Kind, guard: SpikeGuardSpec, value: float, before: Sequence[float], window: int
) -> tuple[float, float] | None:
    """Median and limit, if `value` is beyond it. What is only reported is told once, as it
    begins: not while the step before was beyond its own limit too."""
    bounds_of = _norm_bounds if kind is Kind.GRAD_NORM_SPIKE else _bounds
    bounds = bounds_of(guard.z, before[-window:])
    if bounds is None or value <= bounds[1]:
        return None
    if guard.policy == "report":
        earlier = bounds_of(guard.z, before[-window - 1 : -1])
        if earlier is not None and before[-1] > earlier[1]:
            return None
    return bounds


def _bounds(
    z: float, values: Sequence[float], least_spread: float | None = None
) -> tuple[float, float] | None:
    """Median, and how far above it is still no spike."""
    if len(values) < ENOUGH_VALUES:
        return None
    middle = median(values)
    spread = _DEVIATION * median(abs(one - middle) for one in values)
    least = _LEAST_SPREAD * abs(middle) if least_spread is None else least_spread
    return middle, middle + z * max(spread, least)


def _norm_bounds(z: float, values: Sequence[float]) -> tuple[float, float] | None:
    logarithms = [math.log(max(one, _LEAST_NORM)) for one in values]
    bounds = _bounds(z, logarithms, _LEAST_LOG_SPREAD)
    return None if bounds is None else (math.exp(bounds[0]), math.exp(min(bounds[1], 700.0)))


def _bounded(trip: Trip, spec: GuardsSpec, ledger: Ledger) -> Trip:
    """The trip with the windows it enters in the ledger, or, where that is too much, a stop."""
    if trip.decision in (Decision.REPORT, Decision.STOP):
        return trip
    back_to, first = None, trip.window
    if trip.decision is Decision.ROLLBACK:
        back_to = max(0, trip.step - spec.rollback_steps)
        first = ledger.window(back_to + 1)
    skipped = (first, trip.window + 1)
    grown = ledger | Ledger((skipped,))
    recent = grown.count(trip.window + 1 - spec.skip_span, trip.window + 1)
    if recent > spec.max_skips or len(grown.ranges) > MAX_RANGES:
        why = (
            f"{trip.why}; to go on would make {recent} skipped windows of the last "
            f"{spec.skip_span}, guards.max_skips allows {spec.max_skips}"
            if recent > spec.max_skips
            else f"{trip.why}; the ledger has no room for more than {MAX_RANGES} ranges"
        )
        return _stopped(trip, why)
    return Trip(**{**trip.__dict__, "skipped": skipped, "back_to": back_to})


def _stopped(trip: Trip, why: str) -> Trip:
    return Trip(**{**trip.__dict__, "decision": Decision.STOP, "why": why})


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
