"""Nodes over REST, the client and the command line: seen, cordoned, taken back."""

from __future__ import annotations

import json
import time

import httpx
import pytest
from tests.api.live_server import SPEC, LiveServer
from tests.support.waiting import eventually

from holdfast import Client
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast_service.quarantine import Standing
from holdfast_service.reports import EventKind
from holdfast_workers.health.findings import Finding, Level

HOT = Finding("accelerator", "hw_thermal", Level.SUSPECT, "clocks halved [hot]", "GPU-1")


@pytest.fixture
def nodes(server: LiveServer, client: Client, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client of a server that has seen its three nodes."""
    monkeypatch.setenv("HOLDFAST_ADDRESS", server.address)
    eventually(lambda: len(client.nodes()) == 3)
    return client


def test_a_node_is_cordoned_and_taken_back_over_rest(nodes: Client, http: httpx.Client) -> None:
    until = time.time() + 60
    cordoned = nodes.cordon("node1", "new cables", until=until)
    assert (cordoned.state, cordoned.reason) == (Standing.CORDONED, "new cables")
    assert cordoned.until == pytest.approx(until)
    assert [one.state for one in nodes.nodes()] == ["ready", "cordoned", "ready"]
    assert nodes.uncordon("node1").state is Standing.READY
    assert nodes.uncordon("node1").reason is None, "again is the same"
    answer = http.get("/api/v1/nodes/node1").json()
    assert answer["state"] == "ready" and answer["cpus"] == 1.0 and answer["there"]


def test_what_cannot_be_done_is_a_problem_with_a_code(nodes: Client, http: httpx.Client) -> None:
    def refused(path: str, body: object) -> tuple[int, str]:
        answer = http.post(f"/api/v1/nodes/{path}", json=body)
        assert answer.headers["content-type"] == "application/problem+json"
        return answer.status_code, answer.json()["code"]

    assert refused("nobody/cordon", {"reason": "x"}) == (404, "node_not_found")
    assert refused("node1/cordon", {"reason": ""}) == (422, "invalid_parameters")
    assert refused("node1/cordon", {"reason": "x", "until": 5.0}) == (422, "invalid_time")
    assert nodes.node("node1").state is Standing.READY


def test_the_command_line_lists_describes_cordons_and_uncordons(
    nodes: Client, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    job = nodes.submit(SPEC)
    supervisor = server.run_job(job.id, end=False)
    where = {"agent": "n0", "node_id": "node0", "host": "127.0.0.1"}
    supervisor.say(EventKind.NODE_HEALTH, **where, findings=[HOT.data()])
    lost = [{"cause": "hang", "rank": 0, "agent": "n0", "attempt": 1}]
    fault = {"incident": 1, "cause": "hang", "attempt": 1, "lost": lost, "evidence": []}
    supervisor.say(EventKind.INCIDENT_OPENED, **fault, opened_at=time.time())
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
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["node0", "node1", "node2"]
    assert run(["node", "cordon", "nobody", "--reason", "x"]) == ExitCode.NOT_FOUND
    assert "node_not_found" in capsys.readouterr().err
