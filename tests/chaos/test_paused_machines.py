"""A machine is paused for longer than its lease, and its clocks do not count that (a hypervisor).

Its ranks then believe in a lease that has ended, and step on beside the world that replaced theirs.
No clock of the guest can tell, so this is proved harmless and not prevented.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.chaos.test_partition import (
    HEARTBEAT_S,
    LEASE_S,
    MARGIN_S,
    is_back,
    logging_steps,
    training,
    undisturbed_digests,
)
from tests.support.nodes.local_agents import LocalAgents
from tests.support.nodes.supervised import SupervisedRun, supervised
from tests.support.ranks.pausable_clock import UNCOUNTED
from tests.support.ranks.step_log import LoggedStep, logged_steps
from tests.support.waiting import eventually

from holdfast_service.job_model.supervisor_protocol import EventKind, StopKind
from holdfast_service.supervisor.supervisor_times import SupervisorTimes
from holdfast_workers.protocol.process_identity import ProcessIdentity

pytestmark = pytest.mark.chaos
PACE_S = 0.05
TRIALS = 3
RANKS_ALONE_S = 10.0  # until they have stepped under their old lease, or have been refused


class PausableAgents(LocalAgents):
    """The agents of machines that can be paused with all their processes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._paused: set[str] = set()

    @contextmanager
    def paused(
        self, seat: str, uncounted: Path, have_stepped: Callable[[], bool]
    ) -> Iterator[None]:
        """The agent is resumed last, once the ranks `have_stepped`."""
        process = self.agents[seat].process
        assert process is not None
        agent = psutil.Process(process.pid)
        machine = [agent, *agent.children(recursive=True)]
        began = time.monotonic()
        self._paused.add(seat)
        for each in machine:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                each.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for each in machine:
                (uncounted / str(each.pid)).write_text(str(time.monotonic() - began))
            self._paused.discard(seat)
            for each in reversed(machine):  # the agent last: it may end its ranks at once
                if each is agent:
                    with contextlib.suppress(AssertionError):
                        eventually(have_stepped, RANKS_ALONE_S)
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.send_signal(signal.SIGCONT)

    def restart(self, seat: str, process: ProcessIdentity) -> None:
        if seat not in self._paused:  # nothing reaches a paused machine
            super().restart(seat, process)


def stale_steps(logged: list[LoggedStep]) -> list[LoggedStep]:
    """The steps of attempt 1 after the first step of attempt 2."""
    since = min(step.at for step in logged if step.attempt == 2)
    return [step for step in logged if step.attempt == 1 and step.at > since]


@pytest.mark.timeout(400)
def test_steps_under_a_lease_that_ended_in_an_uncounted_pause_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the ranks' first copy may be refused before they step again: that shows
    nothing, and another machine is paused."""
    for trial in range(TRIALS):
        if _steps_of_an_old_lease_change_nothing(tmp_path / str(trial), monkeypatch):
            return
    pytest.skip("no rank believed in its old lease: nothing is proved")


def _steps_of_an_old_lease_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """False if there were none."""
    uncounted, steps = folder / "uncounted", folder / "steps"
    uncounted.mkdir(parents=True)
    monkeypatch.setenv(UNCOUNTED, str(uncounted))
    job = training().model_copy(
        update={"recipe": "tests.support.ranks.pausable_clock:PausableClock"}
    )
    times = SupervisorTimes(poll_s=0.1, heartbeat_timeout_s=HEARTBEAT_S, refresh_s=MARGIN_S / 5)
    with (
        logging_steps(steps, PACE_S),
        supervised(
            folder,
            job,
            standbys=1,
            workers_per_node=2,
            agents=PausableAgents,
            times=times,
            config={"lease_s": LEASE_S, "lease_margin_s": MARGIN_S},
            heartbeat_s=HEARTBEAT_S / 8,
        ) as run,
    ):
        _pause_the_world_and_resume_it(run, uncounted, steps)
        run.stop(StopKind.CANCEL)
        assert run.wait_end()["outcome"] == "CANCELLED", run.story()
        logged = logged_steps(steps)
        stale = stale_steps(logged)
        if not stale:
            return False
        assert {step.attempt for step in logged} == {1, 2}, run.story()
        digests, reached = dict(run.digests), max(run.rows)
        assert all(row.attempt == 2 for step, row in run.rows.items() if step >= stale[0].step)
    expected = undisturbed_digests(folder / "undisturbed", reached)
    assert digests.items() <= expected.items()
    return True


def _pause_the_world_and_resume_it(run: SupervisedRun, uncounted: Path, steps: Path) -> None:
    agents = run.agents
    assert isinstance(agents, PausableAgents)
    run.wait(lambda: bool(run.of(EventKind.STANDBY)) and len(run.rows) > 10)
    seat = run.seat_of(0)
    seen_events = len(run.events)

    def have_stepped() -> bool:
        return len(stale_steps(logged_steps(steps))) > 1

    with agents.paused(seat, uncounted, have_stepped):
        run.wait(lambda: run.all_rows[-1].attempt == 2)
        resumed_at = run.newest_step() + 5
        run.wait(lambda: run.newest_step() > resumed_at)
    run.wait(lambda: is_back(run, seat, seen_events))
    seen = run.newest_step()
    run.wait(lambda: run.newest_step() > seen + 10)
