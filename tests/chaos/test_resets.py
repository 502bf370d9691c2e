"""Connections that a device on the path resets, while the processes on both sides live."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.chaos.conftest import STEPS, Undisturbed
from tests.support.faults.faulty_link import FaultyLink
from tests.support.nodes.history_proof import assert_same_history, incidents
from tests.support.nodes.local_agents import LocalAgents
from tests.support.nodes.supervised import small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.protocol.answers import AgentReport
from holdfast_workers.protocol.commands import Request

pytestmark = pytest.mark.chaos
Expected = TypeVar("Expected")
RESETS = 15


class AgentsBehindProxies(LocalAgents):
    """The supervisor and the other agents reach each agent's data port through a proxy."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.proxies: dict[int, FaultyLink] = {}

    def call(
        self, seat: str, request: Request, answer: type[Expected], *, timeout_s: float
    ) -> Future[Expected]:
        answered: Future[Expected] = Future()

        def pass_on(done: Future[Expected]) -> None:
            error = done.exception()
            if error is not None:
                answered.set_exception(error)
            else:
                answered.set_result(self._behind_proxy(done.result()))

        super().call(seat, request, answer, timeout_s=timeout_s).add_done_callback(pass_on)
        return answered

    def reset_all(self) -> int:
        """Reset every connection to a data port; returns the number of resets so far."""
        for proxy in tuple(self.proxies.values()):
            proxy.reset()
        return sum(proxy.resets for proxy in self.proxies.values())

    def close(self) -> None:
        super().close()
        for proxy in self.proxies.values():
            proxy.close()

    def _behind_proxy(self, answer: Any) -> Any:
        if not isinstance(answer, AgentReport):
            return answer
        if answer.data_port not in self.proxies:
            self.proxies[answer.data_port] = FaultyLink(answer.data_port)
        return replace(answer, data_port=self.proxies[answer.data_port].port)


def test_resets_end_no_attempt_and_cost_no_step(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Resets of all connections of a job, at seeded moments."""
    seed = 16
    rng = random.Random(seed)
    with supervised(tmp_path, small_training(STEPS), agents=AgentsBehindProxies) as run:
        agents = run.agents
        assert isinstance(agents, AgentsBehindProxies)
        run.wait_step(5)
        for _ in range(RESETS):
            resets = agents.reset_all()
            time.sleep(rng.uniform(0.0, 0.1))
            run.poll()
            assert not run.of(EventKind.ENDED), f"seed {seed}\n{run.story()}"
        assert resets >= RESETS
        assert run.wait_end()["outcome"] == "SUCCEEDED", f"seed {seed}\n{run.story()}"
        assert_same_history(run, undisturbed)
        assert {row.attempt for row in run.all_rows} == {1}
        assert not incidents(run), run.story()
