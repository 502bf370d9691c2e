"""Converts the goodput account of a job to the spans of its timeline. Pure.

The spans on the cluster are those of the account with display names, so their sums match the
account. The meshes over time are those of the same account.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from holdfast_service.job_model.goodput import RECOVERY, TimeKind, TimeSpan
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.world_history import WorldPeriod
from holdfast_service.views.timeline import SpanKind, SpanView, WorldPeriodView

_KINDS = {
    TimeKind.PRODUCTIVE: SpanKind.PRODUCTIVE,
    TimeKind.BETWEEN_STEPS: SpanKind.PRODUCTIVE,
    TimeKind.REPLAYED: SpanKind.REPLAYING,
    TimeKind.NO_STEP: SpanKind.RUNNING,
    TimeKind.STARTING: SpanKind.STARTING,
    TimeKind.DETECTION: SpanKind.DETECTING,
    TimeKind.FINISHING: SpanKind.FINISHING,
}


def span_kind(kind: str) -> SpanKind:
    """The timeline's span kind for a time kind of the account."""
    if kind == f"{RECOVERY}restore":
        return SpanKind.RESTORING
    if kind.startswith(RECOVERY):
        return SpanKind.RECOVERING
    return _KINDS[TimeKind(kind)]


def timeline_spans(
    held: Sequence[TimeSpan],
    idle: Sequence[tuple[float, float, State | None]],
    attempts: Sequence[tuple[float, int]],
    since: float,
    until: float,
) -> list[SpanView]:
    """The spans between `since` and `until`, in order. `held`: time on the cluster; `idle`: time
    off it, with the state, or None where nothing shows the job; `attempts`: (start of forming,
    number) of each attempt, in order."""
    starts = [at for at, _ in attempts]
    found = [(span.since, span.until, span_kind(span.kind), span.incident) for span in held]
    off = {State.PAUSED: SpanKind.STOPPED, None: SpanKind.AWAY}
    found += [(start, end, off.get(state, SpanKind.WAITING), None) for start, end, state in idle]
    joined: list[SpanView] = []
    for began, ended, kind, incident in sorted(found, key=lambda span: (span[0], span[1])):
        start, end = max(began, since), min(ended, until)
        if end <= start:
            continue
        begun = bisect_right(starts, start)
        attempt = attempts[begun - 1][1] if begun else None
        span = SpanView(kind=kind, attempt=attempt, since=start, until=end, incident=incident)
        if joined and _continues(joined[-1], span):
            joined[-1] = joined[-1].model_copy(update={"until": end})
        else:
            joined.append(span)
    return joined


def world_views(
    periods: Sequence[WorldPeriod], ranks_per_node: int, since: float, until: float
) -> list[WorldPeriodView]:
    """The periods between `since` and `until`. All nodes but the last have `ranks_per_node`."""
    return [
        WorldPeriodView(
            since=max(period.since, since),
            until=min(period.until, until),
            mesh=dict(period.mesh),
            world_size=period.world_size,
            nodes=-(-period.world_size // ranks_per_node),
        )
        for period in periods
        if min(period.until, until) > max(period.since, since)
    ]


def _continues(last: SpanView, span: SpanView) -> bool:
    same = (last.kind, last.incident, last.attempt) == (span.kind, span.incident, span.attempt)
    return same and span.since - last.until < _MAX_GAP_S


_MAX_GAP_S = 1e-5
"""Maximum gap between two adjacent spans: several clocks stamp their ends."""
