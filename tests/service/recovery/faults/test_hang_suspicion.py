"""Hangs on the simulated cluster: from the first signal to the recovered world."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.simulation.simulated_agent import SimAgent, SimWorker
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import closed, cluster, forming, present, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.recovery.core_state import effects as fx
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_workers.protocol import commands
from holdfast_workers.protocol.messages import JOINING_PHASE, Beat, GroupBeat, Inspection
from holdfast_workers.protocol.signals import RankStalled


def watched(job: SimulatedCluster) -> list[fx.Effect]:
    """A list that collects all effects from now on."""
    seen: list[fx.Effect] = []
    job.observers.append(seen.append)
    return seen


def accused(job: SimulatedCluster) -> dict[str, Any]:
    (incident,) = closed(job)
    assert incident["cause"] == "hang"
    return incident


@pytest.mark.parametrize("process", ["T", "R", "D", "S"])
def test_a_rank_that_hangs_is_named_and_its_process_killed_with_the_fence(process: str) -> None:
    job = running(cluster())
    effects = watched(job)
    job.hang_rank(2, process)
    began = job.now
    job.run_until(lambda: bool(closed(job)))
    assert job.now - began < 3.5
    incident = accused(job)
    assert incident["lost"][0]["rank"] == 2
    assert incident["suspects"][0]["rank"] == 2
    assert incident["suspects"][0]["agent"] == "n1"
    assert incident["suspects"][0]["score"] > 0.5
    assert any("rank 2" in line for line in incident["evidence"])
    assert incident["stacks"][0]["frames"]
    looks = [effect for effect in effects if isinstance(effect, commands.Inspect)]
    assert len(looks) == (2 if process == "T" else 4), (
        "conclusive evidence needs a single inspection"
    )
    condemned = {
        effect.agent: effect.condemned for effect in effects if isinstance(effect, commands.Fence)
    }
    assert {agent for agent, workers in condemned.items() if workers} == {"n1"}
    assert condemned["n1"] == (incident["suspects"][0]["worker"],)
    assert job.run().outcome == "SUCCEEDED"


def test_a_stall_reported_during_an_inspection_is_inspected_soon_after() -> None:
    """The inspection may have come just before the peers had waited for long enough."""
    job = running(cluster())
    looks: list[float] = []

    def early(worker: SimWorker, inspection: Inspection) -> Inspection:
        looks.append(job.now)
        first = job.now - looks[0] < 0.1 and not worker.hangs
        return (
            replace(inspection, beat=replace(inspection.beat, age_s=0.9)) if first else inspection
        )

    job.change_inspection = early
    job.hang_rank(2, "R")
    began = job.now
    job.run_until(lambda: bool(closed(job)))
    assert accused(job)["suspects"][0]["rank"] == 2
    assert job.now - began < 4.0


def test_all_ranks_in_one_long_phase_are_waited_for_and_reported_once() -> None:
    job = running(cluster())
    effects = watched(job)
    job.slow_down(for_s=200.0)
    assert job.run().outcome == "SUCCEEDED"
    assert not job.emitted(EventKind.INCIDENT_OPENED)
    (event,) = job.emitted(EventKind.STALLED)
    assert event["finding"] == "waiting"
    looks = [effect for effect in effects if isinstance(effect, commands.Inspect)]
    assert 4 <= len(looks) <= 30, "inspected again at growing intervals"


def test_a_world_without_steps_beyond_the_limit_is_re_formed_without_a_culprit() -> None:
    job = running(cluster(stall_limit_s=50.0))
    began = job.now
    job.stalls_unreported = True
    job.slow_down(for_s=1000.0)
    job.at(60.0, lambda: setattr(job, "slow_until", 0.0))
    job.run_until(lambda: bool(closed(job)))
    assert 50.0 <= job.now - began < 62.0
    assert accused(job)["lost"][0]["rank"] is None
    assert accused(job)["decision"] == "re-form in place"


@pytest.mark.parametrize(
    ("phases", "age_s", "hangs"),
    [
        (("busy", "busy"), 0.1, True),
        (("program", "busy"), 0.1, False),
        (("program", "busy"), 301.0, True),
    ],
)
def test_a_program_without_steps_is_restarted_unless_a_rank_prints(
    phases: tuple[str, str], age_s: float, hangs: bool
) -> None:
    """A rank that computes may wait for a device; one that was silent for its limit waits."""
    shape = {"dp_shard": 2, "tp": 1}
    job = running(cluster(mesh=shape, command=("train",), stall_limit_s=50.0))

    def look(worker: SimWorker, inspection: Inspection) -> Inspection:
        phase = phases[worker.rank or 0]
        late_s = age_s if phase == "program" else 0.1
        return replace(
            inspection, beat=replace(inspection.beat, phase=phase, age_s=late_s, limit_s=300.0)
        )

    job.change_inspection = look
    job.stalls_unreported = True
    job.slow_down(for_s=400.0)
    job.run_until(lambda: job.now >= job.slow_until or bool(job.emitted(EventKind.INCIDENT_OPENED)))
    assert bool(job.emitted(EventKind.INCIDENT_OPENED)) is hangs


def test_a_rank_that_ended_while_others_wait_for_it_is_an_error_of_the_program() -> None:
    job = running(cluster(mesh={"dp_shard": 2, "tp": 1}, command=("train",)))
    present(job)[1].record_done(12)
    groups = (GroupBeat("world", 13, 12, "all_reduce"),)

    def look(worker: SimWorker, inspection: Inspection) -> Inspection:
        beat = replace(inspection.beat, phase="program", age_s=301.0, limit_s=300.0, groups=groups)
        return replace(inspection, beat=beat)

    job.change_inspection = look
    job.slow_down(for_s=400.0)
    job.run_until(lambda: bool(closed(job)))
    (incident,) = closed(job)
    assert (incident["cause"], incident["lost"][0]["rank"]) == ("user_error", 1)
    assert (
        "rank 1 ended with exit code 0 at step 12 while rank 0 waits in all_reduce 13"
        in (incident["evidence"][0])
    )
    assert incident["offences"] == [] and incident["suspects"][0]["rank"] == 1


def test_a_phase_may_exceed_the_stall_limit_if_its_own_limit_is_longer() -> None:
    job = running(cluster(stall_limit_s=50.0))
    job.slow_down(for_s=300.0, limit_s=400.0)
    assert job.run(2000.0).outcome == "SUCCEEDED"
    assert not job.emitted(EventKind.INCIDENT_OPENED)


def test_a_long_step_with_moving_micro_batches_is_waited_for() -> None:
    job = running(cluster(stall_limit_s=50.0))

    def moving(worker: SimWorker, inspection: Inspection) -> Inspection:
        slow = job.now < job.slow_until
        beat = replace(inspection.beat, age_s=0.3, micro_batch=int(job.now))
        return replace(inspection, beat=beat) if slow else inspection

    job.change_inspection = moving
    job.stalls_unreported = True
    job.slow_down(for_s=400.0)
    assert job.run(2000.0).outcome == "SUCCEEDED"
    assert not job.emitted(EventKind.INCIDENT_OPENED)


def test_past_the_stall_limit_ranks_within_their_limits_are_inspected_less_often() -> None:
    job = running(cluster(stall_limit_s=50.0))
    effects = watched(job)
    job.stalls_unreported = True
    job.slow_down(for_s=1000.0, limit_s=3600.0)
    assert job.run(3000.0).outcome == "SUCCEEDED"
    assert not job.emitted(EventKind.INCIDENT_OPENED)
    looks = [effect for effect in effects if isinstance(effect, commands.Inspect)]
    assert 10 <= len(looks) <= 60, "two agents, after 50 s, then pauses of 5 s to 60 s"


def test_an_agent_that_does_not_answer_about_awaited_ranks_is_removed() -> None:
    job = running(cluster())
    effects = watched(job)
    job.uninspectable = frozenset({"n1"})
    job.hang_rank(3)
    job.run_until(lambda: bool(closed(job)))
    assert accused(job)["lost"][0]["ranks"] == [2, 3]
    assert [effect.agent for effect in effects if isinstance(effect, fx.RemoveAgent)] == ["n1"]
    job.uninspectable = frozenset()
    assert job.run().outcome == "SUCCEEDED"


def test_a_hang_found_when_the_last_step_is_durable_ends_the_job_and_nothing_follows() -> None:
    job = running(cluster())
    effects = watched(job)
    job.uninspectable = frozenset({"n1"})
    job.hang_rank(3)
    durable = inputs.CheckpointFinalized(job.config.steps, 1, "memory://last", 1)
    job.core.handle(durable, job.now)
    assert job.run().outcome == "SUCCEEDED"
    assert isinstance(effects[-1], fx.End)


def test_a_supervisor_that_adopts_a_stalled_world_inspects_it() -> None:
    job = running(cluster())
    job.stalls_unreported = True
    job.hang_rank(1)
    job.at(1.0, job.restart_supervisor)
    began = job.now
    job.run_until(lambda: bool(closed(job)))
    assert job.now - began < 20.0, "long before the stall limit"
    assert accused(job)["lost"][0]["rank"] == 1
    assert job.run().outcome == "SUCCEEDED"


def test_a_supervisor_restart_during_an_inspection_loses_nothing() -> None:
    job = running(cluster())
    job.hang_rank(1, "R")
    job.at(1.2, job.restart_supervisor)
    job.run_until(lambda: bool(closed(job)))
    assert accused(job)["suspects"][0]["rank"] == 1
    facts = Facts.from_events(job.events)
    assert facts.incident is None
    assert facts.incidents == 1
    assert job.run().outcome == "SUCCEEDED"


def test_a_rank_that_hangs_before_the_first_step_is_found() -> None:
    job = cluster(first_step_s=900.0)
    job.run_until(lambda: bool(job.restored))
    job.hang_rank(0, "T")
    job.run_until(lambda: len(forming(job)) == 2)
    assert job.core.stage is Stage.FORMING
    assert job.now < 1_000_010.0
    assert job.run().outcome == "SUCCEEDED"


def forming_without_rank_2() -> tuple[SimulatedCluster, SimAgent, SimWorker]:
    """A job whose second world waits for rank 2 alone; the rank's agent and its worker."""
    job = running(cluster(form_s=100.0))
    job.lose_next_worker("n1")
    job.kill_rank(2)
    n1 = job.agents["n1"]
    job.run_until(lambda: len(job.worlds.get(2, {})) == 3)
    (worker,) = (
        worker for worker in n1.workers.values() if worker.attempt == 2 and worker.rank == 2
    )
    return job, n1, worker


