"""Cleanup orders of the core for the remote tier, and the handling of their results."""

from __future__ import annotations

from tests.support.simulation.simulated_jobs import cluster, running

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_workers.protocol import commands
from holdfast_workers.protocol.signals import (
    RetentionDone,
    ShardRecord,
    ShardSaved,
    Signal,
)


def _orders(of: inputs.Input, job) -> list[commands.TidyRemoteTier]:  # type: ignore[no-untyped-def]
    returned = job.core.handle(of, job.now)
    return [effect for effect in returned if isinstance(effect, commands.TidyRemoteTier)]


def test_a_checkpoint_off_the_present_line_is_marked_bad_before_retention_counts_it() -> None:
    job = running(cluster(), step=13)
    job.kill_rank(1)
    job.run_until(lambda: job.core.attempt == 2 and job.core.stage is Stage.RUNNING)
    late = inputs.CheckpointFinalized(29, 1, "mem://29.1", 1)
    (order,) = _orders(late, job)
    assert order.bad == {"mem://29.1"}
    assert order.attempt == 2
    (again,) = _orders(inputs.CheckpointFinalized(13, 2, "mem://13.2", 1), job)
    assert "mem://29.1" in again.bad  # in case the first order failed


def test_a_cleanup_order_lists_unfinished_checkpoints() -> None:
    job = running(cluster(), step=13)
    agent, shard = job.agents["n0"], ShardRecord(rank=0, step=13, attempt=1, nbytes=1)
    saved = Signal(ShardSaved(shard), "n0", agent.incarnation, 99, job.now, 1, 0)
    job.core.handle(inputs.Signals((saved,)), job.now)
    (order,) = _orders(inputs.CheckpointFinalized(12, 1, "mem://12.1", 1), job)
    assert (13, 1) in order.unfinished


def test_deletions_by_retention_are_emitted_and_its_failure_is_harmless() -> None:
    job = running(cluster(), step=15)
    job.run_until(lambda: bool(job.emitted(EventKind.CHECKPOINT_SAVED)))
    (uri,) = {event["uri"] for event in job.emitted(EventKind.CHECKPOINT_SAVED)}
    for deleted, message in (({}, "no such bucket"), ({uri: "not among the newest 1"}, "")):
        job.signal(job.agents["n0"], RetentionDone(10, deleted, message), 1)
    assert job.run().outcome == "SUCCEEDED"
    assert [event["uri"] for event in job.emitted(EventKind.CHECKPOINT_DELETED)] == [uri]


def test_the_end_of_a_job_waits_for_cleanup_for_a_limited_time() -> None:
    job = cluster()
    job.tidies = False
    state = job.core.state
    job.run_until(
        lambda: (
            job.core.stage is Stage.FINISHING
            and state.saves.has_final(state.ending.last_step, state.progress.line)
        )
    )
    durable_at = job.now
    assert job.run().outcome == "SUCCEEDED"
    assert 0 < job.now - durable_at <= job.config.last_tidy_s + 2
