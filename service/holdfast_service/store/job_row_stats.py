"""Statistics of a job for lists (pace, productive time), updated in its row as metric rows arrive.

They match the goodput account (`job_model/goodput.py`) up to the skew between two clocks; the
account itself is exact. Jobs older than these columns have no statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select

from holdfast_service.job_model.goodput import CommittedStep, History
from holdfast_service.job_model.lifecycle import State
from holdfast_service.store import accounts, series
from holdfast_service.store.json_safe import number
from holdfast_service.store.models import JobRecord, MetricChunk
from holdfast_service.store.transaction import JobTransaction
from holdfast_workers.protocol.messages import StepRow

_PACE_WEIGHT = 0.3


async def update_stats(tx: JobTransaction, rows: Sequence[StepRow], known_attempt: int) -> None:
    """Update the job's statistics for the metric rows stored in this transaction. `known_attempt`:
    the newest attempt with rows before this transaction."""
    job = tx.job
    job.told_at = tx.now
    if rows:
        _update_pace(job, rows, known_attempt)
        job.productive_s += sum(number(row.step_time_s) or 0.0 for row in rows)
        for attempt in sorted({row.attempt for row in rows if row.attempt > known_attempt}):
            job.productive_s = max(0.0, job.productive_s - await _rolled_back_s(tx, attempt))
    tx.update_goodput()


def eta_s(job: Any) -> float | None:
    """Seconds until the last step at the present pace; None if the job makes no steps, or if the
    number of its steps is not known."""
    if job.step_s is None or not job.steps or State(job.state) not in _STEPPING_STATES:
        return None
    left: float = max(0, job.steps - job.step) * job.step_s
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


async def _rolled_back_s(tx: JobTransaction, attempt: int) -> float:
    """Productive seconds discarded because `attempt` restarted from an earlier step."""
    job_id = tx.job.id
    found = await accounts.runs(tx.session, job_id, {attempt})
    this = next((run for run in found if run.attempt == attempt), None)
    if this is None:
        return 0.0
    before = History([run for run in found if run.attempt < attempt])
    chunks = await tx.session.scalars(
        select(MetricChunk).where(
            MetricChunk.job_id == job_id,
            MetricChunk.window >= series.window(this.restored_step + 1),
            MetricChunk.attempt < attempt,
        )
    )
    lost: list[CommittedStep] = [
        row
        for chunk in chunks
        for row in accounts.rows_of(chunk)
        if row.step > this.restored_step and before.keeps(row.attempt, row.step)
    ]
    return sum(row.step_time_s for row in lost)