def test_a_rank_that_stops_while_a_world_forms_is_named() -> None:
    job, n1, worker = forming_without_rank_2()
    worker.hangs = "T"
    began, beat = job.now, Beat(2, worker.name, worker.pid, 2, 0, "joining", 0, 9.0, 1.0)
    job.signal(n1, RankStalled(beat), 2, rank=2, worker=worker.name)
    job.run_until(lambda: bool(closed(job)))
    assert job.now - began < 3.0
    (incident,) = closed(job)
    assert {"worker_crash", "hang"} <= set(incident["causes"])
    assert incident["suspects"][0]["rank"] == 2
    assert job.run().outcome == "SUCCEEDED"


def test_a_rank_that_does_not_begin_its_order_is_named_while_a_world_forms() -> None:
    job, n1, worker = forming_without_rank_2()

    def in_rendezvous(seen: SimWorker, inspection: Inspection) -> Inspection:
        phase, age_s = (JOINING_PHASE, 9.0) if seen is worker else ("rendezvous", 8.0)
        beat = replace(inspection.beat, phase=phase, age_s=age_s, limit_s=5.0, groups=())
        return replace(inspection, beat=beat)

    job.change_inspection = in_rendezvous
    began, beat = job.now, Beat(2, worker.name, worker.pid, 2, 0, JOINING_PHASE, 0, 9.0, 5.0)
    job.signal(n1, RankStalled(beat), 2, rank=2, worker=worker.name)
    job.run_until(lambda: bool(closed(job)))
    assert job.now - began < 5.0
    (incident,) = closed(job)
    assert incident["suspects"][0]["rank"] == 2
    assert job.run().outcome == "SUCCEEDED"


