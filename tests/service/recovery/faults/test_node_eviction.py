"""Ranks on an unhealthy or avoided node: when they leave it, and when they stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given as always
from hypothesis import settings
from hypothesis import strategies as st
from tests.service.recovery.faults.test_hang_suspicion import watched
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import closed, cluster, forming, members, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.rank_assignment import (
    Assignment,
    CandidateNode,
    GroupHome,
    Shortage,
    assign,
)
from holdfast_service.policy.quarantine import Avoided, NodeStanding, node_name
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_workers.protocol import commands
from holdfast_workers.protocol.findings import HealthFinding, HealthReport, Level
from holdfast_workers.protocol.signals import NodeUnwell

ECC = HealthFinding(
    "accelerator", "ecc", Level.UNFIT, "1 uncorrectable memory errors on GPU-1", "GPU-1"
)
GONE = HealthFinding("accelerator", "xid", Level.UNFIT, "XID 79", "GPU-1", 79, lost=True)
HOT = HealthFinding("accelerator", "hw_thermal", Level.SUSPECT, "clocks halved", "GPU-1")


def report_findings(job: SimulatedCluster, agent: str, *findings: HealthFinding) -> None:
    of = job.agents[agent]
    of.health += 1
    of.findings = findings
    job.signal(of, NodeUnwell(HealthReport(of.health, findings)), job.core.attempt)


def set_aside(
    job: SimulatedCluster, *agents: str, standing: NodeStanding = NodeStanding.CORDONED
) -> None:
    reports = [job.agents[name].report() for name in agents]
    names = [node_name(report.node_id, report.host) for report in reports]
    job.send(inputs.NodesAvoided({name: Avoided(standing, "for repair") for name in names}))


def hosts(event: dict[str, Any]) -> set[str]:
    return {agent for agent, _ in members(event).values()}


def test_ranks_leave_an_unfit_node_for_the_standby_and_keep_their_steps() -> None:
    job = running(cluster())
    report_findings(job, "n0", ECC, HOT)
    assert job.run().outcome == "SUCCEEDED"
    assert hosts(forming(job)[-1]) == {"n1", "n2"}
    (incident,) = closed(job)
    assert incident["cause"] == "node_unwell" and incident["decision"] == "replace the node"
    assert "uncorrectable memory errors on GPU-1" in incident["reason"]
    assert incident["steps_lost"] <= 1
    (event,) = job.emitted(EventKind.NODE_HEALTH)
    assert [finding["kind"] for finding in event["findings"]] == ["ecc", "hw_thermal"]
    assert event["node_id"] == "n0-1"


def test_without_a_standby_an_unfit_node_keeps_its_ranks_and_is_reported() -> None:
    job = running(cluster(standbys=0))
    report_findings(job, "n0", ECC)
    assert job.run().outcome == "SUCCEEDED"
    assert len(forming(job)) == 1 and not closed(job)
    assert len(job.emitted(EventKind.NODE_HEALTH)) == 1


def test_ranks_leave_an_unfit_node_as_soon_as_a_standby_arrives() -> None:
    job = running(cluster())
    job.kill_node("n2", back_after_s=1.0)
    job.run_until(lambda: any(event["state"] == "lost" for event in job.emitted(EventKind.STANDBY)))
    report_findings(job, "n0", ECC)
    assert job.run().outcome == "SUCCEEDED"
    assert hosts(forming(job)[-1]) == {"n1", "n2"}


def test_without_a_standby_a_node_with_a_lost_device_ends_the_job() -> None:
    job = running(cluster(standbys=0, wait_for_replacement_s=5.0))
    report_findings(job, "n0", GONE)
    end = job.run()
    assert (end.outcome, end.code) == ("FAILED", "no_replacement")
    assert "XID 79" in end.message


def test_a_suspect_finding_moves_no_rank() -> None:
    job = running(cluster())
    report_findings(job, "n0", HOT)
    assert job.run().outcome == "SUCCEEDED"
    assert len(forming(job)) == 1


def test_ranks_leave_a_cordoned_node_and_stay_on_a_quarantined_one() -> None:
    for standing, left in ((NodeStanding.CORDONED, True), (NodeStanding.QUARANTINED, False)):
        job = running(cluster())
        set_aside(job, "n1", standing=standing)
        assert job.run().outcome == "SUCCEEDED"
        assert ("n1" in hosts(forming(job)[-1])) is not left
        assert [incident["cause"] for incident in closed(job)] == (["preempted"] if left else [])


def test_an_avoided_standby_gets_no_rank_and_a_cordoned_host_keeps_its_ranks() -> None:
    job = running(cluster())
    set_aside(job, "n2", "n0")
    job.run_until(lambda: job.core.committed >= 15)
    job.kill_rank(0)
    assert job.run().outcome == "SUCCEEDED"
    assert hosts(forming(job)[-1]) == {"n0", "n1"}, "no other node is available"


def test_ranks_do_not_leave_a_node_for_a_node_that_cannot_take_them() -> None:
    """Otherwise they would leave it repeatedly without moving."""
    job = running(cluster())
    report = job.agents["n2"].report()
    name = node_name(report.node_id, report.host)
    job.send(inputs.NodesAvoided({name: Avoided(NodeStanding.QUARANTINED, "of late")}))
    job.run_until(lambda: bool(job.core.state.nodes.avoided))
    report_findings(job, "n0", ECC)
    assert job.run().outcome == "SUCCEEDED"
    assert len(forming(job)) == 1


def test_no_rank_starts_on_an_avoided_node() -> None:
    job = cluster()
    set_aside(job, "n0")
    assert job.run().outcome == "SUCCEEDED"
    assert hosts(forming(job)[0]) == {"n1", "n2"}


def test_a_node_that_fails_its_first_check_gets_no_rank() -> None:
    job = cluster()
    bad = HealthFinding("preflight", "arithmetic", Level.UNFIT, "3 numbers of a product are wrong")
    job.agents["n0"].health, job.agents["n0"].findings = 1, (bad,)
    assert job.run().outcome == "SUCCEEDED"
    assert hosts(forming(job)[0]) == {"n1", "n2"}
    (event,) = job.emitted(EventKind.NODE_HEALTH)
    assert (event["agent"], event["findings"][0]["kind"]) == ("n0", "arithmetic")


def test_ranks_leave_a_node_that_fails_the_network_check() -> None:
    job = running(cluster())
    job.send(inputs.LinkChecked("n0", "an earlier incarnation", "refused"))
    job.send(inputs.LinkChecked("n1", job.agents["n1"].incarnation, "refused"))
    assert job.run().outcome == "SUCCEEDED"
    assert hosts(forming(job)[-1]) == {"n0", "n2"}
    assert "bytes do not reach the node of n1" in closed(job)[0]["reason"]


def test_a_node_that_passes_the_network_check_again_is_fit_again() -> None:
    job = running(cluster(standbys=0))
    life = job.agents["n1"].incarnation
    job.send(inputs.LinkChecked("n1", life, "refused"))
    job.run_until(lambda: bool(job.emitted(EventKind.NODE_HEALTH)))
    job.send(inputs.LinkChecked("n1", life, ""))
    job.run_until(lambda: len(job.emitted(EventKind.NODE_HEALTH)) == 2)
    assert job.emitted(EventKind.NODE_HEALTH)[-1]["findings"] == []


def test_a_late_health_report_changes_nothing() -> None:
    job = running(cluster())
    report_findings(job, "n0", HOT)
    job.run_until(lambda: bool(job.emitted(EventKind.NODE_HEALTH)))
    job.signal(job.agents["n0"], NodeUnwell(HealthReport(0, (ECC,))), job.core.attempt)
    assert job.run().outcome == "SUCCEEDED"
    assert len(forming(job)) == 1 and len(job.emitted(EventKind.NODE_HEALTH)) == 1


def test_a_restarted_supervisor_receives_findings_from_the_agents() -> None:
    job = running(cluster(standbys=0))
    report_findings(job, "n0", ECC)
    job.run_until(lambda: bool(job.emitted(EventKind.NODE_HEALTH)))
    job.restart_supervisor()
    job.run_until(lambda: job.core.stage is Stage.RUNNING)
    assert job.core.state.nodes.health["n0"].findings == (ECC,)
    assert Facts.from_events(job.events).attempt == 1


def test_a_new_incarnation_has_no_findings_of_the_former_one() -> None:
    job = running(cluster(standbys=0))
    report_findings(job, "n0", ECC)
    job.kill_agent("n0", back_after_s=0.5)
    assert job.run().outcome == "SUCCEEDED"
    assert hosts(forming(job)[-1]) == {"n0", "n1"}


GROUPS = ((0, 1), (2, 3), (4,))


@settings(max_examples=300)
@always(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 3)), min_size=1, max_size=6),
    st.lists(st.none() | st.integers(0, 5), min_size=3, max_size=3),
)
def test_no_group_moves_to_an_avoided_node(
    drawn: list[tuple[bool, bool, int]], at: list[int | None]
) -> None:
    nodes = [
        CandidateNode(f"n{i}", "", capacity, ready, avoid=avoid)
        for i, (ready, avoid, capacity) in enumerate(drawn)
    ]
    homes = {
        index: GroupHome(f"n{seat}", "", alive=True)
        for index, seat in enumerate(at)
        if seat is not None and seat < len(nodes)
    }
    result = assign(GROUPS, homes, nodes)
    free = assign(GROUPS, homes, [CandidateNode(n.agent, "", n.capacity, n.ready) for n in nodes])
    if isinstance(result, Shortage):
        return
    assert isinstance(free, Assignment), "avoiding a node never adds capacity"
    by_name = {node.agent: node for node in nodes}
    for index, group in enumerate(GROUPS):
        (seat,) = {placed.agent for placed in result.placed if placed.rank in group}
        if by_name[seat].avoid:
            assert index in homes and homes[index].agent == seat
            others = [n for n in nodes if n.ready and not n.avoid]
            used = {n.agent: 0 for n in others}
            for placed in result.placed:
                if placed.agent in used:
                    used[placed.agent] += 1
            assert all(n.capacity - used[n.agent] < len(group) for n in others), "it had to stay"


def standings(job: SimulatedCluster) -> list[str]:
    return [event["state"] for event in job.emitted(EventKind.STANDBY) if event["agent"] == "n2"]


def uncordoned(
    job: SimulatedCluster, standing: NodeStanding = NodeStanding.QUARANTINED
) -> SimulatedCluster:
    """The standby's node was avoided and may be used again."""
    set_aside(job, "n2", standing=standing)
    job.run_until(lambda: bool(job.core.state.nodes.avoided))
    job.send(inputs.NodesAvoided({}))
    job.run_until(lambda: not job.core.state.nodes.avoided)
    return job


