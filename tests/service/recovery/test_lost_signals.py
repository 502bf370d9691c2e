"""A signal is a call, and may be lost: what it should have said is seen when agents are asked."""

from __future__ import annotations

from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import closed, cluster, forming, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.recovery.core_state.inputs import AgentUp, WorkersSeen
from holdfast_service.recovery.core_state.state import Stage
from holdfast_workers.protocol.messages import ErrorKind, SignalKind
from holdfast_workers.state.replicas import Finding


def test_a_death_that_nobody_heard_of_is_noticed_within_two_looks() -> None:
    job = running(cluster(standbys=0, mesh={"dp_shard": 1}, world_size=1, workers_per_node=1))
    job.lose_signals("n0", for_s=4.0)
    died_at = job.now
    job.kill_rank(0)
    job.run_until(lambda: job.core.stage is not Stage.RUNNING)
    assert job.now - died_at < 2.1
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert incident["cause"] == "worker_crash"
    assert "nobody had heard of its end" in incident["evidence"][0]


def test_an_error_that_nobody_heard_of_is_noticed_with_what_it_said() -> None:
    job = running(cluster())
    job.lose_signals("n1", for_s=4.0)
    agent = job.agents["n1"]
    worker = next(one for one in agent.workers.values() if one.rank == 2)
    job._failed(agent, worker, ErrorKind.USER, "no such luck", type_="ValueError")
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert (incident["cause"], len(incident["lost"])) == ("user_error", 1)
    assert "no such luck" in incident["evidence"][0]


def all_fail_unheard(job: SimulatedCluster, kind: ErrorKind, **told: object) -> None:
    for agent in [job.agents[name] for name in ("n0", "n1")]:
        job.lose_signals(agent.name, for_s=4.0)
        for worker in [one for one in agent.workers.values() if one.rank is not None]:
            job._failed(agent, worker, kind, "as all ranks found", **told)


def test_a_finding_that_nobody_heard_of_takes_the_corrupt_state_out_of_use() -> None:
    job = running(cluster())
    step = job.core.committed
    finding = Finding(job.core.attempt, step, step, changed=(2,))
    all_fail_unheard(job, ErrorKind.CORRUPTION, finding=finding.data())
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert incident["cause"] == "corruption"
    assert [one["rank"] for one in incident["lost"]] == [2]
    corrupt = [one["corrupt"] for one in job.told(EventKind.CHECKPOINT_BAD) if "corrupt" in one]
    assert corrupt == [{"attempt": finding.attempt, "step": step}]


def test_a_trip_that_nobody_heard_of_is_in_the_ledger_all_the_same() -> None:
    job = running(cluster())
    step = job.core.committed
    trip = {"kind": "spike", "step": step, "window": step, "skipped": [step, step + 1]}
    all_fail_unheard(job, ErrorKind.GUARD, trip={**trip, "back_to": step - 1})
    assert job.run().outcome == "SUCCEEDED"
    (incident,) = closed(job)
    assert incident["cause"] == "guard"
    assert [one["ledger"] for one in job.told(EventKind.GUARD_TRIPPED)] == [[[step, step + 1]]]


def test_the_last_words_of_a_job_may_be_lost_too() -> None:
    job = running(cluster(), step=25)
    job.lose_signals("n0", for_s=0.8)
    job.lose_signals("n1", for_s=0.8)
    assert job.run().outcome == "SUCCEEDED"
    assert not closed(job)


def test_one_look_proves_nothing_for_it_may_be_older_than_a_signal() -> None:
    job = running(cluster())
    agent = job.agents["n0"]
    before = WorkersSeen("n0", agent.incarnation, ())
    job.feed(before)
    report = agent.report()
    job.feed(WorkersSeen("n0", report.incarnation, report.workers))
    job.feed(before)
    assert job.core.stage is Stage.RUNNING
    job.feed(WorkersSeen("n0", "an earlier life", ()))
    job.feed(WorkersSeen("n0", "an earlier life", ()))
    assert job.core.stage is Stage.RUNNING
    assert len(forming(job)) == 1


def test_an_agent_that_cannot_fork_any_more_is_not_given_ranks() -> None:
    job = running(cluster(steps=100))
    unfit = {"unfit": "its zygote ended 3 times in a row"}
    job.agents["n2"].failure = {"message": unfit["unfit"]}
    job.signal(job.agents["n2"], SignalKind.ZYGOTE_LOST, job.core.attempt, detail=unfit)
    job.run_until(lambda: job.core._state.roster.record("n2").report.failure is not None)
    job.kill_agent("n1", back_after_s=2.0)
    job.run_until(lambda: len(closed(job)) == 1)
    assert {one["agent"] for one in forming(job)[-1]["members"]} == {"n0", "n1"}


def test_a_start_that_comes_to_nothing_says_what_each_agent_lacks() -> None:
    job = cluster(start_timeout_s=5.0)
    for name in ("n1", "n2"):
        job.agents[name].unready = True
    job.agents["n1"].failure = {"message": "No module named 'flash'"}
    job.send(AgentUp(job.agents["n1"].report()))
    end = job.run()
    assert end.code == "start_timeout"
    assert "not ready: n2" in end.message
    assert "n1 cannot run workers: No module named 'flash'" in end.message
