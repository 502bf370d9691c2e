"""The timeline joins the spans of a job that continue each other."""

from __future__ import annotations

from holdfast_service.job_model.goodput import TimeKind, TimeSpan
from holdfast_service.readers.timeline import timeline_spans


def test_spans_of_two_attempts_are_not_joined() -> None:
    steps = ((0.0, 5.0), (5.0, 9.0))
    held = [TimeSpan(TimeKind.PRODUCTIVE, since, until, None) for since, until in steps]
    spans = timeline_spans(held, [], [(0.0, 1), (5.0, 2)], 0.0, 9.0)
    assert [(span.attempt, span.since, span.until) for span in spans] == [(1, 0, 5), (2, 5, 9)]
