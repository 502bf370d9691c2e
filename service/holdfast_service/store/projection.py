"""A supervisor's report becomes rows: its events, the tables they speak of, and its cursors.

All of a report is stored in one transaction with the cursors that say so, so a crash between two
reports loses nothing and stores nothing twice. An event that cannot be read is kept as it came,
and said to be unreadable: it must not hold up the job.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.exc import DBAPIError, StatementError

from holdfast_service.job_model.lifecycle import State, observed
from holdfast_service.job_model.supervisor_protocol import (
    Cursors,
    EventKind,
    Phase,
    SupervisorEvent,
    SupervisorReport,
)
from holdfast_service.policy.quarantine import QuarantineRules
from holdfast_service.store import job_row_stats, nodes, rank_series, series
from holdfast_service.store.engine import is_refused
from holdfast_service.store.event_rows import move, project
from holdfast_service.store.json_safe import number, text
from holdfast_service.store.models import Job
from holdfast_service.store.transaction import JobTransaction
from holdfast_workers.protocol.messages import StepRow

_RANKS_AGE_S = 5.0
MOST_OWN_METRICS = 256
"""Of a job; its function may tell fewer in each attempt."""
_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, StatementError)
_ENDED_BY_AN_ANSWER = ("supervisor", "cluster", "reconciler")  # resources a job waits for


@dataclass(frozen=True)
class Absorbed:
    """What storing a report came to."""

    rows: int  # rows and digests that were not known before
    end_held: bool  # the report says ENDED, and that was left for the next one


def cursors_of(job: Job) -> Cursors:
    return Cursors(
        event=job.cursor_event,
        row=(job.cursor_attempt, job.cursor_step),
        logs=dict(job.cursor_logs),
    )


def brings_news(job: Job, report: SupervisorReport, now: float) -> bool:
    """Whether storing the report would change anything; without that no transaction is needed.
    That the ranks stand where they stood is told again after a while."""
    return bool(
        report.events
        or report.rows
        or report.digests
        or report.logs
        or (report.epoch, report.step, report.attempt) != (job.epoch, job.step, job.attempt)
        or (job.waiting and job.waiting["resource"] in _ENDED_BY_AN_ANSWER)
        or observed(State(job.state), report.phase)
        or report.phase is Phase.ENDED
        or (report.beats and now - (job.told_at or 0.0) > _RANKS_AGE_S)
    )


async def absorb(
    tx: JobTransaction, report: SupervisorReport, rules: QuarantineRules, *, hold_end: bool
) -> Absorbed:
    """Store the report. The end comes last: see `hold_end`.

    A job that is seen to have ended must have all its rows: whoever waits for the end reads them
    next. So ENDED is left for the next report as long as one brings rows that are new, or, with
    `hold_end`, log lines.
    """
    job = tx.job
    tx.waits_no_more(*_ENDED_BY_AN_ANSWER)
    job.epoch = max(job.epoch, report.epoch)
    await _take_back(tx, report)
    known_attempt = job.cursor_attempt
    with tx.session.no_autoflush:  # each looks at a table of its own, once
        fresh = await _rows(tx, report)
        rows = len(fresh) + await _digests(tx, report)
        lines = await series.store_logs(tx.session, job, report.logs)
        await rank_series.store_rows(tx.session, job.id, fresh)
    end_held = False
    events = [event for event in report.events if event.seq > job.cursor_event]
    await nodes.lock_named(tx, events)
    if rows or (hold_end and lines):
        until_end = list(itertools.takewhile(lambda one: one.kind is not EventKind.ENDED, events))
        end_held = len(until_end) < len(events)
        events = until_end
    await _store_events(tx, events, rules)
    if not tx.state.terminal:
        job.step = report.step or job.step  # a supervisor that has just begun knows of none
        job.attempt = max(job.attempt, report.attempt)
        move(tx, report.phase)
    await job_row_stats.note_rows(tx, fresh, known_attempt)
    if report.beats:
        took = rank_series.means(fresh)
        with tx.session.no_autoflush:
            await rank_series.store_states(
                tx.session, job.id, tx.now, report.attempt, report.beats, took
            )
    return Absorbed(rows=rows, end_held=end_held)


async def _take_back(tx: JobTransaction, report: SupervisorReport) -> None:
    """Before the report's digests are compared with those of steps that will be computed anew."""
    for event in report.events:
        back_to = event.data.get("back_to")
        new = event.kind is EventKind.GUARD_TRIPPED and event.seq > tx.job.cursor_event
        if new and isinstance(back_to, int):
            await series.forget_digests(tx.session, tx.job.id, back_to)


