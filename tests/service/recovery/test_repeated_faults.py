"""Repeated faults on the simulated cluster: blamed nodes, programs that end themselves, attempts
without progress, and faults that only slow the job down."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.service.recovery.faults.test_node_eviction import ECC, report_findings
from tests.support.service.fake_cluster import row
from tests.support.simulation.core_states import NOW, running_state
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import closed, cluster, forming, present, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.effects import End
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.faults import judgement
from holdfast_workers.protocol.findings import ReplicaFinding
from holdfast_workers.protocol.messages import ErrorKind


def agents(job: SimulatedCluster) -> list[str]:
    return [event["agent"] for event in forming(job)[-1]["members"]]


def recovered(job: SimulatedCluster, incidents: int) -> None:
    job.run_until(lambda: len(closed(job)) >= incidents and job.core.stage is Stage.RUNNING)


def send_times(job: SimulatedCluster, slow_rank: int | None, first_step: int) -> None:
    """Forty steps in which `slow_rank` takes three times as long as its peers."""
    attempt, ranks = job.core.attempt, range(job.config.best_shape.world_size)
    times = tuple(3.0 if rank == slow_rank else 1.0 for rank in ranks)
    job.feed(
        inputs.StepsMeasured(
            tuple(
                replace(row(attempt, step), step_time_s=1.0, compute_s=times)
                for step in range(first_step, first_step + 40)
            )
        )
    )


def slow_down(job: SimulatedCluster, rank: int, times: int = 1) -> None:
    """The rank becomes slower than its peers; between two times it is as fast as they are."""
    for time in range(times):
        send_times(job, rank, 1 + 80 * time)
        send_times(job, None, 41 + 80 * time)


def accuse(job: SimulatedCluster, cause: Cause, agent: str) -> None:
    """The ranks of the agent should leave its node, for this cause."""
    match cause:
        case Cause.STRAGGLER:
            slow_down(job, next(rank for rank, seat in placed(job).items() if seat == agent))
        case Cause.NODE_UNWELL:
            report_findings(job, agent, ECC)
        case Cause.PREEMPTED:
            job.feed(inputs.NodesDraining({job.agents[agent].report().node_id: None}))


def placed(job: SimulatedCluster) -> dict[int, str]:
    return {rank: member.agent for rank, member in present(job).items()}


def crash_twice(job: SimulatedCluster) -> None:
    job.kill_rank(1, "SIGSEGV")
    recovered(job, 1)
    assert closed(job)[0]["decision"] == "replace the worker"
    assert agents(job) == ["n0", "n0", "n1", "n1"]
    job.kill_rank(0, "SIGSEGV")
    recovered(job, 2)


def test_ranks_that_crash_twice_on_a_node_move_to_the_standby() -> None:
    job = running(cluster(steps=200))
    crash_twice(job)
    assert agents(job) == ["n2", "n2", "n1", "n1"]
    incident = closed(job)[1]
    assert incident["decision"] == "replace the node"
    assert "to blame 2 times" in incident["reason"]
    assert [offence["node"] for offence in incident["offences"]] == ["n0"]
    assert {refused["decision"] for refused in incident["refused"]} >= {"re-form in place", "stop"}
    assert job.run().outcome == "SUCCEEDED"


def test_a_blamed_node_is_used_again_only_as_a_last_resort() -> None:
    job = running(cluster(steps=400))
    crash_twice(job)
    job.kill_agent("n2", back_after_s=5.0)
    recovered(job, 3)
    assert agents(job) == ["n0", "n0", "n1", "n1"], "better than waiting"
    job.run_until(lambda: job.agents["n2"].ready)
    job.kill_rank(2)
    recovered(job, 4)
    assert agents(job) == ["n2", "n2", "n1", "n1"]


def test_a_restarted_supervisor_remembers_blamed_nodes() -> None:
    job = running(cluster(steps=200))
    job.kill_rank(1, "SIGSEGV")
    recovered(job, 1)
    job.restart_supervisor()
    job.run_until(lambda: job.core.stage is Stage.RUNNING)
    job.kill_rank(1, "SIGSEGV")
    recovered(job, 2)
    assert agents(job) == ["n2", "n2", "n1", "n1"]


def test_a_node_is_not_blamed_for_processes_killed_from_outside() -> None:
    job = running(cluster(steps=200))
    for done in range(1, 4):
        job.kill_rank(1)
        recovered(job, done)
    assert agents(job) == ["n0", "n0", "n1", "n1"]


def test_a_program_that_exits_twice_at_a_step_is_a_user_error() -> None:
    job = running(cluster())
    job.kill_rank(1, "exit code 3")
    job.run_until(lambda: 1 in job.worlds.get(2, {}))
    job.kill_rank(1, "exit code 3")
    end = job.run()
    assert (end.outcome, end.code) == ("FAILED", "user_error")
    assert "exit code 3" in end.message


def test_out_of_memory_twice_at_a_step_ends_the_job_with_the_memory_figures() -> None:
    job = running(cluster())
    job.kill_rank(1, "SIGKILL", out_of_memory="3 MiB of 16384 MiB available")
    job.run_until(lambda: 1 in job.worlds.get(2, {}))
    job.kill_rank(1, "SIGKILL", out_of_memory="2 MiB of 16384 MiB available")
    end = job.run()
    assert (end.outcome, end.code) == ("FAILED", "out_of_memory")
    assert "2 MiB of 16384 MiB available" in end.message
    assert closed(job)[0]["cause"] == "out_of_memory"


def test_out_of_memory_at_a_later_step_is_new_even_after_an_older_restore() -> None:
    job = running(cluster(steps=200), 120)
    job.kill_node("n0", back_after_s=2.0)
    job.kill_node("n1", back_after_s=2.0)  # only the remote checkpoint of step 100 is left
    for done in (1, 2, 3):
        recovered(job, done)
        began = job.core.committed
        assert began < 115
        job.run_until(lambda began=began: job.core.committed > began)  # type: ignore[misc]
        if done < 3:
            job.kill_rank(1, "SIGKILL", out_of_memory="3 MiB of 16384 MiB available")
    assert [incident["cause"] for incident in closed(job)][1:] == ["out_of_memory"] * 2
    assert job.run().outcome == "SUCCEEDED"


def test_a_job_without_another_node_ends_at_the_second_corruption() -> None:
    job = running(cluster(standbys=0, steps=200))
    job.kill_rank(1, "SIGSEGV")
    recovered(job, 1)

    def corrupt() -> None:
        attempt, step = job.core.attempt, job.core.committed
        _, agent, worker = job.members_of(attempt)[0]
        assert worker is not None
        finding = ReplicaFinding(attempt, step, step, changed=(0,))
        job.fail_worker(agent, worker, ErrorKind.CORRUPTION, "it changed", finding=finding)

    corrupt()
    recovered(job, 2)
    assert [incident["decision"] for incident in closed(job)] == ["replace the worker"] * 2
    corrupt()
    assert job.run().code == "corruption"


def test_preemptions_are_counted_separately() -> None:
    job = running(cluster(steps=200, max_failures=0))
    job.kill_rank(1, "SIGTERM")
    recovered(job, 1)
    (incident,) = closed(job)
    assert incident["cause"] == "preempted"
    assert (incident["failures"], len(incident["preemptions"])) == ([], 1)
    assert incident["budget"]["preemptions"] == 1
    job.kill_rank(1)
    assert job.run().code == "too_many_failures"


@pytest.mark.parametrize("restarts", [False, True])
def test_attempts_that_make_no_new_step_end_the_job_long_before_the_budget(
    restarts: bool,
) -> None:
    job = running(cluster(max_failures=100))
    attempt = job.core.attempt

    def crash() -> None:
        if restarts and job.core.attempt == attempt + 2:
            job.restart_supervisor()
        job.kill_rank(1, "SIGSEGV")
        job.at(0.05, crash)

    crash()
    end = job.run()
    assert (end.outcome, end.code) == ("FAILED", "no_progress")
    assert "6 attempts in a row made no new step, 5 allowed" in end.message
    assert len(forming(job)) == 6


def lose_memory(job: SimulatedCluster) -> None:
    """Lose all nodes at once: only the remote tier is left."""
    for name in ("n0", "n1", "n2"):
        job.kill_node(name, back_after_s=5.0)


def test_repeated_steps_after_an_older_restore_count_as_progress() -> None:
    """Six faults, each 15 new steps after the last, far below the newest step ever reached."""
    job = cluster(steps=400, max_failures=100)
    job.remote_every = 100
    running(job, 299)
    lose_memory(job)
    for done in range(1, 7):
        recovered(job, done)
        stands = job.core.committed
        assert stands < 284, "the remote tier had an older state"
        if done == 3:
            job.restart_supervisor()

        def advanced(stands: int = stands) -> bool:
            return job.core.committed >= stands + 15

        job.run_until(advanced)
        job.kill_rank(1, "SIGSEGV")
    assert job.run().outcome == "SUCCEEDED"


def test_the_same_steps_repeated_from_one_state_are_no_progress() -> None:
    """A process always crashes at the same step, well past the only remaining state."""
    job = cluster(steps=400, max_failures=100)
    job.remote_every = 100
    running(job, 150)
    lose_memory(job)
    recovered(job, 1)
    for done in range(2, 9):
        job.run_until(lambda: job.core.committed >= 120)
        for agent in job.agents.values():
            agent.memory.clear()
        job.kill_rank(1, "SIGSEGV")

        def settled(done: int = done) -> bool:
            return len(closed(job)) >= done or job.core.stage is Stage.ENDED

        job.run_until(settled)
    assert job.run().code == "no_progress"


def test_processes_killed_from_outside_while_a_world_forms_are_no_lack_of_progress() -> None:
    job = running(cluster())
    for _ in range(8):
        attempt = job.core.attempt
        job.kill_rank(1)

        def forms_again(attempt: int = attempt) -> bool:
            return job.core.attempt > attempt and job.core.stage is Stage.FORMING

        job.run_until(forms_again)
        job.run_until(lambda: 1 in job.worlds.get(job.core.attempt, {}))
    assert job.run().outcome == "SUCCEEDED"


def test_a_straggler_without_a_better_node_is_emitted_once_and_costs_no_attempt() -> None:
    job = running(cluster(standbys=0, straggler_patience_s=0.0))
    slow_down(job, 0, times=2)
    events = job.emitted(EventKind.STRAGGLER)
    assert [event["state"] for event in events] == ["slow", "recovered"] * 2
    (incident,) = closed(job)
    assert (incident["decision"], incident["failures"]) == ("ignore", [])
    assert incident["resolution"] == "training goes on"
    assert [offence["node"] for offence in incident["offences"]] == ["n0"]
    assert Facts.from_events(job.events).offences == job.core.state.budget.offences
    assert job.run().outcome == "SUCCEEDED"
    assert len(forming(job)) == 1
    assert len(job.emitted(EventKind.INCIDENT_OPENED)) == 1


@pytest.mark.parametrize("spent", ["max_failures", "max_preemptions", "max_without_progress"])
@pytest.mark.parametrize("cause", [Cause.STRAGGLER, Cause.NODE_UNWELL, Cause.PREEMPTED])
def test_a_spent_budget_never_ends_a_job_that_still_commits_steps(cause: Cause, spent: str) -> None:
    job = running(cluster(straggler_patience_s=0.0, **{spent: 0}))  # type: ignore[arg-type]
    accuse(job, cause, "n0")
    assert job.run().outcome == "SUCCEEDED"
    counted = spent != ("max_failures" if cause is Cause.PREEMPTED else "max_preemptions")
    counted &= (cause, spent) != (Cause.PREEMPTED, "max_without_progress")
    assert len(forming(job)) == (1 if counted else 2)


def test_the_last_budget_unit_is_used_to_leave_a_slow_node() -> None:
    job = running(cluster(max_failures=1, steps=100, straggler_patience_s=0.0))
    slow_down(job, 0)
    recovered(job, 1)
    assert closed(job)[0]["decision"] == "replace the node"
    slow_down(job, 2)
    assert closed(job)[1]["decision"] == "ignore"
    assert "no budget is left" in closed(job)[1]["reason"]
    assert job.run().outcome == "SUCCEEDED"


def test_a_fault_beside_an_unhealthy_node_still_counts_against_the_budget() -> None:
    state = running_state(max_failures=0)
    member = state.worlds.find_member("n0")
    assert member is not None
    for cause, worker in ((Cause.WORKER_CRASH, member.worker), (Cause.NODE_UNWELL, None)):
        fault = Fault(cause, 1, NOW, f"{cause} on n0", 0, agent="n0", worker=worker)
        judgement.report_fault(state, fault, NOW)
    assert not judgement.judge_batch(state, NOW)
    (end,) = [effect for effect in state.take_effects() if isinstance(effect, End)]
    assert end.code == "too_many_failures"
