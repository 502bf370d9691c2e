"""Another user of the machine speaks to every port of agents and ranks: to the rendezvous stores,
to gloo's listeners, to the data channel. The bits stay the same; at most an attempt fails."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from tests.chaos.conftest import ENDS_WHEN_TOLD, STEPS, Undisturbed
from tests.support.nodes.history_proof import assert_same_history, incidents
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised
from tests.support.other_users.nobody import listening_ports
from tests.support.other_users.stranger import Stranger, stranger

from holdfast_service.job_model.supervisor_protocol import EventKind

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a program of another user"),
]
FORM_S = 30.0
"""An attempt whose rendezvous holds foreign keys may wait so long for ranks; any other needs less,
also on busy cores."""
DISTURBED = 2
"""Attempts that meet the stranger while they form."""


def test_bytes_of_another_user_are_never_in_the_bits(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    training = small_training(STEPS, recipe=ENDS_WHEN_TOLD)
    with (
        supervised(tmp_path, training, standbys=0, timeouts={"form_s": 2 * FORM_S}) as run,
        stranger() as other,
    ):
        run.wait_step(5)
        seen = open_ports(run)
        assert {port for seat in run.agents.seats for port in agent_ports(run, seat)} <= seen
        before = incidents(run)
        other.send(*seen)
        run.wait_step(run.newest_step() + 5)
        assert incidents(run) == before, run.story()  # an established world takes nothing
        set_keys_of_the_next_attempt(run, other)
        run.kill(1)
        run.wait(lambda: is_whole_again(run, other, seen), 300)
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)


def is_whole_again(run: SupervisedRun, other: Stranger, seen: set[int]) -> bool:
    """Whether the world is whole again. Until enough attempts have met the stranger, it speaks to
    each new listener at once."""
    forming = len(run.of(EventKind.ATTEMPT_FORMING))
    if forming <= 1 + DISTURBED and (new := open_ports(run) - seen):
        seen |= new
        other.send(*new)
    return len(run.of(EventKind.ATTEMPT_RUNNING)) > 1


def set_keys_of_the_next_attempt(run: SupervisedRun, other: Stranger) -> None:
    """To what no gloo has said, in the store of each node."""
    keys = tuple(f"/attempt/2/0//cpu//0/{rank}" for rank in range(4))
    for seat in run.agents.seats:
        other.send(store=run.agents.report(seat).store_port, keys=keys)


def agent_ports(run: SupervisedRun, seat: str) -> tuple[int, int]:
    report = run.agents.report(seat)
    return report.data_port, report.store_port


def open_ports(run: SupervisedRun) -> set[int]:
    """Of all agents with all their processes."""
    agents = [agent.process.pid for agent in run.agents.agents.values() if agent.process]
    below = [child.pid for pid in agents for child in psutil.Process(pid).children(recursive=True)]
    return set(listening_ports([*agents, *below]))