def test_a_node_that_returns_to_use_is_checked_before_it_gets_a_rank() -> None:
    for standing in (NodeStanding.QUARANTINED, NodeStanding.CORDONED):
        job = uncordoned(running(cluster(steps=60)), standing)
        report_findings(job, "n0", ECC)
        job.run_until(lambda job=job: bool(job.emitted(EventKind.NODE_HEALTH)))  # type: ignore[misc]
        assert not job.emitted(EventKind.INCIDENT_OPENED)
        assert standings(job)[-1] == "checking"
        assert job.run().outcome == "SUCCEEDED"
        assert hosts(forming(job)[-1]) == {"n1", "n2"}
        kinds = [event.kind for event in job.events]
        opened = kinds.index(EventKind.INCIDENT_OPENED)
        ready = [n for n, kind in enumerate(kinds) if kind == EventKind.STANDBY]
        assert any("ready" in job.events[n].data["state"] for n in ready if n < opened)
        assert job.checks == ["n2"]
        assert standings(job)[-2:] == ["checking", "ready"]


def test_a_node_that_returns_to_use_and_fails_its_check_gets_no_rank() -> None:
    job = running(cluster(steps=60))
    bad = HealthFinding("preflight", "arithmetic", Level.UNFIT, "3 numbers of a product are wrong")
    job.agents["n2"].health, job.agents["n2"].findings = 1, (bad,)
    uncordoned(job)
    report_findings(job, "n0", ECC)
    assert job.run().outcome == "SUCCEEDED"
    assert len(forming(job)) == 1
    assert standings(job)[-2:] == ["checking", "unfit"]


