"""Draining nodes: their ranks leave in time, and no node is blamed."""

from __future__ import annotations

import queue
import time
from typing import Any

from tests.service.recovery.faults.test_hang_suspicion import watched
from tests.service.recovery.faults.test_node_eviction import hosts, set_aside
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import closed, cluster, forming, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.recovery.core_state import effects as fx
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.supervisor.drain_watch import DrainWatch
from holdfast_workers.protocol import commands

WAIT_S = 60.0


def drain(job: SimulatedCluster, *agents: str, in_s: float | None = 30.0) -> None:
    """Announce the removal of these agents' nodes in `in_s` seconds; None: without a time."""
    at = None if in_s is None else job.now + in_s
    ids = [job.agents[name].report().node_id for name in agents]
    job.send(inputs.NodesDraining(dict.fromkeys(ids, at)))


def paces(effects: list[fx.Effect]) -> list[tuple[int, int]]:
    return [
        (effect.memory, effect.remote)
        for effect in effects
        if isinstance(effect, commands.SetIntervals)
    ]


def test_ranks_leave_a_draining_node_for_the_standby_before_its_removal() -> None:
    job = running(cluster(steps=100))
    drain(job, "n0")
    began = job.now
    job.run_until(lambda: bool(closed(job)))
    assert job.now - began < 10.0
    assert hosts(forming(job)[-1]) == {"n1", "n2"}
    (incident,) = closed(job)
    assert (incident["cause"], incident["decision"]) == ("preempted", "replace the node")
    assert "about to remove it, at " in incident["reason"]
    assert incident["steps_lost"] <= 1
    assert len(incident["preemptions"]) == 1 and incident["failures"] == []
    (event,) = job.emitted(EventKind.NODE_DRAINING)
    assert (event["agent"], event["node_id"], event["ranks"]) == ("n0", "n0-1", [0, 1])
    job.kill_node("n0", back_after_s=None)
    assert job.run().outcome == "SUCCEEDED"
    assert len(closed(job)) == 1


def test_without_a_standby_a_drain_saves_every_step_and_counts_as_a_preemption() -> None:
    job = running(cluster(standbys=0, steps=200, remote={"every_steps": 50}))
    effects = watched(job)
    drain(job, "n0", in_s=None)
    job.run_until(lambda: job.core.committed >= 30)
    assert paces(effects) == [(1, 1)]
    assert not closed(job) and len(forming(job)) == 1
    job.kill_node("n0", back_after_s=2.0)  # another machine replaces it
    job.run_until(lambda: bool(closed(job)))
    (incident,) = closed(job)
    assert incident["cause"] == "node_lost"
    assert len(incident["preemptions"]) == 1 and incident["failures"] == []
    assert incident["offences"] == [], "no node is blamed for an announced removal"
    assert incident["lost"][0]["on_notice"]
    facts = Facts.from_events(job.events)
    assert (len(facts.preemptions), facts.failures, facts.offences) == (1, (), ())
    orders = [order.intervals for order in (job.orders[max(job.orders)],)]
    assert orders == [(1, 50)], "the new node does not drain"
    assert job.run().outcome == "SUCCEEDED"


def test_a_node_lost_without_notice_is_a_failure() -> None:
    job = running(cluster(steps=100))
    drain(job, "n1")
    job.run_until(lambda: bool(closed(job)))
    job.kill_node("n0", back_after_s=2.0)
    assert job.run().outcome == "SUCCEEDED"
    first, second = closed(job)
    assert first["failures"] == [] and len(second["failures"]) == 1
    assert not any(fault["on_notice"] for fault in second["lost"])


def test_a_draining_standby_gets_no_rank_and_keeps_copies_only_as_a_last_resort() -> None:
    job = running(cluster(steps=100, standbys=2))
    drain(job, "n2")
    set_aside(job, "n0")
    job.run_until(lambda: bool(closed(job)))
    assert hosts(forming(job)[-1]) == {"n1", "n3"}
    placed = job.emitted(EventKind.MEMORY_PLACED)[-1]["partners"]
    assert {name for names in placed.values() for name in names} == {"n1", "n3"}
    assert job.run().outcome == "SUCCEEDED"


def test_copies_move_away_from_a_draining_partner() -> None:
    job = running(cluster(steps=100, workers_per_node=4, standbys=2))
    before = job.emitted(EventKind.MEMORY_PLACED)[-1]["partners"]
    assert {name for names in before.values() for name in names} == {"n1", "n2"}
    drain(job, "n1")
    assert job.run().outcome == "SUCCEEDED"
    after = job.emitted(EventKind.MEMORY_PLACED)[-1]["partners"]
    assert {name for names in after.values() for name in names} == {"n2"}
    assert not closed(job)


class FakeAgents:
    """Agents of a cluster that returns, or raises, the answers of a test in order."""

    seats = ("n0",)

    def __init__(self, *answers: dict[str, float | None] | Exception) -> None:
        self.answers = list(answers)

    def draining(self) -> dict[str, float | None]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_draining_nodes_are_reported_once_and_a_silent_cluster_reports_nothing(
    capsys: Any,
) -> None:
    received: queue.Queue[inputs.NodesDraining] = queue.Queue()
    agents = FakeAgents(
        {}, ConnectionError("no head"), {"a": 5.0}, {"a": 5.0}, {"a": 6.0, "b": None}
    )
    watch = DrainWatch(agents, received.put)  # type: ignore[arg-type]
    deadline = time.monotonic() + WAIT_S
    while received.qsize() < 2:
        watch.refresh()
        assert time.monotonic() < deadline
    assert received.get() == inputs.NodesDraining({"a": 5.0})
    assert received.get() == inputs.NodesDraining({"a": 6.0, "b": None})
    assert "no head" in "".join(capsys.readouterr())
    watch.close()
