"""Signals are calls and may be lost: polls of the agents replace lost signals."""

from __future__ import annotations

import re
from typing import Any

from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import closed, cluster, forming, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.recovery.core_state.inputs import AgentUp, WorkersPolled
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_workers.protocol.answers import AgentFailure
from holdfast_workers.protocol.findings import GuardAction, GuardKind, ReplicaFinding, TripReport
from holdfast_workers.protocol.messages import ErrorKind
from holdfast_workers.protocol.signals import ZygoteLost


def test_an_unreported_death_is_detected_within_two_polls() -> None:
    job = running(cluster(standbys=0, mesh={"dp_shard": 1}, workers_per_node=1))
    job.lose_signals("n0", for_s=4.0)
    died_at = job.now
    job.kill_rank(0)
    job.run_until(lambda: job.core.stage is not Stage.RUNNING)
    assert job.now - died_at < 2.1
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert incident["cause"] == "worker_crash"
    assert "no signal reported its end" in incident["evidence"][0]


def test_an_unreported_error_is_detected_with_its_message() -> None:
    job = running(cluster())
    job.lose_signals("n1", for_s=4.0)
    agent = job.agents["n1"]
    worker = next(worker for worker in agent.workers.values() if worker.rank == 2)
    job.fail_worker(agent, worker, ErrorKind.USER, "no such luck", type_="ValueError")
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert (incident["cause"], len(incident["lost"])) == ("user_error", 1)
    assert "no such luck" in incident["evidence"][0]


def test_a_forked_rank_whose_signals_were_all_lost_is_known_from_polls() -> None:
    job = running(cluster(standbys=0, mesh={"dp_shard": 1}, workers_per_node=1, steps=400))
    job.agents["n0"].workers.clear()
    job.lose_signals("n0", for_s=60.0)
    job.run_until(lambda: len(forming(job)) == 2 and job.core.committed >= 20)
    assert forming(job)[1]["members"][0]["worker"] is None
    worker = next(iter(job.agents["n0"].workers.values()))
    job.fail_worker(job.agents["n0"], worker, ErrorKind.USER, "no such luck", type_="ValueError")
    assert job.run().outcome == "SUCCEEDED"


def all_fail_unheard(job: SimulatedCluster, kind: ErrorKind, **detail: Any) -> None:
    for agent in [job.agents[name] for name in ("n0", "n1")]:
        job.lose_signals(agent.name, for_s=4.0)
        for worker in [worker for worker in agent.workers.values() if worker.rank is not None]:
            job.fail_worker(agent, worker, kind, "as all ranks found", **detail)


def test_an_unreported_corruption_excludes_the_corrupt_state() -> None:
    job = running(cluster())
    step = job.core.committed
    finding = ReplicaFinding(job.core.attempt, step, step, changed=(2,))
    all_fail_unheard(job, ErrorKind.CORRUPTION, finding=finding)
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert incident["cause"] == "corruption"
    assert [fault["rank"] for fault in incident["lost"]] == [2]
    corrupt = [
        event["corrupt"] for event in job.emitted(EventKind.CHECKPOINT_BAD) if "corrupt" in event
    ]
    assert corrupt == [{"attempt": finding.attempt, "step": step}]


def test_an_unreported_guard_trip_is_in_the_ledger() -> None:
    job = running(cluster())
    step = job.core.committed
    trip = TripReport(
        GuardKind.LOSS_SPIKE,
        step,
        window=step,
        decision=GuardAction.ROLLBACK,
        why="",
        skipped=(step, step + 1),
        back_to=step - 1,
    )
    all_fail_unheard(job, ErrorKind.GUARD, trip=trip)
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert incident["cause"] == "guard"
    assert [event["ledger"] for event in job.emitted(EventKind.GUARD_TRIPPED)] == [
        [[step, step + 1]]
    ]


def test_the_last_signals_of_a_job_may_be_lost() -> None:
    job = running(cluster(), step=25)
    job.lose_signals("n0", for_s=0.8)
    job.lose_signals("n1", for_s=0.8)
    assert job.run().outcome == "SUCCEEDED"
    assert not closed(job)


def test_the_failure_of_the_last_save_may_be_lost() -> None:
    job = running(cluster(), step=25)
    job.lose_signals("n0", for_s=1.5)
    job.lose_signals("n1", for_s=1.5)
    job.shard_failures = 1
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert incident["cause"] == "checkpoint_failed"
    assert "no space left on device" in incident["evidence"][0]


def test_one_poll_proves_nothing_because_it_may_be_older_than_a_signal() -> None:
    job = running(cluster())
    agent = job.agents["n0"]
    before = WorkersPolled("n0", agent.incarnation, ())
    job.feed(before)
    report = agent.report()
    job.feed(WorkersPolled("n0", report.incarnation, report.workers))
    job.feed(before)
    assert job.core.stage is Stage.RUNNING
    job.feed(WorkersPolled("n0", "an earlier incarnation", ()))
    job.feed(WorkersPolled("n0", "an earlier incarnation", ()))
    assert job.core.stage is Stage.RUNNING
    assert len(forming(job)) == 1


def reported_failure(job: SimulatedCluster, agent: str) -> str:
    record = job.core.state.roster.find(agent)
    return record.report.failure.message if record and record.report.failure else ""


def test_an_agent_that_cannot_fork_gets_no_ranks() -> None:
    job = running(cluster(steps=100))
    unfit = "its zygote ended 3 times in a row"
    job.agents["n2"].failure = AgentFailure(unfit)
    job.signal(job.agents["n2"], ZygoteLost(unfit), job.core.attempt)

    job.run_until(lambda: reported_failure(job, "n2") == unfit)
    job.kill_agent("n1", back_after_s=2.0)
    job.run_until(lambda: len(closed(job)) == 1)
    assert {event["agent"] for event in forming(job)[-1]["members"]} == {"n0", "n1"}


def test_a_failed_start_reports_the_problem_of_each_agent() -> None:
    job = cluster(start_s=5.0)
    for name in ("n1", "n2"):
        job.agents[name].never_ready = True
    job.agents["n1"].failure = AgentFailure("No module named 'flash'")
    job.send(AgentUp(job.agents["n1"].report()))
    end = job.run()
    assert end.code == "start_timeout"
    assert "not ready: n2" in end.message
    assert re.search(r"n1 on .+ cannot run workers: No module named 'flash'", end.message)


def test_an_unusable_node_without_a_standby_ends_the_start_at_once_by_its_name() -> None:
    job = cluster(standbys=0)
    job.agents["n1"].never_ready = True
    job.agents["n1"].failure = AgentFailure("/dev/shm/holdfast-0 is not a folder of this user")
    job.send(AgentUp(job.agents["n1"].report()))
    end, report = job.run(), job.agents["n1"].report()
    assert end.code == "start_failed"
    assert f"n1 on {report.host} (node {report.node_id}) cannot run workers" in end.message


def test_a_standby_takes_the_ranks_of_a_node_that_is_unusable_at_the_start() -> None:
    job = cluster()
    job.agents["n0"].never_ready = True
    job.agents["n0"].failure = AgentFailure("/dev/shm/holdfast-0 is not a folder of this user")
    job.send(AgentUp(job.agents["n0"].report()))
    assert job.run().outcome == "SUCCEEDED"
    assert {event["agent"] for event in forming(job)[-1]["members"]} == {"n1", "n2"}