def alone(**changes: Any) -> SimulatedCluster:
    """A job of a single rank, whose agent reports for how long the rank has not moved."""
    job = cluster(mesh={"dp_shard": 1, "tp": 1}, workers_per_node=1, **changes)
    moved = {"at": 0.0}

    def aged(worker: SimWorker, inspection: Inspection) -> Inspection:
        if not worker.hangs:
            moved["at"] = job.now
            return inspection
        return replace(inspection, beat=replace(inspection.beat, age_s=job.now - moved["at"]))

    job.change_inspection = aged
    running(job)
    moved["at"] = job.now
    return job


def test_a_rank_without_peers_that_hangs_is_named_by_its_own_limit() -> None:
    job = alone()
    began = job.now
    job.hang_rank(0)
    job.run_until(lambda: bool(closed(job)))
    assert 10.0 < job.now - began < 25.0
    incident = accused(job)
    assert incident["decision"] == "replace the worker"
    (suspect,) = incident["suspects"]
    assert (suspect["rank"], suspect["agent"]) == (0, "n0")
    assert incident["stacks"][0]["frames"]
    assert job.run().outcome == "SUCCEEDED"


def test_a_rank_without_peers_in_a_declared_long_phase_is_waited_for() -> None:
    job = alone()
    job.slow_down(50.0, limit_s=60.0)
    assert job.run().outcome == "SUCCEEDED"
    assert not closed(job)
