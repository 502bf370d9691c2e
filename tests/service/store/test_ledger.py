"""The account of a job adds up, and says no more than what happened, for random true histories: of
recipes, of programs that report steps, and of programs that never do. The histories keep their own
books (`true_histories.py`); a server stores what it would get of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import update
from tests.support.simulation.true_histories import (
    PAUSE_OF_STEPS,
    START_S,
    STEP,
    TrueHistory,
)
from tests.support.web.seed_events import started_job

from holdfast_service.job_model.goodput import Goodput, TimeKind, is_lost
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.supervisor_protocol import Phase
from holdfast_service.policy.quarantine import QuarantineRules
from holdfast_service.readers.fleet_metrics import FleetReader
from holdfast_service.readers.goodput_cache import GoodputCache
from holdfast_service.readers.job_history import JobHistory
from holdfast_service.services.overview import Overview
from holdfast_service.store import accounts, job_row_stats, queries
from holdfast_service.store.engine import Store
from holdfast_service.store.job_lookup import find_job
from holdfast_service.store.models import JobRecord
from holdfast_service.store.projection import store_report
from holdfast_service.store.transaction import job_transaction
from holdfast_service.views.timeline import SpanKind

pytestmark = [pytest.mark.seconds]
RULES = QuarantineRules(incidents=9, largest_share=1.0)
KINDS = st.sampled_from(["recipe", "level 1", "level 0"])
OFF = (SpanKind.WAITING, SpanKind.STOPPED, SpanKind.AWAY)
Move = tuple[Any, ...]
MOVES = st.lists(
    st.one_of(
        st.tuples(
            st.just("train"),
            st.integers(1, 4),
            st.sampled_from([0.5, 1.0, 2.5]),
            st.sampled_from([0.0, 0.25]),
        ),
        st.tuples(st.just("quiet"), st.sampled_from([3.0, 12.0])),
        st.tuples(
            st.just("fail"),
            st.sampled_from([0.25, 6.0]),
            st.integers(0, 5),
            st.sampled_from([2, 4, 8]),
            st.sampled_from([0.0, 12.0]),
        ),
        st.tuples(st.just("stop"), st.sampled_from([61.0, 900.0])),
        st.tuples(st.just("gone"), st.sampled_from([5.0, 900.0]), st.integers(0, 5)),
        st.tuples(st.just("pause"), st.sampled_from([5.0, 900.0])),
        st.tuples(st.just("server"), st.booleans()),
    ),
    max_size=9,
)
few = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FIFTEEN_MINUTES = [("train", 4, 2.5, 0.0), ("stop", 900.0), ("train", 4, 2.5, 0.0)]
GONE = [("train", 4, 2.5, 0.0), ("gone", 900.0, 0), ("train", 4, 2.5, 0.0)]


@dataclass
class Server:
    """Stores what a server gets of a true history, and checks its account each time."""

    store: Store
    job: str
    true: TrueHistory
    is_there: bool = True
    has_lost_reports: bool = False
    before: Goodput | None = None
    costs: dict[int, float] = field(default_factory=dict)
    """Incident -> its cost as first shown."""

    async def poll(self) -> None:
        """The report of this moment, if there is a server."""
        if not self.is_there:
            await self.check(self.true.now)
            return
        async with job_transaction(self.store, self.job, now=self.true.now) as tx:
            report = self.true.report()
            absorbed = await store_report(tx, report, RULES, hold_end=False)
            if absorbed.end_held:
                await store_report(tx, report, RULES, hold_end=False)
        await self.check(self.true.now)

    async def account(self, now: float) -> tuple[JobRecord, Goodput]:
        async with self.store.read() as session:
            job = await find_job(session, self.job)
            return job, await accounts.goodput(session, job, now)

    async def check(self, now: float) -> Goodput:
        _, account = await self.account(now)
        adds_up(account)
        true = self.true
        slack = START_S * 8 if true.phase is Phase.STARTING else 1e-3  # of which size is not known
        assert account.held_device_s <= true.device_s() + slack
        productive = account.by_kind_device_s[TimeKind.PRODUCTIVE]
        # A rollback is not known to a server that has not heard of it.
        knows = self.is_there and not self.has_lost_reports
        assert productive <= true.device_s(STEP, kept=knows) + 1e-3
        between = account.by_kind_device_s[TimeKind.BETWEEN_STEPS]
        assert between <= true.device_s(PAUSE_OF_STEPS) + 1e-3
        if (before := self.before) is not None:
            assert account.held_s >= before.held_s - 1e-3
            made, known = account.steps + account.steps_replayed, before.steps
            assert made >= known + before.steps_replayed
        self.before = account
        await self.check_costs()
        return account

    async def check_costs(self) -> None:
        """A cost of an incident that is shown once is its cost from then on."""
        for each in (await JobHistory(self.store, GoodputCache()).incidents(self.job)).items:
            if each.device_seconds_lost is not None:
                first = self.costs.setdefault(each.number, each.device_seconds_lost)
                assert each.device_seconds_lost == pytest.approx(first, abs=1e-3)

    async def move(self, name: str, *values: Any) -> None:
        true = self.true
        match name, values:
            case "train", (steps, step_s, gap_s):
                for _ in true.train(steps, step_s, gap_s):
                    await self.poll()
            case "quiet", (seconds,):
                true.stay_quiet(seconds)
                await self.poll()
            case "fail", (detect_s, back, devices, *evaluation_s):
                true.fail(detect_s, back, devices, *evaluation_s)
                await self.poll()
            case "stop", (seconds,):
                true.stop(seconds, 1.0)
                await self.poll()
            case "gone", (seconds, back):
                await self.go(seconds, back)
            case "pause", (seconds,) if self.is_there:
                await self.poll()
                await self.transitions(State.PAUSING, State.PAUSED)
                true.now += seconds
                await self.transitions(State.QUEUED, State.STARTING)
                true.phase = Phase.STARTING
                true.start(true.step if true.reports_steps else 0)
                await self.poll()
            case "server", (is_there,):
                self.is_there = is_there
                await self.poll()

    async def go(self, seconds: float, back: int) -> None:
        """Everything is gone; a server finds that, and starts the job again."""
        true = self.true
        true.go(seconds)
        self.has_lost_reports |= not self.is_there
        await self.check(true.now)
        self.is_there = True
        async with job_transaction(self.store, self.job, now=true.now) as tx:
            await job_row_stats.record_gone(tx)
        await self.check(true.now)
        true.phase = Phase.STARTING
        true.start(max(0, true.step - back) if true.reports_steps else 0)
        await self.poll()

    async def transitions(self, *states: State) -> None:
        async with job_transaction(self.store, self.job, now=self.true.now) as tx:
            for state in states:
                if tx.state is not state:
                    tx.transition(state)


def adds_up(account: Goodput) -> None:
    by_kind, by_devices = account.by_kind_s, account.by_kind_device_s
    assert sum(by_kind.values()) == pytest.approx(account.held_s, abs=1e-5)
    assert sum(by_devices.values()) == pytest.approx(account.held_device_s, abs=1e-5)
    assert all(spent >= 0 for spent in (*by_kind.values(), *by_devices.values()))
    lost = sum(spent for kind, spent in by_devices.items() if is_lost(kind))
    assert sum(account.lost_device_s.values()) == pytest.approx(lost, abs=1e-5)
    spans = sum(span.until - span.since for span in account.spans)
    assert spans == pytest.approx(account.held_s, abs=1e-4)
    assert all(a.until <= b.since + 1e-6 for a, b in pairwise(account.spans))


async def started(store: Store, kind: str) -> Server:
    shape: dict[str, Any] = {"parallel": {"dp_shard": 4}}
    if kind != "recipe":
        shape = {"script": "train.py", **shape}
    spec = JobSpec.model_validate({"name": "x", **shape})
    async with store.write() as session:  # each example has a fleet of its own
        nothing = {"held_s": 0.0, "held_since": None, "productive_s": 0.0}
        await session.execute(update(JobRecord).values(nothing))
    job = await started_job(store, spec, 1_000_000.0, 1_000_000.0)
    true = TrueHistory(1_000_000.0, kind != "level 0", kind != "recipe")
    server = Server(store, job, true)
    true.start(0)
    await server.poll()
    return server


@few
@given(kind=KINDS, moves=MOVES)
@example(kind="level 1", moves=FIFTEEN_MINUTES)
@example(kind="recipe", moves=FIFTEEN_MINUTES)
@example(kind="level 0", moves=FIFTEEN_MINUTES)
@example(kind="level 1", moves=GONE)
@example(kind="recipe", moves=[("server", False), *GONE])
@example(kind="level 1", moves=[("fail", 0.25, 0, 4), ("quiet", 12.0), ("train", 2, 1.0, 0.0)])
@example(kind="recipe", moves=[("train", 4, 1.0, 0.0), ("fail", 0.25, 0, 4, 12.0)])
@example(kind="level 0", moves=[("quiet", 12.0), ("fail", 0.25, 0, 4), ("quiet", 12.0)])
async def test_the_account_of_a_job_is_true_at_every_moment_and_the_same_everywhere(
    store: Store, kind: str, moves: list[Move]
) -> None:
    server = await started(store, kind)
    for name, *values in moves:
        await server.move(name, *values)
    server.is_there = True
    server.true.end()
    await server.poll()
    job, account = await server.account(server.true.now)
    await says_the_same(store, job, account)
    if not any(name == "gone" for name, *_ in moves):  # nothing was lost: all is known
        true = server.true
        first_s = 1.25 * START_S * 8 * (1 + sum(name == "pause" for name, *_ in moves))
        assert account.held_device_s == pytest.approx(true.device_s(), abs=first_s)
        if true.reports_steps:
            steps = account.by_kind_device_s[TimeKind.PRODUCTIVE]
            assert steps == pytest.approx(true.device_s(STEP, kept=True), abs=1e-3)
    if kind == "level 0":
        never = (TimeKind.PRODUCTIVE, TimeKind.BETWEEN_STEPS, TimeKind.DETECTION)
        assert not any(account.by_kind_s[each] for each in never)


async def test_an_incident_costs_the_time_until_the_next_step_without_its_evaluation(
    store: Store,
) -> None:
    costs = []
    for evaluation_s in (0.0, 600.0):
        server = await started(store, "recipe")
        await server.move("train", 4, 1.0, 0.0)
        await server.move("fail", 0.25, 0, 4, evaluation_s)
        _, account = await server.account(server.true.now)
        costs.append(account.lost_device_s[1])
    until_step = account.by_kind_s[TimeKind.BETWEEN_STEPS] + 1.0  # the step is a second before
    assert until_step == pytest.approx(evaluation_s)
    assert costs[1] == pytest.approx(costs[0] + 4 * 1.0), "the rest is known to be no recovery"


async def says_the_same(store: Store, job: JobRecord, account: Goodput) -> None:
    """The verdict, the account's view, the timeline, the lists and the fleet."""
    view = queries.goodput_view(job, account)
    assert view.device_seconds_held == pytest.approx(account.held_device_s)
    by_incident = sum(view.device_seconds_lost_by_incident.values())
    assert by_incident + view.device_seconds_lost_otherwise == pytest.approx(
        view.device_seconds_lost
    )
    assert job.goodput == (None if view.goodput is None else pytest.approx(view.goodput))
    assert job.held_s == pytest.approx(account.held_s)
    assert job.productive_s == pytest.approx(account.by_kind_s[TimeKind.PRODUCTIVE])
    assert job.starting_s == pytest.approx(account.by_kind_s[TimeKind.STARTING])
    cache = GoodputCache()
    overview = Overview(store, MagicMock(), MagicMock(), cache)
    verdict, timeline = await overview.verdict(job.id), await overview.timeline(job.id)
    assert verdict.device_hours_used == pytest.approx(account.held_device_s / 3600)
    assert verdict.device_hours_lost == pytest.approx(view.device_seconds_lost / 3600)
    assert verdict.goodput == view.goodput
    on_cluster = [span for span in timeline.spans if span.kind not in OFF]
    shown = sum(span.until - span.since for span in on_cluster)
    assert shown == pytest.approx(account.held_s, abs=1e-3)
    assert all(
        one.until == pytest.approx(next_.since, abs=1e-3) for one, next_ in pairwise(timeline.spans)
    )
    incidents = (await JobHistory(store, cache).incidents(job.id)).items
    lost = {number: lost_s for number, lost_s in account.lost_device_s.items() if number}
    assert {each.number: each.device_seconds_lost for each in incidents} == {
        each.number: pytest.approx(lost.get(each.number, 0.0)) for each in incidents
    }
    assert set(lost) <= {each.number for each in incidents}
    fleet = await FleetReader(store).statistics(job.ended_at or 0.0)
    assert fleet.held_s == pytest.approx(account.held_s)
    assert fleet.effective_s == pytest.approx(account.by_kind_s[TimeKind.PRODUCTIVE])
