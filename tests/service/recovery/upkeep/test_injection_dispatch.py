"""Dispatch of an injected fault: once, to the agent that hosts its rank, when one exists."""

from __future__ import annotations

import pytest
from tests.support.simulation.core_states import running_state
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import cluster, is_live, present, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.recovery.core_state.effects import Emit
from holdfast_service.recovery.core_state.inputs import CommandFailed, FaultRequested, Tick
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.upkeep import injection_dispatch
from holdfast_workers.fault_injection.kinds import FaultKind, Injection
from holdfast_workers.protocol.commands import CommandKind, InjectFault


def dispatched(job: SimulatedCluster, number: int, fault: Injection) -> list[tuple[str, int]]:
    """The agents that receive the fault at once."""
    effects = job.core.handle(FaultRequested(number, fault), job.now)
    return [(effect.agent, effect.number) for effect in effects if isinstance(effect, InjectFault)]


def dispatched_later(job: SimulatedCluster) -> list[tuple[str, int]]:
    effects = job.core.handle(Tick(), job.now)
    return [(effect.agent, effect.number) for effect in effects if isinstance(effect, InjectFault)]


@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.NODE_LOSS])
def test_a_fault_of_a_rank_or_its_node_goes_to_the_hosting_agent(kind: FaultKind) -> None:
    job = running(cluster())
    assert dispatched(job, 1, Injection(kind, rank=3)) == [("n1", 1)]
    assert dispatched_later(job) == []


def test_a_fault_of_the_remote_tier_goes_to_every_agent_including_standbys() -> None:
    job = running(cluster())
    assert dispatched(job, 1, Injection(FaultKind.DISK_FULL)) == [("n0", 1), ("n1", 1), ("n2", 1)]


def test_a_fault_requested_before_the_first_world_waits_for_it() -> None:
    job = cluster()
    assert dispatched(job, 1, Injection(FaultKind.KILL, rank=0)) == []
    job.run_until(lambda: not job.core.state.inbox.requested_faults)
    assert job.core.stage is not Stage.ASSEMBLING


def test_a_fault_during_a_recovery_goes_to_the_former_host_of_its_rank() -> None:
    job = running(cluster())
    job.kill_rank(1)
    job.run_until(lambda: job.core.stage is Stage.FENCING)
    assert dispatched(job, 1, Injection(FaultKind.KILL, rank=2)) == [("n1", 1)]


def test_a_fault_for_a_lost_agent_waits_for_the_next_world() -> None:
    job = running(cluster())
    job.kill_node("n0")
    job.run_until(lambda: not is_live(job, "n0"))
    assert dispatched(job, 1, Injection(FaultKind.KILL, rank=0)) == []
    job.run_until(lambda: not job.core.state.inbox.requested_faults)
    assert present(job)[0].agent == "n2"


def test_a_fault_for_a_restarted_agent_waits_for_the_next_world() -> None:
    state = running_state(incarnations={"n0": "former"})
    state.inbox.keep_fault(FaultRequested(1, Injection(FaultKind.KILL, rank=0)))
    state.inbox.keep_fault(FaultRequested(2, Injection(FaultKind.KILL, rank=3)))
    injection_dispatch.dispatch(state)
    (effect,) = state.take_effects()
    assert isinstance(effect, InjectFault)
    assert (effect.agent, effect.number) == ("n1", 2)
    assert [fault.number for fault in state.inbox.requested_faults] == [1]


def test_a_fault_that_cannot_be_injected_is_emitted_and_condemns_no_attempt() -> None:
    job = running(cluster())
    failed = CommandFailed("n0", CommandKind.INJECT_FAULT, 0, "CannotInject: it is no local node")
    effects = job.core.handle(failed, job.now)
    assert [effect.event.kind for effect in effects if isinstance(effect, Emit)] == [
        EventKind.FAULT_FAILED
    ]
    assert job.core.stage is Stage.RUNNING
