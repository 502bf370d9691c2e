"""Several nodes of one machine: copies in memory go to another machine where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from tests.support.nodes.local_agents import LocalAgent, LocalAgents
from tests.support.nodes.supervised import small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.spec import ParallelSpec

BOOT_ID = "/proc/sys/kernel/random/boot_id"
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None,
        reason="only root may make mount namespaces, with `unshare`",
    ),
]


class ElsewhereAgent(LocalAgent):
    """An agent whose kernel says that it is another machine, in a container of its own."""

    boot: Path

    def start(self) -> None:
        ours, theirs = Pipe()
        mount = f'mount --bind {self.boot} {BOOT_ID} && exec "$@"'
        program = [sys.executable, "-m", "tests.support.nodes.agent_process", str(theirs.fileno())]
        self.process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", mount, "sh", *program], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        ours.send(self.config)
        self._attend(ours)


class TwoMachines(LocalAgents):
    """n2 and n3 are on another machine than n0 and n1."""

    def __init__(self, *given: Any, **config: Any) -> None:
        super().__init__(*given, **config)
        for seat in ("n2", "n3"):
            agent = self.agents[seat]
            self.agents[seat] = ElsewhereAgent(agent.config, self._receive, self.kill_node)


def test_the_partners_of_all_ranks_are_on_the_other_machine(tmp_path: Path) -> None:
    ElsewhereAgent.boot = tmp_path / "boot_id"
    ElsewhereAgent.boot.write_text(f"{uuid.uuid4()}\n")
    training = small_training(20, parallel=ParallelSpec(dp_shard=4))
    options: dict[str, Any] = {"standbys": 0, "workers_per_node": 1, "agents": TwoMachines}
    with supervised(tmp_path, training, **options) as run:
        assert run.wait_end(90.0)["outcome"] == "SUCCEEDED", run.story()
        placed = run.of(EventKind.MEMORY_PLACED)[-1]
        here, there = {"n0", "n1"}, {"n2", "n3"}
        members = run.of(EventKind.ATTEMPT_FORMING)[-1]["members"]
        for member in members:
            (partner,) = placed["partners"][str(member["rank"])]
            assert partner in (there if member["agent"] in here else here), placed
        assert not [gap for gap in placed["unprotected"] if "domain" in gap]
