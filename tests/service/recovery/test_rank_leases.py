"""Unreachable ranks: replaced once their lease has ended, and never while they may step.

The watchdog of the simulated cluster checks that no attempt steps after a later attempt (P1).
"""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.service.recovery.test_recovery_histories import play, prepared
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import is_live
from tests.support.simulation.simulated_network import START, STEPPING_S

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.recovery.core_state import inputs

LEASE_S, MARGIN_S = 2.0, 0.5  # of the histories
ONE_NODE = 4  # the layout with a world of one rank and a standby
TWO_NODES = 0  # the layout with a world of four ranks and a standby
NO_STANDBY = 1  # the same without the standby


def by_attempt(cluster: SimulatedCluster) -> dict[int, int]:
    """Steps per attempt."""
    attempts = [attempt for attempt, _ in cluster.committed]
    return {attempt: attempts.count(attempt) for attempt in sorted(set(attempts))}


def test_an_unreachable_world_holds_before_its_loss_is_detected_and_is_then_replaced() -> None:
    cluster = prepared(ONE_NODE, [], 0.0, 1)
    cut_at, missed_s = 1.5, 3.0
    cluster.at(cut_at, lambda: cluster.cut_off("n0", for_s=1000.0))
    end = cluster.run()
    assert end.outcome == "SUCCEEDED", end
    first = next(at for at in cluster.step_times if at[0] == 2)[2]
    last = max(at for attempt, _, at in cluster.step_times if attempt == 1)
    assert START + cut_at + STEPPING_S / 2 < last <= START + cut_at + STEPPING_S
    assert START + cut_at + missed_s <= first < START + cut_at + missed_s + 2.0


def test_without_leases_there_is_no_replacement_without_proof() -> None:
    cluster = prepared(ONE_NODE, [], 0.0, 1, lease_s=0.0, wait_for_replacement_s=20.0)
    cluster.at(1.5, lambda: cluster.cut_off("n0", for_s=1000.0))
    assert cluster.run().code == "no_replacement"
    assert set(by_attempt(cluster)) == {1}


def test_a_lease_outlasts_its_supervisor_and_a_restart_costs_no_step() -> None:
    cluster = prepared(ONE_NODE, [], 0.0, 1)
    cluster.at(1.5, cluster.restart_supervisor)
    assert cluster.run().outcome == "SUCCEEDED"
    assert by_attempt(cluster) == {1: cluster.config.steps}


def test_a_new_supervisor_waits_for_all_leases_that_its_predecessor_may_have_granted() -> None:
    cluster = prepared(ONE_NODE, [], 0.0, 1)
    cluster.at(1.5, lambda: cluster.cut_off("n0", for_s=1000.0))
    cluster.at(1.6, cluster.restart_supervisor)
    assert cluster.run().outcome == "SUCCEEDED"
    first = next(at for attempt, _, at in cluster.step_times if attempt > 1)
    assert first >= START + 1.6 + LEASE_S + 2 * MARGIN_S


def test_an_ended_lease_proves_nothing_about_an_agent_that_returned() -> None:
    cluster = prepared(ONE_NODE, [], 0.0, 1)
    cluster.run_until(lambda: len(cluster.committed) >= 3)
    life = cluster.agents["n0"].incarnation
    cluster.feed(inputs.LeaseEnded("n0", life))  # a late message: the agent has answered since
    cut_at = cluster.now
    cluster.cut_off("n0", for_s=1000.0, noticed_after_s=1.5)
    lost = inputs.AgentLost("n0", "cannot be asked", incarnation=life, certain=False)
    cluster.at(0.1, lambda: cluster.feed(lost))
    cluster.run_until(lambda: len(by_attempt(cluster)) == 2)
    assert cluster.now >= cut_at + 1.5


def test_a_stopped_host_proves_nothing_about_a_host_that_may_still_step() -> None:
    """Its contribution to the last agreement may arrive late: each host needs its own proof."""
    cluster = prepared(TWO_NODES, [], 0.0, 1)
    cluster.run_until(lambda: len(cluster.committed) >= 3)
    cut_at = cluster.now
    cluster.cut_off("n0", for_s=1000.0, noticed_after_s=5.0)
    life = cluster.agents["n0"].incarnation
    lost = inputs.AgentLost("n0", "cannot be asked", incarnation=life, certain=False)
    cluster.at(0.1, lambda: cluster.feed(lost))
    cluster.run_until(lambda: len(by_attempt(cluster)) == 2)
    assert cluster.now >= cut_at + 5.0


