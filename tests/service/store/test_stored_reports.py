"""However a supervisor's events are split into reports, and whichever of them cannot be read, the
same rows are stored. The stories have recorded events of all kinds, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, select
from tests.support.service.event_examples import recorded
from tests.support.service.fake_cluster import FakeSupervisor, line
from tests.support.web.seed_events import started_job

from holdfast_service.job_model.events.kinds import EventKind
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.supervisor_protocol import (
    Cursors,
    JobPlan,
    Phase,
    SupervisorEvent,
    SupervisorReport,
)
from holdfast_service.policy.quarantine import QuarantineRules
from holdfast_service.store.engine import Store
from holdfast_service.store.models import Base, NodeRow, NodeTrouble
from holdfast_service.store.projection import store_report
from holdfast_service.store.transaction import job_transaction

OF_ONE_REPORT = {"step_s", "tokens_per_second", "productive_s", "goodput"}
"""Columns that depend on which rows come in one report."""
OF_A_JOB = {"id", "job_id", "changed"}
UNREADABLE = EventKind.EVENT_UNREADABLE.value
RENAMED = "attempt.renamed"  # a kind that may have any data

Move = tuple[str, Any]
Rows = dict[str, list[dict[str, str]]]
NOT_MOVES = (EventKind.PHASE, EventKind.ENDED, EventKind.EVENT_UNREADABLE)
BROKEN = st.sampled_from([{"attempt": "one"}, {"attempt": 2**70}, {"attempt": 1, "gone": 5}])
MOVES = st.one_of(
    st.tuples(st.just("form"), st.integers(0, 6)),
    st.tuples(st.just("run"), st.integers(1, 4)),
    st.tuples(st.just("enter"), st.sampled_from((Phase.RUNNING, Phase.RECOVERING))),
    st.tuples(st.just("other"), st.sampled_from([e for e in recorded() if e[0] not in NOT_MOVES])),
    st.tuples(st.just("broken"), BROKEN),
)
STORIES = st.lists(MOVES, max_size=25)
few = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
pytestmark = [pytest.mark.seconds]


def report_of(
    moves: Sequence[Move], ended: bool, broken: str = "attempt.ended"
) -> SupervisorReport:
    """All that a supervisor has to report. `broken`: the kind of the events with broken data."""
    supervisor = FakeSupervisor(JobPlan("job", JobSpec(name="x")))
    for name, value in moves:
        if name == "form":
            supervisor.step = max(0, supervisor.step - value)
            mesh = {"dp_shard": 1, "tp": 2} if value % 2 else None
            supervisor.form(supervisor.attempt + 1, supervisor.step, mesh)
        elif name == "run":
            supervisor.run(supervisor.attempt, supervisor.step + 1, supervisor.step + value)
            supervisor.logs.append(line(len(supervisor.logs) + 1, f"step {supervisor.step}"))
        elif name == "enter":
            supervisor.enter(value)
        else:
            kind, data = value if name == "other" else (broken, value)
            seq = len(supervisor.events) + 1
            supervisor.events.append(SupervisorEvent(seq, 2000.0 + seq, kind, data))
    if ended:
        supervisor.end()
    return supervisor.report(Cursors())


async def stored(store: Store, *reports: SupervisorReport) -> Rows:
    """The rows of a new job after these reports, and those of its nodes, by table."""
    async with store.write() as session:
        for of_last_job in (NodeTrouble, NodeRow):
            await session.execute(delete(of_last_job))
    job = await started_job(store, JobSpec(name="x"), 1.0, 2.0)
    for report in reports:
        async with job_transaction(store, job, now=5000.0) as tx:
            rules = QuarantineRules(incidents=1, largest_share=1.0)
            await store_report(tx, report, rules, hold_end=False)
    found: Rows = {}
    async with store.read() as session:
        for table in Base.metadata.sorted_tables:
            rows = select(table).order_by(*table.primary_key)
            if table.name != "nodes":
                column = "id" if table.name == "jobs" else "job_id"
                if column not in table.c:
                    continue
                rows = rows.where(table.c[column] == job)
            found[table.name] = [
                {name: repr(row[name]).replace(job, "JOB") for name in row.keys() - OF_A_JOB}
                for row in (await session.execute(rows)).mappings()
            ]
    return found


def without(rows: Rows, table: str, names: set[str]) -> Rows:
    kept = [{name: row[name] for name in row.keys() - names} for row in rows[table]]
    return {**rows, table: kept}


@few
@given(moves=STORIES, ended=st.booleans())
async def test_a_report_that_is_stored_again_changes_nothing(
    store: Store, moves: list[Move], ended: bool
) -> None:
    report = report_of(moves, ended)
    # An end that comes with rows is left for the second report.
    assert await stored(store, report, report) == await stored(store, report, report, report)


@few
@given(moves=STORIES, cut=st.integers(0, 25), ended=st.booleans())
@example(moves=[*[("form", 0)] * 5, ("form", 1), ("run", 1), ("form", 1)], cut=7, ended=True)
async def test_a_report_in_two_parts_has_the_same_result(
    store: Store, moves: list[Move], cut: int, ended: bool
) -> None:
    report = report_of(moves, ended)
    whole = await stored(store, report, report)
    parts = await stored(store, report_of(moves[:cut], False), report, report)
    assert without(whole, "jobs", OF_ONE_REPORT) == without(parts, "jobs", OF_ONE_REPORT)


@few
@given(moves=STORIES)
async def test_an_event_that_cannot_be_stored_blocks_no_other(
    store: Store, moves: list[Move]
) -> None:
    skipped, sound = [
        await stored(store, *(report_of(moves, True, kind),) * 2)
        for kind in ("attempt.ended", RENAMED)
    ]
    broken = [repr(value) for name, value in moves if name == "broken"]
    events = [row for row in skipped.pop("events") if row["kind"] != repr(UNREADABLE)]
    assert int(skipped["jobs"][0]["event_seq"]) == len(events) + len(broken)
    assert [(row["at"], row["data"]) for row in events] == [
        (row["at"], row["data"]) for row in sound.pop("events")
    ]
    assert without(skipped, "jobs", {"event_seq"}) == without(sound, "jobs", {"event_seq"})
