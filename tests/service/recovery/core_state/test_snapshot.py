"""The core's state as one value, which later inputs do not change."""

from __future__ import annotations

import dataclasses

from tests.support.simulation.simulated_jobs import closed, cluster, running

from holdfast_service.recovery.core_state.stage_timer import Stage


def test_a_snapshot_shows_the_present_world() -> None:
    job = running(cluster(), step=5)
    known = job.core.snapshot()
    assert (known.stage, known.attempt) == (Stage.RUNNING, job.core.attempt)
    assert known.committed == job.core.committed >= 5
    assert {rank: member.agent for rank, member in known.members.items()} == {
        0: "n0",
        1: "n0",
        2: "n1",
        3: "n1",
    }
    assert all(member.joined and not member.done for member in known.members.values())
    assert {agent.agent for agent in known.agents.values() if agent.live} == {"n0", "n1", "n2"}
    assert known.incident is None and not known.failures and not known.awaiting


def test_a_snapshot_names_the_open_incident_and_the_awaited_agents() -> None:
    job = running(cluster())
    job.kill_rank(1)
    job.run_until(lambda: job.core.stage is Stage.FENCING)
    known = job.core.snapshot()
    assert known.incident is not None and known.incident.number == 1
    assert known.awaiting == {"n0", "n1", "n2"}
    assert {agent for agent, _ in known.unproven} == {"n0", "n1"}
    assert not known.members
    assert len(known.failures) == 1 and known.deadline is not None


def test_later_inputs_do_not_change_a_snapshot() -> None:
    job = running(cluster())
    known = job.core.snapshot()
    before = dataclasses.asdict(known)
    job.kill_agent("n0", back_after_s=None)
    job.run_until(lambda: bool(closed(job)))
    assert dataclasses.asdict(known) == before
    assert job.core.snapshot().failures != known.failures
