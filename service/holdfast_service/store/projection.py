"""Stores supervisor reports: their events, the tables that the events change, and the cursors.

A report is stored in one transaction together with the cursors that mark it as stored, so a crash
between two reports loses nothing and stores nothing twice. It goes through in one direction: rows
and log lines, the locks of all nodes that its events name, the events, each decoded once, the
digests, the end, and at last the job's state and statistics. An unreadable event is stored as it
came and followed by an `event.unreadable` event: it must not block the job.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.exc import DBAPIError, StatementError

from holdfast_service.job_model import program_levels
from holdfast_service.job_model.events.codec import AnyEvent, UnknownEvent, read_event
from holdfast_service.job_model.events.kinds import EventKind
from holdfast_service.job_model.events.progress import (
    EndedEvent,
    EventsLostEvent,
    EventUnreadableEvent,
    RowsLostEvent,
)
from holdfast_service.job_model.lifecycle import (
    DATA_WAIT,
    START_WAIT,
    Phase,
    State,
    state_after_report,
)
from holdfast_service.job_model.supervisor_protocol import (
    Cursors,
    SupervisorEvent,
    SupervisorReport,
    is_next_event,
    number_in_epoch,
)
from holdfast_service.policy.quarantine import QuarantineRules
from holdfast_service.store import job_row_stats, nodes, rank_series, series
from holdfast_service.store.engine import is_refused
from holdfast_service.store.event_rows import apply_event, raise_last_step
from holdfast_service.store.json_safe import number, text
from holdfast_service.store.models import JobRecord
from holdfast_service.store.transaction import JobTransaction
from holdfast_service.wording import plural
from holdfast_workers.protocol.codec import UnreadableDocument
from holdfast_workers.protocol.messages import DATA_PHASE, StepRow

_REPORT_PERIOD_S = 5.0
_LATE_S = 10.0
"""A rank that has waited for data for longer is named: the row of its step comes only later."""
MAX_OWN_METRICS = 256
"""Maximum number of metric names kept per job; a function may report fewer in each attempt."""
_WAITS_ENDED_BY_A_REPORT = ("supervisor", "cluster", "reconciler")  # waits that any report ends


@dataclass(frozen=True)
class UnreadableEvent(UnknownEvent):
    """An event that this version cannot read: it is stored as it came."""

    error: UnreadableDocument


@dataclass(frozen=True)
class StoredReport:
    """The result of storing a report."""

    rows: int  # number of new rows and digests
    lines: int  # number of new log lines
    end_held: bool  # the report's ENDED event was left for the next report


def cursors_of(job: JobRecord) -> Cursors:
    return Cursors(
        event=job.cursor_event,
        row=(job.cursor_attempt, job.cursor_step),
        logs=dict(job.cursor_logs),
        incident=job.incidents,
    )


def has_changes(job: JobRecord, report: SupervisorReport, now: float) -> bool:
    """Whether storing the report would change anything; if not, the caller needs no transaction.
    After `_REPORT_PERIOD_S` the fact that the supervisor lives does."""
    return bool(
        report.events
        or report.rows
        or report.digests
        or report.logs
        or (report.epoch, report.attempt) != (job.epoch, job.attempt)
        or report.step not in (None, job.step)
        or (report.build or None) != job.build
        or (job.waiting and job.waiting["resource"] in _WAITS_ENDED_BY_A_REPORT)
        or _wait(job, report, now) != job.waiting
        or state_after_report(State(job.state), report.phase)
        or report.phase is Phase.ENDED
        or now - (job.told_at or 0.0) > _REPORT_PERIOD_S
    )


async def store_report(
    tx: JobTransaction, report: SupervisorReport, rules: QuarantineRules, *, hold_end: bool
) -> StoredReport:
    """Store the report. The ENDED event comes last; see `hold_end`.

    A job that is seen as ended must have all its rows, because a client that waits for the end
    reads them next. ENDED is therefore left for the next report while reports bring new rows or,
    with `hold_end`, new log lines.
    """
    job = tx.job
    tx.clear_wait(*_WAITS_ENDED_BY_A_REPORT)
    job.epoch = max(job.epoch, report.epoch)
    job.build = text(report.build)[:64] or None
    known_attempt = job.cursor_attempt
    with tx.session.no_autoflush:  # each call reads its own table, once
        fresh = await _store_rows(tx, report)
        lines = await series.store_logs(tx.session, job, report.logs)
        await rank_series.store_rows(tx.session, job.id, fresh)
    received = [(event, _read(event)) for event in report.events if event.seq > job.cursor_event]
    await nodes.lock_nodes_of(tx, [content for _, content in received])
    before_end = list(itertools.takewhile(lambda given: given[0].kind != EventKind.ENDED, received))
    end = received[len(before_end) :]
    await _store_events(tx, before_end, rules)
    rows = len(fresh) + await _store_digests(tx, report)
    end_held = bool(end) and (rows > 0 or (hold_end and lines > 0))
    if not end_held:
        await _store_events(tx, end, rules)
    if tx.state.terminal:
        if fresh and job.cursor_attempt == job.attempt:
            job.step = max(job.step or 0, job.cursor_step)
    else:
        job.step = _newest_step(job, report)
        job.attempt = max(job.attempt, report.attempt)
        tx.enter(report.phase)
        job.waiting = _wait(job, report, tx.now)
    if job.step is not None and job.step < job.cursor_step:
        job.loss = None  # it is of a step that was to be computed again
    await job_row_stats.update_stats(tx, fresh, known_attempt)
    if report.beats:
        with tx.session.no_autoflush:
            await rank_series.store_states(
                tx.session, job.id, tx.now, report.attempt, report.beats, fresh
            )
    return StoredReport(rows=rows, lines=lines, end_held=end_held)


def _newest_step(job: JobRecord, report: SupervisorReport) -> int | None:
    """The newest step of the present attempt: its rows may be ahead of the report's step."""
    step = job.step if report.step is None else report.step
    has_rows = job.cursor_attempt == report.attempt > 0
    return max(step or 0, job.cursor_step) if has_rows else step


