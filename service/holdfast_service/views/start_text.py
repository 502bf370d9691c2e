"""The sentence of an attempt that has not started yet, for verdict, lists and pages. Pure, and
light to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast_service.job_model.lifecycle import START_WAIT, SUPERVISOR_START

if TYPE_CHECKING:
    from holdfast_service.views.jobs import WaitingView


def is_start(waiting: WaitingView | None) -> bool:
    """Whether the job waits for its present attempt to start."""
    return waiting is not None and waiting.resource == START_WAIT


def start_text(attempt: int, waiting: WaitingView, now: float) -> str:
    """`Attempt 3 starts: waiting for rank 1 to join, 12 s of 120.`"""
    # Before the supervisor has started, the newest attempt is one that has ended.
    is_new = attempt == 0 or waiting.reason == SUPERVISOR_START
    subject = "The job" if is_new else f"Attempt {attempt}"
    waited_s = max(0.0, now - waiting.since)
    limit = "so far" if waiting.until is None else f"of {waiting.until - waiting.since:.0f}"
    return f"{subject} starts: waiting for {waiting.reason}, {waited_s:.0f} s {limit}."
