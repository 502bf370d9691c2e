"""A supervisor of this version continues jobs with the events and agents of a released one."""

from __future__ import annotations

import pytest
from sqlalchemy import select
from tests.support.upgrade.fixture import TAKEOVERS, Written
from tests.support.upgrade.takeovers import Takeover, main_facts

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import Phase
from holdfast_service.job_model.supervisor_protocol import JobPlan, SupervisorEvent
from holdfast_service.recovery.core import RecoveryCore
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.effects import Effect
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.models import Event, JobRecord
from holdfast_workers import build
from holdfast_workers.protocol.commands import Fence, Form


def takeover_of(written: Written, settings: Settings, job: str) -> Takeover:
    left = [Takeover(**entry) for entry in written.json(TAKEOVERS, settings.data_dir)]
    [found] = [takeover for takeover in left if takeover.job == job]
    return found


async def job_named(store: Store, name: str) -> JobRecord:
    async with store.read() as session:
        return (await session.scalars(select(JobRecord).where(JobRecord.name == name))).one()


def taken_over(job: JobRecord, left: Takeover) -> tuple[RecoveryCore, list[Effect]]:
    """A new core that every agent has reported to, and its effects."""
    config = RecoveryConfig(JobPlan(job.id, JobSpec.model_validate(job.spec)), build=build.LOADED)
    core = RecoveryCore(config, left.at, left.replayed())
    effects = [*core.handle(inputs.RemoteCheckpoints(()), left.at)]
    for report in left.agent_reports():
        effects += core.handle(inputs.AgentUp(report), left.at)
    return core, effects


@pytest.mark.parametrize("name", ["running", "recovering"])
async def test_the_replayed_events_show_the_same_facts(
    written: Written, settings: Settings, store: Store, name: str
) -> None:
    job = await job_named(store, name)
    left = takeover_of(written, settings, job.id)
    assert main_facts(left.replayed()) == left.facts
    assert (left.facts["open incident"] is not None) == (name == "recovering")
    assert left.facts["attempt"] > 0 and left.facts["committed"] > 0


@pytest.mark.parametrize("name", ["running", "recovering"])
async def test_the_stored_events_show_the_same_facts(
    written: Written, settings: Settings, store: Store, name: str
) -> None:
    job = await job_named(store, name)
    async with store.read() as session:
        stored = await session.scalars(
            select(Event).where(Event.job_id == job.id).order_by(Event.seq)
        )
        events = [SupervisorEvent(row.seq, row.at, row.kind, row.data) for row in stored]
    facts = main_facts(Facts.from_events(events))
    expected = takeover_of(written, settings, job.id).facts
    assert {**facts, "saved": len(facts["saved"])} == {**expected, "saved": len(expected["saved"])}


async def test_a_running_attempt_is_adopted_untouched(
    written: Written, settings: Settings, store: Store
) -> None:
    job = await job_named(store, "running")
    left = takeover_of(written, settings, job.id)
    core, effects = taken_over(job, left)
    assert core.phase is Phase.RUNNING
    assert (core.attempt, core.committed) == (left.facts["attempt"], job.step)
    assert not [effect for effect in effects if isinstance(effect, Form)]
    fenced = {effect.attempt for effect in effects if isinstance(effect, Fence)}  # a new standby
    assert fenced <= {core.attempt}


async def test_an_open_incident_is_continued_with_a_new_attempt(
    written: Written, settings: Settings, store: Store
) -> None:
    job = await job_named(store, "recovering")
    left = takeover_of(written, settings, job.id)
    core, effects = taken_over(job, left)
    assert core.phase is Phase.RECOVERING
    for _ in range(20):  # the batch of signals, then its decision
        deadline = core.next_deadline()
        if deadline is None or any(isinstance(effect, Fence) for effect in effects):
            break
        effects += core.handle(inputs.Tick(), deadline)
    fences = [effect for effect in effects if isinstance(effect, Fence)]
    assert {fence.attempt for fence in fences} == {left.facts["attempt"] + 1}