def _wait(job: JobRecord, report: SupervisorReport, now: float) -> dict[str, Any] | None:
    """What the job waits for, by a report: for its attempt to start, for data, or for what it had
    stored."""
    if (start := report.start) is not None:
        times = {"since": start.since, "until": start.until}
        return {"resource": START_WAIT, "reason": text(start.what), **times}
    before = job.waiting
    late = [beat for beat in report.beats if beat.phase == DATA_PHASE and beat.age_s > _LATE_S]
    if late and report.phase is Phase.RUNNING:
        ranks = sorted(beat.rank for beat in late)
        reason = f"rank {ranks[0]} waits for data"
        if more := len(ranks) - 1:
            reason = f"rank {ranks[0]} and {plural(more, 'other rank')} wait for data"
        if before is not None and (before["resource"], before["reason"]) == (DATA_WAIT, reason):
            return before
        since = now - max(beat.age_s for beat in late)
        return {"resource": DATA_WAIT, "reason": reason, "since": since, "until": None}
    is_over = before is not None and before["resource"] in (START_WAIT, DATA_WAIT)
    return None if is_over else before


async def _store_rows(tx: JobTransaction, report: SupervisorReport) -> list[StepRow]:
    """Store the new rows of the report, and return them."""
    job = tx.job
    known = (job.cursor_attempt, job.cursor_step)
    rows = [row for row in report.rows if (row.attempt, row.step) > known]
    if not rows:
        return []
    await series.store_rows(tx.session, job.id, rows)
    _add_metric_names(job, rows)
    for attempt in sorted({row.attempt for row in rows if row.attempt < report.attempt}):
        newest_step = max(row.step for row in rows if row.attempt == attempt)
        await raise_last_step(tx, attempt, newest_step)
    is_program = program_levels.brings(job.spec).is_program
    for lost in () if is_program else lost_rows(known, rows):
        tx.emit(lost)
    newest: StepRow = max(rows, key=lambda row: (row.attempt, row.step))
    job.cursor_attempt, job.cursor_step = newest.attempt, newest.step
    known_losses = [
        loss
        for row in rows
        if row.attempt == newest.attempt and (loss := number(row.loss)) is not None
    ]
    if not is_program:
        job.loss = number(newest.loss)
    elif known_losses:  # a program need not report its loss in every step
        job.loss = known_losses[-1]
    elif newest.attempt != known[0]:
        job.loss = None
    for row in rows:
        if (waited := number(row.checkpoint_wait_s)) is not None:
            tx.measured("memory", "wait", waited)
    seconds, tokens = sum(row.step_time_s for row in rows), sum(row.tokens for row in rows)
    job.tokens_per_second = number(tokens / seconds) if seconds > 0 and tokens else None
    return rows


