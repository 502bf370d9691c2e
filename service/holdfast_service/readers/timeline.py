"""A job's life as a ribbon: from the account of its time to the spans that are shown. Pure.

The spans on the cluster are the account's own, in words for eyes: they sum to what it tells.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from holdfast_service.job_model.goodput import RECOVERY, Kind, Span
from holdfast_service.job_model.lifecycle import State
from holdfast_service.views.timeline import SpanKind, SpanView

_KINDS = {
    Kind.PRODUCTIVE: SpanKind.PRODUCTIVE,
    Kind.BETWEEN_STEPS: SpanKind.PRODUCTIVE,
    Kind.REPLAYED: SpanKind.REPLAYING,
    Kind.STARTING: SpanKind.STARTING,
    Kind.DETECTION: SpanKind.DETECTING,
    Kind.FINISHING: SpanKind.FINISHING,
}


def shown(kind: str) -> SpanKind:
    """How time of this kind of the account is shown."""
    if kind == f"{RECOVERY}restore":
        return SpanKind.RESTORING
    if kind.startswith(RECOVERY):
        return SpanKind.RECOVERING
    return _KINDS[Kind(kind)]


def ribbon(
    held: Sequence[Span],
    idle: Sequence[tuple[float, float, State]],
    attempts: Sequence[tuple[float, int]],
    since: float,
    until: float,
) -> list[SpanView]:
    """The spans between `since` and `until`, in order. `held`: time on the cluster; `idle`: off it,
    in which state; `attempts`: when each began to be formed, with its number, in order."""
    begun = [at for at, _ in attempts]
    found = [(one.since, one.until, shown(one.kind), one.incident) for one in held]
    found += [
        (start, end, SpanKind.STOPPED if state is State.PAUSED else SpanKind.WAITING, None)
        for start, end, state in idle
    ]
    joined: list[SpanView] = []
    for began, ended, kind, incident in sorted(found, key=lambda one: (one[0], one[1])):
        start, end = max(began, since), min(ended, until)
        if end <= start:
            continue
        place = bisect_right(begun, start)
        attempt = attempts[place - 1][1] if place else None
        span = SpanView(kind=kind, attempt=attempt, since=start, until=end, incident=incident)
        if joined and _continues(joined[-1], span):
            joined[-1] = joined[-1].model_copy(update={"until": end})
        else:
            joined.append(span)
    return joined


def _continues(last: SpanView, span: SpanView) -> bool:
    alike = (last.kind, last.incident, last.attempt) == (span.kind, span.incident, span.attempt)
    return alike and span.since - last.until < _TOGETHER_S


_TOGETHER_S = 1e-5
"""What lies between two spans that touch, as several clocks tell it."""
