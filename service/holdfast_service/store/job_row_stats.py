"""Statistics of a job for lists (pace, productive time), updated in its row as metric rows arrive.

Each step that is stored adds its time. The goodput account (`job_model/goodput.py`) is exact, and
replaces the sums when an attempt has replaced another, after an absence, and at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Any

from holdfast_service.job_model.events.progress import AwayWhy, JobAwayEvent
from holdfast_service.job_model.goodput import TimeKind
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.program_levels import has_goodput
from holdfast_service.store import accounts
from holdfast_service.store.event_rows import close_incidents_of_lost_job
from holdfast_service.store.json_safe import number
from holdfast_service.store.models import JobRecord
from holdfast_service.store.transaction import JobTransaction
from holdfast_workers.protocol.messages import StepRow

_PACE_WEIGHT = 0.3
_WAITS_WINDOW_S = 60.0
"""The time that the shares of waiting are of, roughly: older steps count less and less."""
HIGH_DATA_WAIT = 0.1
"""From this share of their time on, the verdict says that the steps wait for data."""


async def update_stats(tx: JobTransaction, rows: Sequence[StepRow], known_attempt: int) -> None:
    """Update the job's statistics for the metric rows stored in this transaction. `known_attempt`:
    the newest attempt with rows before this transaction."""
    job = tx.job
    job.told_at = tx.now
    if rows:
        _update_pace(job, rows, known_attempt)
        _update_waits(job, rows, known_attempt)
        job.productive_s += sum(number(row.step_time_s) or 0.0 for row in rows)
    if any(row.attempt > known_attempt for row in rows) or tx.state.terminal or tx.was_away:
        await _take_account(tx)
    else:
        tx.update_goodput()


async def record_gone(tx: JobTransaction) -> None:
    """Nothing of the job is left on the cluster: it held no device since its last sign of life, and
    nobody knows its open incidents any more."""
    seen = await accounts.last_sign_of_life(tx.session, tx.job)
    if seen is None:
        return
    await close_incidents_of_lost_job(tx, min(seen, tx.now))
    if seen >= tx.now:
        return
    event = JobAwayEvent(away_s=tx.now - seen, why=AwayWhy.GONE)
    tx.emit(event)
    tx.record_absence(event, tx.now)
    await _take_account(tx)


async def _take_account(tx: JobTransaction) -> None:
    """Take the statistics from the goodput account: a rollback or an absence has changed what
    counts, or the job has ended."""
    job = tx.job
    account = await accounts.goodput(tx.session, job, tx.now)
    job.productive_s = account.by_kind_s[TimeKind.PRODUCTIVE]
    job.starting_s = account.by_kind_s[TimeKind.STARTING]
    job.held_s = account.held_s
    if job.held_since is not None:
        job.held_since = max(job.held_since, tx.now)
    if has_goodput(job.spec, job.cursor_attempt):
        job.goodput = account.goodput


def eta_s(job: Any) -> float | None:
    """Seconds until the last step at the present pace; None if the job makes no steps, or if the
    number of its steps is not known."""
    if job.step_s is None or not job.steps or State(job.state) not in _STEPPING_STATES:
        return None
    left: float = max(0, job.steps - (job.step or 0)) * job.step_s
    return left


_STEPPING_STATES = (State.RUNNING, State.RECOVERING, State.RESIZING)


def _update_pace(job: JobRecord, rows: Sequence[StepRow], known_attempt: int) -> None:
    newest = max(row.attempt for row in rows)
    latest = sorted((row for row in rows if row.attempt == newest), key=lambda row: row.step)
    first, last = latest[0], latest[-1]
    between = last.step - first.step
    pace = number((last.at - first.at) / between if between else last.step_time_s)
    if pace is None or pace < 0:
        return
    before = job.step_s if newest == known_attempt else None
    job.step_s = pace if before is None else before + _PACE_WEIGHT * (pace - before)


def _update_waits(job: JobRecord, rows: Sequence[StepRow], known_attempt: int) -> None:
    """Update the shares of the last steps of the newest attempt in which a rank waited for data,
    and in which it waited for a shard that was not in its node's cache. The first step of an
    attempt does not count: nothing has been read ahead for it."""
    newest = max(row.attempt for row in rows)
    latest = sorted((row for row in rows if row.attempt == newest), key=lambda row: row.step)
    if newest != known_attempt:
        job.data_wait = job.fetch_wait = 0.0
        latest = latest[1:]
    for row in latest:  # one by one: however they are reported, the result is the same
        seconds = number(row.step_time_s) or 0.0
        if seconds <= 0:
            continue
        weight = 1 - exp(-seconds / _WAITS_WINDOW_S)
        waited = min(1.0, (number(row.loader_wait_s) or 0.0) / seconds)
        fetched = min(1.0, (number(row.fetch_wait_s) or 0.0) / seconds)
        job.data_wait += weight * (waited - job.data_wait)
        job.fetch_wait += weight * (fetched - job.fetch_wait)