def test_a_report_received_after_its_agents_end_does_not_revive_the_agent() -> None:
    cluster = prepared(TWO_NODES, [], 0.0, 1)
    cluster.run_until(lambda: len(cluster.committed) >= 3)
    agent = cluster.agents["n0"]
    report = agent.report()
    cluster.feed(inputs.AgentLost("n0", "its process died", incarnation=report.incarnation))
    cluster.feed(inputs.AgentUp(report))
    assert not is_live(cluster, "n0")
    agent.die()
    cluster.at(1.0, lambda: cluster.restart_agent(agent, report.incarnation))
    assert cluster.run().outcome == "SUCCEEDED"


def test_an_agent_that_answers_after_its_end_was_reported_is_restarted_and_used_again() -> None:
    """The report was wrong. Nobody else would restart the agent, and its seat would stay empty."""
    cluster = prepared(NO_STANDBY, [], 0.0, 1)
    cluster.run_until(lambda: len(cluster.committed) >= 3)
    agent = cluster.agents["n0"]
    life = agent.incarnation
    agent.fence(2, kill=False)  # its ranks do not step: only its seat is of interest here
    cluster.feed(inputs.AgentLost("n0", "its process died", incarnation=life))
    cluster.feed(inputs.AgentUp(agent.report()))
    assert cluster.run().outcome == "SUCCEEDED", cluster.ended
    assert agent.incarnation != life


def test_resets_of_a_lifeline_that_connects_again_cost_nothing() -> None:
    cluster = prepared(TWO_NODES, [], 0.0, 1)
    cluster.run_until(lambda: len(cluster.committed) >= 3)
    for number in range(60):
        cluster.at(0.06 * number, partial(cluster.reset, f"n{number % 2}"))
    assert cluster.run().outcome == "SUCCEEDED"
    assert by_attempt(cluster) == {1: cluster.config.steps}


@pytest.mark.seconds
def test_one_world_steps_and_the_job_succeeds_through_thousands_of_resets() -> None:
    """Resets of all lifelines, long and short, among deaths of agents and of the supervisor."""
    for seed in range(40):
        rng = random.Random(seed)
        faults = [
            (rng.uniform(0.0, 12.0), "reset", rng.randrange(8), rng.choice((0, 0, 0, 1, 2, 4, 6)))
            for _ in range(100)
        ]
        faults += [
            (rng.uniform(0.0, 12.0), rng.choice(("supervisor", "agent")), rng.randrange(8), 0)
            for _ in range(rng.randrange(4))
        ]
        end = play(rng.choice((NO_STANDBY, TWO_NODES, ONE_NODE)), faults, 0.0, seed).ended
        assert end is not None and end.outcome == "SUCCEEDED", f"seed {seed}: {end}"


def test_an_adopted_wait_lasts_until_the_former_leases_have_ended() -> None:
    cluster = prepared(TWO_NODES, [], 0.0, 1, wait_for_replacement_s=4.0, lease_s=10.0)
    cluster.run_until(lambda: len(cluster.committed) >= 3)
    cluster.kill_agent("n2", back_after_s=None)
    cluster.cut_off("n0", for_s=2.5, noticed_after_s=1.0)
    cluster.run_until(lambda: len(cluster.emitted(EventKind.WAITING)) == 1)
    cluster.restart_supervisor()
    cluster.kill_agent("n0", back_after_s=0.5)
    assert cluster.run().outcome == "SUCCEEDED", cluster.ended


def test_a_lease_that_a_former_supervisor_missed_is_counted_from_the_next_ones_hello() -> None:
    faults = [
        (1.5, "supervisor", 0, 0),
        (3.65625, "supervisor", 0, 0),
        (3.640625, "reset", 0, 3),
        (0.375, "partition", 0, 0),
    ]
    end = play(ONE_NODE, faults, 0.3, 4).ended
    assert end is not None and end.outcome == "SUCCEEDED", end


@pytest.mark.seconds
@given(
    layout=st.sampled_from((NO_STANDBY, 3, ONE_NODE)),
    faults=st.lists(
        st.tuples(
            st.floats(0.0, 15.0, allow_nan=False),
            st.sampled_from(("partition", "reset", "supervisor", "agent", "rank")),
            st.integers(0, 7),
            st.integers(0, 7),
        ),
        max_size=12,
    ),
    chaos=st.sampled_from((0.0, 0.3)),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_only_one_world_steps_at_a_time_under_any_partition(
    layout: int, faults: list[tuple[float, str, int, int]], chaos: float, seed: int
) -> None:
    cluster = play(layout, faults, chaos, seed)
    assert cluster.ended is not None
    assert cluster.ended.outcome == "SUCCEEDED", cluster.ended
