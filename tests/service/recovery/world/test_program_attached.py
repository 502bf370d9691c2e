"""Programs that attach: one event per attempt and level, whichever rank is first."""

from __future__ import annotations

from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import cluster, running

from holdfast_service.job_model.supervisor_protocol import EventKind, Phase
from holdfast_workers.protocol.signals import ProgramAttached


def attach(job: SimulatedCluster, level: int, rank: int, attempt: int) -> None:
    agent, worker = next(
        (agent, worker)
        for agent in job.agents.values()
        for worker in agent.workers.values()
        if (worker.attempt, worker.rank) == (job.core.attempt, rank)
    )
    detail = ProgramAttached(level, "lightning")
    job.signal(agent, detail, attempt, rank=rank, worker=worker.name)
    until = job.now + 0.1
    job.run_until(lambda: job.now >= until)


def test_an_attempt_reports_each_level_once() -> None:
    job = running(cluster(steps=300))
    attempt = job.core.attempt
    for level, rank in ((1, 0), (1, 1), (2, 1), (1, 0), (2, 0)):
        attach(job, level, rank, attempt)
    assert job.emitted(EventKind.PROGRAM_ATTACHED) == [
        {"attempt": attempt, "level": level, "integration": "lightning"} for level in (1, 2)
    ]


def test_where_the_memory_checkpoints_lie_is_known_as_soon_as_there_is_one() -> None:
    job = running(cluster(command=("train",), steps=300))
    attach(job, 1, 0, 1)
    assert job.emitted(EventKind.MEMORY_PLACED) == []
    for rank in (0, 1):
        attach(job, 2, rank, 1)
    assert [event["attempt"] for event in job.emitted(EventKind.MEMORY_PLACED)] == [1]
    job.kill_rank(1)
    job.run_until(lambda: job.core.attempt > 1)
    job.run_until(lambda: job.core.phase is Phase.RUNNING)
    assert [event["attempt"] for event in job.emitted(EventKind.MEMORY_PLACED)] == [1, 2]


def test_a_former_attempt_reports_nothing() -> None:
    job = running(cluster(steps=300))
    former = job.core.attempt
    job.kill_rank(1)
    job.run_until(lambda: job.core.attempt > former)
    running(job)
    attach(job, 1, 0, former)
    assert job.emitted(EventKind.PROGRAM_ATTACHED) == []
    attach(job, 1, 0, job.core.attempt)
    assert [event["attempt"] for event in job.emitted(EventKind.PROGRAM_ATTACHED)] == [former + 1]