def test_a_failed_check_command_is_repeated() -> None:
    job = running(cluster(steps=60))
    job.agents["n2"].refused.add("check_node")
    effects = watched(job)
    uncordoned(job)
    report_findings(job, "n0", ECC)
    assert job.run().outcome == "SUCCEEDED"
    assert job.checks == ["n2"] and standings(job).count("checking") == 1
    assert len([effect for effect in effects if isinstance(effect, commands.CheckNode)]) == 2
    assert hosts(forming(job)[-1]) == {"n1", "n2"}


def test_an_unanswered_check_is_repeated_while_no_step_is_committed() -> None:
    job = running(cluster(steps=60, check_timeout_s=5.0))
    job.chaos = 1.0  # failures are not reported
    effects = watched(job)
    job.agents["n2"].reachable = False  # too briefly for its loss to be detected
    uncordoned(job)
    job.at(1.0, lambda: setattr(job.agents["n2"], "reachable", True))
    job.chaos = 0.0
    job.kill_node("n0", back_after_s=None)
    assert job.run().outcome == "SUCCEEDED"
    assert len([effect for effect in effects if isinstance(effect, commands.CheckNode)]) == 2
    assert hosts(forming(job)[-1]) == {"n1", "n2"}


def test_a_node_that_kept_its_ranks_is_not_checked() -> None:
    job = running(cluster(standbys=0))
    set_aside(job, "n1", standing=NodeStanding.QUARANTINED)
    job.run_until(lambda: bool(job.core.state.nodes.avoided))
    job.send(inputs.NodesAvoided({}))
    assert job.run().outcome == "SUCCEEDED"
    assert job.checks == [] and len(forming(job)) == 1


