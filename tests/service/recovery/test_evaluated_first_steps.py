"""Faults in the evaluation of an attempt's first step, which is computed and not committed yet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.support.simulation.simulated_agent import SimAgent, SimWorker
from tests.support.simulation.simulated_cluster import SimulatedCluster
from tests.support.simulation.simulated_jobs import closed, cluster, forming
from tests.support.simulation.simulated_network import START

from holdfast_service.job_model.supervisor_protocol import EventKind, StopKind
from holdfast_service.policy.decision_ladder import DATA_OUTAGE_S
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_workers.protocol.messages import ErrorKind

EVALUATED, EVALUATION_S = 10, 300.0
HOUR_S = 3600.0


class SparseCheckpoints(SimulatedCluster):
    """Memory has the state of each fourth step."""

    def _keep_state(
        self, rank: int, agent: SimAgent, worker: SimWorker, attempt: int, step: int
    ) -> None:
        if step % 4 == 0:
            super()._keep_state(rank, agent, worker, attempt, step)


def job(kind: type[SimulatedCluster] = SimulatedCluster, **limits: Any) -> SimulatedCluster:
    """A job whose evaluation lasts far longer than a first step may."""
    made = cluster(**{"first_step_s": 60.0, **limits})
    made = kind(made.config, 0)
    made.evaluation_s = {EVALUATED: EVALUATION_S}
    return made


def lack_data(made: SimulatedCluster, attempt: int, _: int = 0) -> bool:
    for _, agent, worker in made.members_of(attempt):
        assert worker is not None
        made.fail_worker(agent, worker, ErrorKind.DATA, "no shard", type_="DataUnavailable")
    return True


def crash(made: SimulatedCluster, ended_by: str, *_: int) -> bool:
    made.kill_rank(0, ended_by)
    return True


def evaluating(made: SimulatedCluster) -> SimulatedCluster:
    """The second attempt has computed its first step, and evaluates it."""
    made.run_until(lambda: (1, EVALUATED - 1) in made.committed)
    made.at(1.0, lambda: made.kill_rank(1))

    def evaluates() -> bool:
        world = made.core.state.worlds.present
        return world is not None and world.attempt == 2 and world.evaluates_first

    made.run_until(evaluates)
    return made


@pytest.mark.parametrize("kind", [SimulatedCluster, SparseCheckpoints])
def test_validation_that_does_not_come_for_hours_ends_the_job(
    kind: type[SimulatedCluster],
) -> None:
    made = job(kind)
    made.fail_evaluation = partial(lack_data, made)
    end = made.run(2 * DATA_OUTAGE_S)
    assert (end.outcome, end.code) == ("FAILED", "data_unavailable"), end
    assert made.now - START < DATA_OUTAGE_S + 3 * EVALUATION_S
    assert max(step for _, step in made.committed) == EVALUATED - 1


def test_an_outage_of_validation_is_one_incident_and_uses_no_other_budget() -> None:
    made = job(max_failures=0, max_without_progress=0)
    made.fail_evaluation = partial(lack_data, made)
    made.at(2 * HOUR_S, lambda: setattr(made, "fail_evaluation", lambda *_: False))
    assert made.run(4 * HOUR_S).outcome == "SUCCEEDED", made.ended
    (incident,) = closed(made)
    assert len(incident["data_outages"]) == len(forming(made)) - 1 >= 20
    assert 2 * HOUR_S - 2 * EVALUATION_S < incident["phases_s"]["total"] < 2 * HOUR_S


def test_an_outage_at_another_step_is_one_of_its_own() -> None:
    """Two attempts lack data at step 11. The next computes steps again for hours, and lacks other
    data on the way: no outage has lasted for long."""
    made = job(SparseCheckpoints)
    made.evaluation_s = {9: 0.52 * DATA_OUTAGE_S, 10: 0.2, 11: 0.2}
    lacks = {1: 11, 2: 11, 3: 10}
    made.fail_evaluation = lambda attempt, step: (
        step == lacks.get(attempt) and lack_data(made, attempt)
    )
    assert made.run(5 * DATA_OUTAGE_S).outcome == "SUCCEEDED", made.ended
    assert len(forming(made)) == 4


@pytest.mark.parametrize("by", ["SIGSEGV", "SIGKILL"])
def test_a_crash_in_each_evaluation_is_one_incident_with_the_budget_of_its_cause(by: str) -> None:
    made = job(max_without_progress=5, max_failures=7)
    made.evaluation_s = {EVALUATED: 0.2}
    made.fail_evaluation = partial(crash, made, by)
    end = made.run()
    code, attempts = ("no_progress", 6) if by == "SIGSEGV" else ("too_many_failures", 8)
    assert (end.code, len(forming(made))) == (code, attempts), end
    (incident,) = closed(made)
    assert len(incident["failures"]) == attempts
    assert end.step == EVALUATED - 1, "no row was stored of the evaluated step"


def test_an_evaluation_is_no_part_of_the_recovery_and_has_no_limit_of_a_first_step() -> None:
    made = evaluating(job())
    began = made.now
    assert made.core.stage is Stage.RUNNING
    assert made.run().outcome == "SUCCEEDED"
    assert len(forming(made)) == 2
    (incident,) = closed(made)
    committed = next(at for attempt, _, at in made.step_times if attempt == 2)
    assert committed - began > 0.9 * EVALUATION_S
    assert incident["closed_at"] == pytest.approx(began, abs=1.0)
    assert incident["phases_s"]["total"] < 60.0
    assert incident["phases_s"]["total"] == pytest.approx(
        incident["closed_at"] - incident["signalled_at"]
    )


def lose_all_signals(made: SimulatedCluster) -> None:
    for name in made.agents:
        made.lose_signals(name, 30.0)


UNSEEN: dict[str, Callable[[SimulatedCluster], None]] = {
    "lost signals": lose_all_signals,
    "supervisor": lambda made: made.restart_supervisor(),
}


@pytest.mark.parametrize("moment", range(-2, 3))
@pytest.mark.parametrize("fault", UNSEEN)
def test_an_evaluation_of_which_the_signal_was_lost_is_found_by_polls(
    fault: str, moment: int
) -> None:
    at = evaluating(job()).now - START
    made = job()
    made.at(at + 0.05 * moment, lambda: UNSEEN[fault](made))
    evaluating(made)
    assert made.run().outcome == "SUCCEEDED", made.ended
    assert len(forming(made)) == 2, "the attempt was ended in its evaluation"
    assert len(closed(made)) == 1


@pytest.mark.parametrize("stop", [StopKind.PAUSE, StopKind.CANCEL])
@pytest.mark.parametrize("patience_s", [EVALUATION_S / 2, EVALUATION_S + 60.0])
def test_a_stop_in_the_evaluation_waits_for_its_step_until_the_deadline(
    stop: StopKind, patience_s: float
) -> None:
    made = job()
    made.remote_every = 4
    evaluating(made)
    asked = made.now
    made.send(inputs.StopRequested(stop, "enough", asked + patience_s))
    end = made.run()
    assert end.code == {StopKind.PAUSE: "paused", StopKind.CANCEL: "cancelled"}[stop]
    assert made.now - asked < patience_s + 1.0
    reached = max(step for _, step in made.committed)
    assert (reached >= EVALUATED) == (patience_s > EVALUATION_S)
    (incident,) = closed(made)
    won = reached >= EVALUATED
    assert incident["resolution"] == (
        f"attempt 2 runs from step {EVALUATED - 1}" if won else f"the job ended: {end.code}"
    )
    assert len(made.emitted(EventKind.ATTEMPT_FORMING)) == 2
