"""Nodes with too little shared memory for a job are not used, with the figures as the reason."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.conftest import STEPS, Undisturbed
from tests.support.nodes.history_proof import assert_same_history
from tests.support.nodes.local_agents import LocalAgents
from tests.support.nodes.supervised import small_training, supervised

from holdfast_service.job_model.job_spec import parse
from holdfast_service.job_model.node_needs import needs_of
from holdfast_service.job_model.supervisor_protocol import EventKind

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system"),
]
SMALL = "n1"


class AgentsOnASmallNode(LocalAgents):
    """The node of `SMALL` has 2 MiB of shared memory."""

    folder: Path

    def __init__(self, *given: Any, **config: Any) -> None:
        super().__init__(*given, **config)
        agent = self.agents[SMALL]
        agent.config = replace(agent.config, memory_root=str(self.folder / "job" / SMALL))


class AgentsOnOneMachine(LocalAgents):
    """All nodes share a file system, which is large enough for each of them alone."""

    folder: Path

    def __init__(self, *given: Any, **config: Any) -> None:
        super().__init__(*given, **config)
        for name, agent in self.agents.items():
            agent.config = replace(agent.config, memory_root=str(self.folder / "job" / name))


@pytest.fixture(autouse=True)
def small_shm(tmp_path: Path) -> Iterator[None]:
    folder = tmp_path / "small-shm"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], check=True)
    AgentsOnASmallNode.folder = AgentsOnOneMachine.folder = folder
    try:
        yield
    finally:
        # Lazily: the last children of killed agents may still be about to end.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def options() -> dict[str, Any]:
    resources = {"workers_per_node": 2}
    document = {**small_training(STEPS).model_dump(mode="json"), "name": "x"}
    spec = parse({**document, "resources": resources}, None)
    return {"agents": AgentsOnASmallNode, "needs": needs_of(spec)}


def test_a_standby_takes_the_ranks_of_a_node_that_is_too_small_and_the_reason_has_figures(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    given = options()
    with supervised(tmp_path, small_training(STEPS), standbys=1, **given) as run:
        run.wait_step(10)
        segments = [path.stat().st_size for path in (run.agents.root / "n0").rglob("*.seg")]
        assert given["needs"].shm_bytes <= sum(segments) <= 1.1 * given["needs"].shm_bytes
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert_same_history(run, undisturbed)
        members = run.of(EventKind.ATTEMPT_FORMING)[0]["members"]
        assert {member["agent"] for member in members} == {"n0", "n2"}
        health = [event for event in run.of(EventKind.NODE_HEALTH) if event["agent"] == SMALL]
        (finding,) = health[-1]["findings"]
        assert (finding["probe"], finding["kind"]) == ("room", "shm")
        assert "has 2.1 MB free" in finding["what"], finding
        assert "needs at least 2.89 MB" in finding["what"], finding


def test_without_another_node_the_job_goes_back_to_the_queue_at_once(tmp_path: Path) -> None:
    config = {"on_shortage": "queue", "start_s": 300.0}
    with supervised(tmp_path, small_training(STEPS), standbys=0, config=config, **options()) as run:
        end = run.wait_end(60.0)
        assert (end["outcome"], end["code"]) == ("PAUSED", "no_nodes"), run.story()
        assert "1 of 2 nodes can be used; n1 is too small:" in end["message"]
        assert "2.1 MB free" in end["message"] and "2.89 MB" in end["message"]
        assert run.of(EventKind.ATTEMPT_FORMING) == []


def test_nodes_that_share_their_memory_are_used_only_if_both_fit_and_looked_at_again(
    tmp_path: Path,
) -> None:
    folder = AgentsOnOneMachine.folder
    subprocess.run(["mount", "-o", "remount,size=4m", str(folder)], check=True)
    given = {**options(), "agents": AgentsOnOneMachine}
    with supervised(tmp_path, small_training(20), standbys=0, **given) as run:
        run.wait(lambda: any(event["findings"] for event in run.of(EventKind.NODE_HEALTH)))
        # The report of the node that has reserved its part may come later.
        (finding,) = [each for event in run.of(EventKind.NODE_HEALTH) for each in event["findings"]]
        assert "MB for nodes of the job that share it)" in finding["what"], finding
        assert 1_000_000 < finding["there"] < finding["needed"] == given["needs"].shm_bytes
        assert run.of(EventKind.ATTEMPT_FORMING) == []
        subprocess.run(["mount", "-o", "remount,size=32m", str(folder)], check=True)
        assert run.wait_end(60.0)["outcome"] == "SUCCEEDED", run.story()