def test_a_waiting_job_uses_a_node_that_returned_after_its_check() -> None:
    job = running(cluster(steps=60))
    set_aside(job, "n2")
    job.run_until(lambda: bool(job.core.state.nodes.avoided))
    job.kill_node("n0", back_after_s=None)
    job.run_until(lambda: job.core.stage is Stage.WAITING)
    job.send(inputs.NodesAvoided({}))
    assert job.run().outcome == "SUCCEEDED"
    assert job.checks == ["n2"]
    assert hosts(forming(job)[-1]) == {"n1", "n2"}


SETTLED_S = 5.0
"""After this no message about the loss of a node is under way, which might end the wait."""


def test_a_waiting_job_uses_its_restarted_node_when_the_node_is_uncordoned() -> None:
    job = running(cluster(standbys=0, steps=60))
    set_aside(job, "n0")
    job.run_until(lambda: bool(job.core.state.nodes.avoided))
    job.kill_agent("n0", back_after_s=0.5)
    job.run_until(lambda: job.core.stage is Stage.WAITING and job.agents["n0"].ready)
    job.at(SETTLED_S, lambda: job.send(inputs.NodesAvoided({})))
    assert job.run().outcome == "SUCCEEDED"
    assert hosts(forming(job)[-1]) == {"n0", "n1"}


def unwell(job: SimulatedCluster) -> Callable[[], None]:
    report_findings(job, "n2", ECC)
    return lambda: report_findings(job, "n2")


def out_of_reach(job: SimulatedCluster) -> Callable[[], None]:
    life = job.agents["n2"].incarnation
    job.send(inputs.LinkChecked("n2", life, "refused"))
    return lambda: job.send(inputs.LinkChecked("n2", life, ""))


def cordoned(job: SimulatedCluster) -> Callable[[], None]:
    """It is only quarantined later: a last resort, and there is no other node."""
    set_aside(job, "n2")
    return lambda: set_aside(job, "n2", standing=NodeStanding.QUARANTINED)


@pytest.mark.parametrize("spoil", [unwell, out_of_reach, cordoned])
def test_a_waiting_job_uses_a_standby_that_is_usable_again(
    spoil: Callable[[SimulatedCluster], Callable[[], None]],
) -> None:
    """`spoil` makes the standby unusable, and returns what makes it usable."""
    job = running(cluster(steps=60))
    heal = spoil(job)
    job.kill_node("n0", back_after_s=None)
    job.run_until(lambda: job.core.stage is Stage.WAITING)
    job.at(SETTLED_S, heal)
    assert job.run().outcome == "SUCCEEDED"
    assert hosts(forming(job)[-1]) == {"n1", "n2"}
