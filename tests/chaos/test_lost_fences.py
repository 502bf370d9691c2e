"""A supervisor that ends between the announcement of an attempt and its first fence."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.chaos.conftest import STEPS, Undisturbed
from tests.support.nodes.history_proof import assert_same_history
from tests.support.nodes.local_agents import LocalAgents
from tests.support.nodes.supervised import small_training, supervised

from holdfast_service.policy.quarantine import Avoided, NodeStanding, node_name
from holdfast_service.supervisor.fence_record import FenceRecord
from holdfast_workers.protocol.commands import Describe, Request

pytestmark = pytest.mark.chaos
Expected = TypeVar("Expected")


class CutOffAgents(LocalAgents):
    """While `hear_nothing`, no command, poll or event arrives at any agent; lifelines live."""

    hear_nothing = False

    def call(
        self, seat: str, request: Request, answer: type[Expected], *, timeout_s: float
    ) -> Future[Expected]:
        if self.hear_nothing and not isinstance(request.command, Describe):
            return Future()
        return super().call(seat, request, answer, timeout_s=timeout_s)


@pytest.mark.parametrize(
    "is_stored", [pytest.param(False, marks=pytest.mark.cell("P5", "supervisor")), True]
)
def test_the_successor_keeps_the_world_stepping(
    tmp_path: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    """It adopts the world, whose agents were granted the announced attempt already. Before, they
    refused its grants for the world's own attempt, and all ranks held for good."""
    with supervised(tmp_path, small_training(STEPS), standbys=1, agents=CutOffAgents) as run:
        agents = run.agents
        assert isinstance(agents, CutOffAgents)
        run.wait_step(5)
        agents.hear_nothing = True
        if not is_stored:
            monkeypatch.setattr(FenceRecord, "announce", lambda self, attempt: None)
        host = agents.report(run.workers()[0][0])
        cordoned = {node_name(host.node_id, host.host): Avoided(NodeStanding.CORDONED, "test")}
        run.supervisor.avoid(cordoned)
        run.wait(lambda: run.supervisor.report(run.cursors).attempt == 2)
        time.sleep(0.5)  # some heartbeats
        monkeypatch.undo()
        run.lose_supervisor()
        agents.hear_nothing = False
        ended: dict[str, Any] = run.wait_end()
        assert ended["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)
        if not is_stored:  # otherwise the successor leaves that number out, and forms a new attempt
            assert {row.attempt for row in run.all_rows} == {1}, run.story()
