"""A node that refuses what an agent needs: the agent is made all the same, and reports it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.nodes.agent_config import agent_config
from tests.support.nodes.supervised import small_agents
from tests.support.waiting import eventually

from holdfast_workers.agent.node_agent import NodeAgent
from holdfast_workers.memory.node_folder import OWNER_FILE
from holdfast_workers.protocol.answers import AgentReport
from holdfast_workers.protocol.commands import Fence, Hello, Request

WAIT_S = 60.0


def foreign_base(shm: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    uid = os.getuid()
    shm.mkdir(exist_ok=True)
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    return {"memory_base": str(shm), "memory_root": str(shm / "job" / "n0")}


def file_in_the_way(shm: Path, _: pytest.MonkeyPatch) -> dict[str, Any]:
    (shm / "job").write_text("")
    return {"memory_root": str(shm / "job" / "n0")}


def full_memory(shm: Path, _: pytest.MonkeyPatch) -> dict[str, Any]:
    root = shm / "job" / "n0"
    root.mkdir(parents=True)
    (root / OWNER_FILE).with_suffix(".new").symlink_to("/dev/full")
    return {"memory_root": str(root)}


def damaged_owner(shm: Path, _: pytest.MonkeyPatch) -> dict[str, Any]:
    root = shm / "job" / "n0"
    root.mkdir(parents=True)
    (root / OWNER_FILE).write_bytes(b"\xff")
    return {"memory_root": str(root)}


def missing_address(_: Path, __: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"host": "192.0.2.7"}  # kept free for documents (RFC 5737)


def bad_setting(_: Path, __: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"problem": "FLOOR='fast' is not a number"}


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (foreign_base, "is not a folder of this user"),
        (file_in_the_way, "Not a directory"),
        (full_memory, "No space left on device"),
        (damaged_owner, "can't decode"),
        (missing_address, "cannot listen on 192.0.2.7"),
        (bad_setting, "not a number"),
    ],
)
def test_an_agent_of_an_unusable_node_says_what_is_wrong(
    shm: Path, monkeypatch: pytest.MonkeyPatch, case: Any, reason: str
) -> None:
    agent = NodeAgent(agent_config(shm / "n0", **case(shm, monkeypatch)), lambda _: None)
    report = agent.answer(Request(Hello(), epoch=1))
    assert isinstance(report, AgentReport)
    assert report.failure is not None and reason in report.failure.message
    assert not report.ready and not report.failure.type, "it is not the user's program"
    assert isinstance(agent.answer(Request(Fence("n0", 3), epoch=1)), AgentReport)
    agent.release()


@pytest.mark.seconds
def test_an_agent_is_ready_once_its_node_is_usable_again(tmp_path: Path) -> None:
    with small_agents(tmp_path) as agents:
        in_the_way = agents.root / "n0"
        in_the_way.write_text("")
        agents.ensure()
        eventually(lambda: agents.report("n0").failure is not None, WAIT_S)
        in_the_way.unlink()
        eventually(lambda: agents.report("n0").ready, WAIT_S)
        report = agents.report("n0")
        assert report.failure is None and report.data_port