def lost_rows(last: tuple[int, int], rows: Sequence[StepRow]) -> Iterator[RowsLostEvent]:
    """The gaps in `rows`, which are in order and follow the row `last` (attempt, step).

    Each step of an attempt has a row, except of a user's program, which may report any. An attempt
    starts no later than after the last step of the former ones. Nothing is known of the rows before
    a job's first, where `last` is (0, 0)."""
    for row in rows:
        if last != (0, 0) and row.step > last[1] + 1:
            yield RowsLostEvent(attempt=row.attempt, after=last[1], before=row.step)
        last = (row.attempt, row.step)


def _add_metric_names(job: JobRecord, rows: list[StepRow]) -> None:
    """Add the names of metrics reported by the user's function."""
    names = {text(name) for row in rows for name in row.own}
    if not names <= set(job.own_metrics):
        job.own_metrics = sorted({*job.own_metrics, *names})[:MAX_OWN_METRICS]


async def _store_digests(tx: JobTransaction, report: SupervisorReport) -> int:
    if not report.digests:
        return 0
    fresh, mismatches = await series.store_digests(
        tx.session, tx.job.id, report.attempt, report.digests
    )
    if (tx.job.spec.get("train") or {}).get("deterministic") == "fast":
        return fresh  # a step that is computed again may have other bits
    for mismatch in mismatches:
        tx.emit(mismatch)
    return fresh


def _read(event: SupervisorEvent) -> AnyEvent:
    try:
        return read_event(event)
    except UnreadableDocument as error:
        return UnreadableEvent(event.kind, event.data, error)


async def _store_events(
    tx: JobTransaction,
    received: Sequence[tuple[SupervisorEvent, AnyEvent]],
    rules: QuarantineRules,
) -> None:
    """Store the events in one savepoint or, if that is refused, each in its own. An unreadable end
    still ends the job: its supervisor is gone."""
    if not received:
        return
    mark = len(tx.effects)
    try:
        async with tx.session.begin_nested():
            for event, content in received:
                if isinstance(content, UnreadableEvent):
                    raise content.error
                _record_event(tx, event, content)
                await apply_event(tx, event, content, rules)
        return
    except (ValueError, OverflowError, StatementError) as error:
        if isinstance(error, DBAPIError) and not is_refused(error):
            raise  # the database failed, not an event: the whole report is retried
        refusal = error
    await tx.session.refresh(tx.job)
    del tx.effects[mark:]
    if len(received) > 1:
        for single in received:
            await _store_events(tx, [single], rules)
        return
    event, content = received[0]
    _record_event(tx, event, content)
    tx.emit(EventUnreadableEvent(of_kind=event.kind, error=repr(refusal)), at=event.at)
    if event.kind == EventKind.ENDED:
        end = EndedEvent(message=f"its end could not be read: {refusal}")
        await apply_event(tx, event, end, rules)


def _record_event(tx: JobTransaction, event: SupervisorEvent, content: AnyEvent) -> None:
    job = tx.job
    if not is_next_event(event.seq, job.cursor_event):
        after, before = number_in_epoch(job.cursor_event), number_in_epoch(event.seq)
        tx.emit(EventsLostEvent(after=after, before=before))
    job.cursor_event = event.seq
    tx.emit(content, at=event.at, data=event.data)
