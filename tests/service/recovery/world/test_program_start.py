"""The start of a program's attempt: it lasts until its first step, and its incident has what that
step tells. Nothing is said that the program did not tell."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.service.fake_cluster import row
from tests.support.simulation.core_config import core_config
from tests.support.simulation.core_states import NOW, running_state
from tests.support.simulation.simulated_agent import SimAgent
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import closed, cluster, running

from holdfast_service.job_model.events.codec import numbered
from holdfast_service.job_model.resources_spec import RuntimeEnvSpec
from holdfast_service.job_model.supervisor_protocol import EventKind, LostAttempt, Phase
from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core import RecoveryCore
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.effects import Emit
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.faults import judgement
from holdfast_service.recovery.world import attempt_progress
from holdfast_service.recovery.world.start_wait import start_wait
from holdfast_workers.protocol.messages import StepRow

PROGRAM: dict[str, Any] = {"command": ("train",)}


def crashed_program(**changes: Any) -> SimulatedCluster:
    """A program that reports its steps, after a crash: all ranks of attempt 2 have just joined."""
    job = running(cluster(**PROGRAM, **changes, steps=300), 20)
    job.feed(inputs.StepsMeasured((row(1, 19), row(1, 20))))
    job.kill_rank(1)
    job.run_until(lambda: job.core.attempt == 2)
    job.run_until(lambda: getattr(job.core.state.worlds.present, "joined_at", None) is not None)
    return job


def starting(reported: int = 20, **changes: Any) -> CoreState:
    """A world of a program of which no rank has joined yet, after a crash of the one before."""
    state = running_state(**PROGRAM, **changes)
    world = state.worlds.present
    assert world is not None
    world.is_running = False
    for member in world.members.values():
        member.joined = False
    state.progress.record_first_report(world.attempt, reported)
    state.incidents.open(Fault(Cause.WORKER_CRASH, 0, NOW, "rank 1 ended", rank=1), NOW, 0)
    state.set_phase(Phase.RECOVERING)
    state.enter(Stage.FORMING, NOW, 120.0)
    return state


def reported_before(state: CoreState, rows: list[StepRow]) -> None:
    """Rows of an attempt before the present world."""
    state.progress.record_reported_steps([(row.attempt, row.step) for row in rows])


def join(state: CoreState) -> None:
    world = state.worlds.present
    assert world is not None
    for member in world.members.values():
        attempt_progress.record_joined(state, member, {}, NOW + 1)


def events(state: CoreState) -> list[tuple[str, Any]]:
    found = (effect.event for effect in state.take_effects() if isinstance(effect, Emit))
    return [(event.kind.value, event) for event in found]


def test_a_program_that_reports_steps_starts_until_its_first_one() -> None:
    job = crashed_program()
    assert job.core.phase is Phase.RECOVERING and not closed(job)
    assert [event["attempt"] for event in job.emitted(EventKind.ATTEMPT_RUNNING)] == [1]
    wait = start_wait(job.core.state)
    assert wait is not None and wait.what.startswith("the first step of its program")
    assert "300 s is inspected" in wait.what and "started after 600 s" in wait.what
    assert wait.until is not None
    job.run_until(lambda: job.core.phase is Phase.RUNNING)
    assert start_wait(job.core.state) is None
    running = job.emitted(EventKind.ATTEMPT_RUNNING)[-1]
    assert running["attempt"] == 2 and running["first_step"] is not None


def test_the_incident_closes_with_the_step_that_the_program_went_on_from() -> None:
    job = crashed_program()
    job.run_until(lambda: bool(closed(job)))
    [incident], first = closed(job), job.emitted(EventKind.ATTEMPT_RUNNING)[-1]["first_step"]
    assert incident["restored_step"] == first - 1
    assert incident["steps_lost"] == 20 - first + 1
    job.run_until(lambda: job.core.committed >= 40)
    updates = [e for e in job.emitted(EventKind.INCIDENT_UPDATED) if e["closed_at"] is not None]
    assert updates == []


def test_the_process_of_a_program_is_never_kept() -> None:
    job = crashed_program()
    forming = job.emitted(EventKind.ATTEMPT_FORMING)[-1]
    roles = {member["rank"]: member["role"] for member in forming["members"]}
    assert roles[0] == "restarted" and "kept" not in roles.values()
    recipe = running(cluster(steps=300), 20)
    recipe.kill_rank(1)
    recipe.run_until(lambda: recipe.core.attempt == 2 and bool(recipe.core.state.worlds.present))
    members = recipe.emitted(EventKind.ATTEMPT_FORMING)[-1]["members"]
    assert "kept" in {member["role"] for member in members}


def test_the_ranks_that_have_not_joined_are_named_with_the_limit() -> None:
    state = starting()
    world = state.worlds.present
    assert world is not None
    for rank in (0, 2, 3):
        attempt_progress.record_joined(state, world.members[rank], {}, NOW + 1)
    wait = start_wait(state)
    assert wait is not None and wait.what == "rank 1 to join"
    assert (wait.since, wait.until) == (NOW, NOW + 120.0)


@pytest.mark.parametrize(
    ("pip", "does"),
    [((), "load torch"), (("einops",), "install the job's packages and load torch")],
)
def test_a_start_names_the_nodes_that_are_not_ready(pip: tuple[str, ...], does: str) -> None:
    shape = WorldShape.of({"dp_shard": 2, "tp": 2}, 2)
    packages = RuntimeEnvSpec(pip=list(pip))
    config = core_config((shape,), standby_nodes=1, steps=30, runtime_env=packages)
    state = CoreState.started(config, NOW)
    state.timer.enter(Stage.ASSEMBLING, NOW, NOW + 120)
    seen = []
    for name in ("n0", "n1", "n2"):
        state.roster.record_report(SimAgent(name, config).report())
        seen.append(getattr(start_wait(state), "what", None))
    ready = SimAgent("n1", config)
    ready.become_ready()
    state.roster.record_report(ready.report())
    assert seen == [
        "an agent on 2 of 3 nodes",
        "an agent on 1 of 3 nodes",
        f"n0, n1, n2 to {does}",
    ]
    wait = start_wait(state)
    assert wait is not None and wait.what == f"n0, n2 to {does}"


def test_a_program_that_has_never_reported_a_step_runs_once_all_ranks_have_joined() -> None:
    state = starting()
    state.progress.reports_steps = False
    join(state)
    assert state.timer.phase is Phase.RUNNING and start_wait(state) is None
    [record] = [event.record for kind, event in events(state) if kind == EventKind.INCIDENT_CLOSED]
    assert (record.restored_step, record.steps_lost, record.tiers) == (None, None, {})
    assert record.resolution == "the program of attempt 1 runs on all ranks"
    # Nobody has measured how long its program took to load its state, and to begin.
    assert set(record.phases_s) == {"detect", "form", "total"}


@pytest.mark.parametrize("first_step", [21, 15, 1])
def test_the_first_step_tells_the_steps_lost(first_step: int) -> None:
    state = starting()
    reported_before(state, [row(1, 19), row(1, 20)])
    join(state)
    attempt_progress.record_committed_step(state, 1, first_step, NOW + 2)
    [record] = [event.record for kind, event in events(state) if kind == EventKind.INCIDENT_CLOSED]
    assert (record.restored_step, record.steps_lost) == (first_step - 1, 21 - first_step)
    assert record.tiers == {}, "the program has loaded it by itself"


@given(every=st.sampled_from([1, 2, 10, 500]), reports=st.integers(1, 4), began_again=st.booleans())
def test_what_a_first_step_tells_is_true_or_not_known(
    every: int, reports: int, began_again: bool
) -> None:
    """A program that reports every N-th step has a fault after some reports."""
    state = starting(reported=reports * every)
    for step in range(every, reports * every + 1, every):
        reported_before(state, [row(1, step)])
    join(state)
    went_on = 0 if began_again else reports * every
    attempt_progress.record_committed_step(state, 1, went_on + every, NOW + 2)
    emitted = events(state)
    [record] = [event.record for kind, event in emitted if kind == EventKind.INCIDENT_CLOSED]
    known = (went_on, reports * every - went_on) if every == 1 and reports > 1 else (None, None)
    assert (record.restored_step, record.steps_lost) == known
    for told in (event for kind, event in emitted if kind == EventKind.PROGRAM_RESUMED):
        assert (told.restored_step, told.steps_lost) == known


@pytest.mark.parametrize("steps", [[1, 2, 12], [10, 20, 21], [1, 500, 501, 502]])
def test_a_program_that_has_left_out_a_step_does_not_tell_where_it_went_on(
    steps: list[int],
) -> None:
    state = starting()
    reported_before(state, [row(1, step) for step in steps])
    assert state.progress.reports_each is False
    reported_before(state, [row(2, 1), row(1, 2)])
    assert state.progress.reports_each is False


def test_the_first_report_of_a_job_does_not_tell_where_its_program_went_on() -> None:
    state = running_state(**PROGRAM)
    world = state.worlds.present
    assert world is not None
    world.first_step, world.restored_step = None, 0
    attempt_progress.record_committed_step(state, 1, 10, NOW)
    [told] = [event for kind, event in events(state) if kind == EventKind.PROGRAM_RESUMED]
    assert (told.first_step, told.restored_step, told.steps_lost) == (10, None, None)


def test_a_page_of_rows_tells_the_first_step_that_is_known_by_its_last_one() -> None:
    """The signal of the first step may come after the page."""
    state = running_state(**PROGRAM)
    world = state.worlds.present
    assert world is not None
    world.first_step, world.restored_step = None, 0
    attempt_progress.record_rows(state, [row(1, step) for step in range(1, 13)], NOW)
    attempt_progress.record_committed_step(state, 1, 12, NOW)
    resumed = [event for kind, event in events(state) if kind == EventKind.PROGRAM_RESUMED]
    assert all(event.first_step == 1 and event.restored_step in (0, None) for event in resumed)
    assert (getattr(world, "first_step", None), state.progress.committed) == (1, 12)


def test_steps_that_become_known_after_the_end_of_an_attempt_count_as_lost() -> None:
    job = running(cluster(**PROGRAM, steps=300), 20)
    job.feed(inputs.StepsMeasured((row(1, 19), row(1, 20))))
    job.kill_rank(1)
    job.run_until(lambda: job.core.stage is Stage.FORMING and job.core.attempt == 2)
    late = job.core.committed + 5
    job.feed(inputs.StepCommitted(1, late))
    job.run_until(lambda: bool(closed(job)))
    [incident] = closed(job)
    assert incident["restored_step"] + incident["steps_lost"] == late


def test_the_end_of_an_attempt_without_a_step_names_no_step_of_the_one_before() -> None:
    job = crashed_program()
    job.kill_rank(2)
    job.run_until(lambda: job.core.attempt == 3)
    ends = {e["attempt"]: e["last_step"] for e in job.emitted(EventKind.ATTEMPT_ENDED)}
    assert ends[1] == 20 and ends[2] is None


def test_a_further_fault_keeps_what_was_known_of_the_first_one() -> None:
    job = crashed_program()
    world = job.core.state.worlds.present
    assert world is not None
    hang = Fault(Cause.HANG, 2, job.now, "rank 2 is silent", rank=2, certain=False)
    judgement.report_fault(job.core.state, hang, job.now)
    job.run_until(lambda: bool(closed(job)))
    [incident] = closed(job)
    assert incident["cause"] == "worker_crash" and "hang" in incident["causes"]
    assert "ended by SIGKILL" in incident["evidence"][0]
    [earlier] = incident["earlier"]
    assert (earlier["attempt"], earlier["next_attempt"]) == (1, 2)
    assert (earlier["cause"], earlier["decision"]) == ("worker_crash", "replace the worker")


def test_a_restarted_supervisor_takes_no_later_step_for_the_first_one() -> None:
    job = running(cluster(**PROGRAM, steps=300), 20)
    job.restart_supervisor()
    job.run_until(lambda: job.core.stage is Stage.RUNNING and job.core.committed >= 25)
    assert [event["first_step"] for event in job.emitted(EventKind.PROGRAM_RESUMED)] == [1]
    assert [event["attempt"] for event in job.emitted(EventKind.ATTEMPT_RUNNING)] == [1]


def test_a_restarted_supervisor_waits_for_the_first_step_too() -> None:
    job = crashed_program()
    core = RecoveryCore(job.config, job.now, Facts.from_events(job.events))
    assert core.state.progress.reports_steps and core.state.progress.reports_each is None


def taken_over(job: SimulatedCluster) -> tuple[RecoveryCore, list[Any]]:
    """The core of a restarted supervisor, to which all agents have reported, and its events."""
    core = RecoveryCore(job.config, job.now, Facts.from_events(job.events))
    emitted: list[Any] = []
    for agent in job.agents.values():
        emitted += told(core, inputs.AgentUp(agent.report()), job.now)
    return core, emitted


def told(core: RecoveryCore, event: inputs.Input, now: float) -> list[Any]:
    return [effect.event for effect in core.handle(event, now) if isinstance(effect, Emit)]


def kinds(emitted: list[Any]) -> set[str]:
    return {event.kind.value for event in emitted}


def test_a_restarted_supervisor_takes_no_state_that_was_offered_for_the_first_step() -> None:
    job = crashed_program()
    offered = {w.step for agent in job.agents.values() for w in agent.workers.values() if w.step}
    assert offered, "the agents know the step of the state in memory"
    core, emitted = taken_over(job)
    world = core.state.worlds.present
    assert world is not None and world.joined_at is not None and world.first_step is None
    assert core.phase is Phase.RECOVERING
    assert not kinds(emitted) & {"program.resumed", "attempt.running", "incident.closed"}
    told(core, inputs.StepsMeasured((row(1, 19), row(1, 20))), job.now)
    emitted = told(core, inputs.StepCommitted(2, 19), job.now)
    [incident] = [event.record for event in emitted if event.kind == EventKind.INCIDENT_CLOSED]
    assert (incident.restored_step, incident.steps_lost) == (18, 2)


def test_a_program_that_only_keeps_states_reports_no_steps_after_a_restart_of_its_supervisor() -> (
    None
):
    job = cluster(**PROGRAM, steps=300)
    job.run_until(lambda: job.core.stage is Stage.RUNNING)
    for agent in job.agents.values():
        for worker in agent.workers.values():
            worker.step = 10 if worker.rank is not None else 0
    core, emitted = taken_over(job)
    assert core.phase is Phase.RUNNING and not core.state.progress.reports_steps
    lost = inputs.AgentLost("n0", "its process died", job.agents["n0"].incarnation)
    emitted += told(core, lost, job.now)
    emitted += told(core, inputs.Tick(), job.now + 5)
    [end] = [event for event in emitted if event.kind == EventKind.ATTEMPT_ENDED]
    events = [numbered(1000 + at, job.now, event) for at, event in enumerate(emitted)]
    assert end.last_step is None
    assert not Facts.from_events([*job.events, *events]).reports_steps


def test_a_program_that_reports_no_step_for_long_has_started_all_the_same() -> None:
    job = crashed_program()
    core, _ = taken_over(job)
    joined_at, limit_s = job.now, job.config.program_progress_s
    due = core.next_deadline()
    assert due is not None and due <= joined_at + limit_s
    emitted = told(core, inputs.Tick(), joined_at + limit_s - 1)
    assert not emitted
    emitted = told(core, inputs.Tick(), joined_at + limit_s)
    assert core.phase is Phase.RUNNING and start_wait(core.state) is None
    [begun] = [event for event in emitted if event.kind == EventKind.ATTEMPT_RUNNING]
    [incident] = [event.record for event in emitted if event.kind == EventKind.INCIDENT_CLOSED]
    facts = (begun.first_step, incident.restored_step, incident.steps_lost)
    assert facts == (None, None, None)
    assert incident.resolution.endswith("has reported no step in 600 s")
    assert core.state.timer.deadline is None
    told(core, inputs.StepCommitted(2, 25), joined_at + limit_s + 9)
    assert core.known_step == 25


def test_a_program_without_a_step_yet_follows_an_order_to_shrink() -> None:
    shapes = tuple(WorldShape.of({"dp_shard": size, "tp": 2}, 2) for size in (2, 1))
    job = crashed_program(shapes=shapes)
    core, _ = taken_over(job)
    told(core, inputs.SizeOrdered(1), job.now)
    assert core.state.mesh_change.is_under_way(2), "it waits for no step"


def test_a_rank_that_dies_without_a_supervisor_leaves_it_known_that_its_program_reports_steps() -> (
    None
):
    job = running(cluster(**PROGRAM, steps=300), 20)
    job.restart_supervisor()
    job.kill_rank(1)
    job.run_until(lambda: job.core.stage is Stage.GATHERING)
    job.feed(inputs.StepCommitted(1, 12))  # the first page of rows since the restart
    assert [event["first_step"] for event in job.emitted(EventKind.PROGRAM_RESUMED)] == [1]
    job.run_until(lambda: job.core.attempt == 2)
    job.run_until(lambda: getattr(job.core.state.worlds.present, "joined_at", None) is not None)
    [end] = job.emitted(EventKind.ATTEMPT_ENDED)
    assert end["last_step"] == 12
    assert job.core.state.progress.reports_steps and not closed(job)


def test_the_first_report_of_a_program_is_in_the_journal() -> None:
    job = running(cluster(**PROGRAM, steps=300), 20)
    core, _ = taken_over(job)
    assert core.state.progress.reports_steps


def lost_job(lost: LostAttempt | None) -> SimulatedCluster:
    shape = WorldShape.of({"dp_shard": 2, "tp": 2}, 2)
    config = core_config(
        (shape,),
        steps=30,
        standby_nodes=0,
        last_attempt=3,
        last_incident=4,
        lost=lost,
        command=("train",),
    )
    job = SimulatedCluster(config)
    job.core = RecoveryCore(config, job.now, Facts(attempt=3))
    return job


def test_a_job_that_lost_everything_on_the_cluster_has_an_incident_with_a_new_number() -> None:
    job = lost_job(LostAttempt(3, world_size=4, step=20))
    job.run_until(lambda: bool(closed(job)))
    [opened] = job.emitted(EventKind.INCIDENT_OPENED)
    assert opened["incident"] == 5, "number 4 and those before it are in the store"
    assert (opened["attempt"], opened["lost"][0]["ranks"]) == (3, [0, 1, 2, 3])
    assert "all agents of attempt 3 are gone" in opened["evidence"][0]
    [incident] = closed(job)
    assert len(incident["failures"]) == 1, "its time is accounted for"
    assert "alive" not in incident["reason"] and "keep" not in incident["reason"]


def test_a_job_that_comes_back_from_a_pause_has_none() -> None:
    job = lost_job(None)
    job.run_until(lambda: job.core.phase is Phase.RUNNING)
    assert job.emitted(EventKind.INCIDENT_OPENED) == []
    job.kill_rank(1)
    job.run_until(lambda: bool(closed(job)))
    assert closed(job)[0]["incident"] == 5
