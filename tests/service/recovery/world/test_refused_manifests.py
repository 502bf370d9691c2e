"""A manifest that the remote tier refused, without a live agent to retry it."""

from __future__ import annotations

from tests.support.simulation.simulated_jobs import cluster

from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_workers.protocol.commands import CommandKind, FinalizeCheckpoint


def test_a_refused_manifest_without_a_live_agent_sets_no_deadline() -> None:
    job = cluster(standbys=0)
    core = job.core
    job.run_until(lambda: any(manifest.agent for manifest in core.state.saves.pending.values()))
    (pending,) = core.state.saves.pending.values()
    assert pending.agent is not None
    agent, attempt, step = pending.agent, pending.attempt, pending.step
    refused = inputs.CommandFailed(
        agent, CommandKind.FINALIZE_CHECKPOINT, attempt, "503", step=step, refused=True
    )
    core.handle(refused, job.now)
    (pending,) = core.state.saves.pending.values()
    at = core.next_deadline()
    assert at is not None and at == pending.not_before
    for name in job.agents:
        core.handle(inputs.AgentLost(name, "silent", certain=False), job.now)
    while core.stage is not Stage.WAITING:
        core.handle(inputs.Tick(), core.next_deadline() or job.now)
    deadline = core.next_deadline()
    assert deadline is not None and deadline > pending.not_before
    report = job.agents["n0"].report()
    given = core.handle(inputs.AgentUp(report), pending.not_before + 1.0)
    assert any(isinstance(effect, FinalizeCheckpoint) for effect in given)
