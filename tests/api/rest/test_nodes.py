"""Nodes over REST, the client and the command line: listed, cordoned, uncordoned."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

import httpx
import pytest
from tests.support.service.live_server import SPEC, LiveServer
from tests.support.waiting import eventually

from holdfast import Client
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.policy.quarantine import NodeStanding
from holdfast_workers.protocol.findings import HealthFinding, Level

HOT = HealthFinding("accelerator", "hw_thermal", Level.SUSPECT, "clocks halved [hot]", "GPU-1")


@pytest.fixture
def nodes(server: LiveServer, client: Client, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client of a server that has seen its three nodes."""
    monkeypatch.setenv("HOLDFAST_ADDRESS", server.address)
    eventually(lambda: len(client.nodes()) == 3)
    return client


def test_an_impossible_request_is_a_problem_with_a_code(nodes: Client, http: httpx.Client) -> None:
    def refused(path: str, body: object) -> tuple[int, str]:
        answer = http.post(f"/api/v1/nodes/{path}", json=body)
        assert answer.headers["content-type"] == "application/problem+json"
        return answer.status_code, answer.json()["code"]

    assert refused("nobody/cordon", {"reason": "x"}) == (404, "node_not_found")
    assert refused("node1/cordon", {"reason": ""}) == (422, "invalid_parameters")
    assert refused("node1/cordon", {"reason": "x", "until": 5.0}) == (422, "invalid_parameters")
    past = "1970-01-01T00:00:05Z"
    assert refused("node1/cordon", {"reason": "x", "until": past}) == (422, "invalid_time")
    assert nodes.node("node1").state is NodeStanding.READY


def test_the_command_line_lists_describes_cordons_and_uncordons(
    nodes: Client, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    job = nodes.submit(SPEC)
    supervisor = server.run_job(job.id, end=False)
    where: dict[str, Any] = {"agent": "n0", "node_id": "node0", "host": "127.0.0.1"}
    supervisor.emit(EventKind.NODE_HEALTH, **where, findings=[asdict(HOT)])
    lost = [{"cause": "hang", "rank": 0, "agent": "n0", "attempt": 1}]
    fault: dict[str, Any] = {
        "incident": 1,
        "cause": "hang",
        "attempt": 1,
        "lost": lost,
        "evidence": [],
    }
    supervisor.emit(EventKind.INCIDENT_OPENED, **fault, opened_at=time.time())
    eventually(lambda: len(nodes.node("node0").incidents) == 1)

    assert run(["node", "cordon", "node0", "--reason", "too [hot]", "--for", "600"]) == 0
    assert capsys.readouterr().out == "node0 is cordoned\n"
    assert run(["node", "ls"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "too [hot] (for" in shown and shown.count("ready") == 2
    assert run(["node", "describe", "node0"]) == ExitCode.OK
    shown = capsys.readouterr().out
    for fact in ("cordoned", job.id, "suspect (accelerator): clocks halved [hot]", ": hang, "):
        assert fact in shown, fact
    assert run(["node", "uncordon", "node0", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["state"] == "ready"
    assert run(["node", "ls", "--json"]) == ExitCode.OK
    assert [node["id"] for node in json.loads(capsys.readouterr().out)] == [
        "node0",
        "node1",
        "node2",
    ]
    assert run(["node", "cordon", "node0"]) == ExitCode.OK
    assert "by hand" in [node.reason for node in nodes.nodes()]
    assert run(["node", "cordon", "nobody", "--reason", "x"]) == ExitCode.NOT_FOUND
    assert "node_not_found" in capsys.readouterr().err


@pytest.mark.seconds
def test_a_job_shows_its_slow_ranks_and_the_findings_of_its_nodes(
    nodes: Client, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    job = nodes.submit(SPEC)
    assert (job.stragglers, job.unwell_nodes) == ((), ())
    supervisor = server.run_job(job.id, end=False)
    for agent in ("n1", "n2"):
        where: dict[str, Any] = {"agent": agent, "node_id": f"node{agent[1]}", "host": "127.0.0.1"}
        supervisor.emit(EventKind.NODE_HEALTH, **where, findings=[asdict(HOT)])
    slow: dict[str, Any] = {"agent": "n1", "node_id": "node1", "host": "127.0.0.1"}
    slow |= {"factor": 2.5, "since": 99.0}
    slow |= {"since_step": 3, "step": 5, "attempt": 1, "why": ""}
    for rank in (2, 3):
        supervisor.emit(EventKind.STRAGGLER, **slow, rank=rank, state="slow")
    eventually(lambda: len(nodes.get(job.id).stragglers) == 2)
    shown = nodes.get(job.id)
    (straggler, _), (_, standby) = shown.stragglers, shown.unwell_nodes
    facts = (straggler.rank, straggler.node, straggler.factor, straggler.since_step)
    assert facts == (2, "node1", 2.5, 3)
    assert [(unwell_node.node, unwell_node.ranks) for unwell_node in shown.unwell_nodes] == [
        ("node1", (2, 3)),
        ("node2", ()),
    ]
    assert standby.findings[0].what == "clocks halved [hot]"
    assert run(["describe", job.id]) == ExitCode.OK
    printed = " ".join(capsys.readouterr().out.split())
    assert "Slow rank 2 on n1 (node node1) takes 2.50 times as long as its peers since" in printed
    assert "ranks 2 and 3 on node node1: suspect (accelerator): clocks halved [hot]" in printed
    assert "standby on node node2: suspect (accelerator)" in printed

    supervisor.emit(EventKind.STRAGGLER, **slow, rank=2, state="recovered")
    eventually(lambda: [straggler.rank for straggler in nodes.get(job.id).stragglers] == [3])
    supervisor.end()
    eventually(lambda: nodes.get(job.id).state == "SUCCEEDED")
    assert (nodes.get(job.id).stragglers, nodes.get(job.id).unwell_nodes) == ((), ())


def test_a_rank_that_was_slow_elsewhere_is_not_shown_as_slow(
    nodes: Client, server: LiveServer
) -> None:
    job = nodes.submit(SPEC)
    supervisor = server.run_job(job.id, end=False)
    slow: dict[str, Any] = {"rank": 2, "agent": "n7", "node_id": "node7", "host": "127.0.0.1"}
    slow |= {"state": "slow"}
    supervisor.emit(EventKind.STRAGGLER, **slow, factor=2.5, since_step=3, step=5, since=9.0)
    eventually(lambda: len(nodes.get(job.id).stragglers) == 1)
    supervisor.form(2)
    eventually(lambda: nodes.get(job.id).stragglers == ())