async def _rows(tx: JobTransaction, report: SupervisorReport) -> list[StepRow]:
    """Those that are new; they are stored."""
    job = tx.job
    known = (job.cursor_attempt, job.cursor_step)
    rows = [row for row in report.rows if (row.attempt, row.step) > known]
    if not rows:
        return []
    await series.store_rows(tx.session, job.id, rows)
    _note_names(job, rows)
    newest: StepRow = max(rows, key=lambda row: (row.attempt, row.step))
    job.cursor_attempt, job.cursor_step = newest.attempt, newest.step
    job.loss = number(newest.loss)
    waits = [number(row.checkpoint_wait_s) for row in rows]
    tx.checkpoints += [("memory", "wait", waited) for waited in waits if waited is not None]
    seconds = sum(row.step_time_s for row in rows)
    job.tokens_per_second = (
        number(sum(row.tokens for row in rows) / seconds) if seconds > 0 else None
    )
    return rows


def _note_names(job: Job, rows: list[StepRow]) -> None:
    """Of the numbers that the user's function tells."""
    names = {text(name) for row in rows for name in row.own}
    if not names <= set(job.own_metrics):
        job.own_metrics = sorted({*job.own_metrics, *names})[:MOST_OWN_METRICS]


async def _digests(tx: JobTransaction, report: SupervisorReport) -> int:
    digests = {row.step: row.digest for row in report.rows if row.digest}
    digests.update(report.digests)
    if not digests:
        return 0
    fresh, mismatches = await series.store_digests(tx.session, tx.job.id, digests)
    for found in mismatches:
        tx.emit(
            "digest.mismatch",
            {
                "step": found.step,
                "stored": found.stored,
                "seen": found.seen,
                "attempt": report.attempt,
            },
        )
    return fresh


async def _store_events(
    tx: JobTransaction, events: Sequence[SupervisorEvent], rules: QuarantineRules
) -> None:
    """Together, as they can nearly always be read; otherwise each by itself."""
    if len(events) > 1:
        told = tx.told()
        try:
            async with tx.session.begin_nested():
                for event in events:
                    _note_event(tx, event)
                    await project(tx, event, rules)
            return
        except _UNREADABLE as error:
            _raise_if_of_the_database(error)
            await tx.session.refresh(tx.job)
            tx.tell_again_from(told)
    for event in events:
        await _store_event(tx, event, rules)


async def _store_event(tx: JobTransaction, event: SupervisorEvent, rules: QuarantineRules) -> None:
    _note_event(tx, event)
    told = tx.told()
    try:
        async with tx.session.begin_nested():
            await project(tx, event, rules)
    except _UNREADABLE as error:
        _raise_if_of_the_database(error)
        await tx.session.refresh(tx.job)
        tx.tell_again_from(told)
        tx.emit("event.unreadable", {"kind": event.kind, "error": repr(error)}, at=event.at)


def _note_event(tx: JobTransaction, event: SupervisorEvent) -> None:
    job = tx.job
    if event.seq != job.cursor_event + 1:
        tx.emit("events.lost", {"after": job.cursor_event, "before": event.seq})
    job.cursor_event = event.seq
    tx.emit(event.kind, event.data, at=event.at)


def _raise_if_of_the_database(error: Exception) -> None:
    """Trouble of the database's, not of the event's: all of it is tried again."""
    if isinstance(error, DBAPIError) and not is_refused(error):
        raise error
