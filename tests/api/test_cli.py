"""The command line: results on stdout, errors on stderr, documented exit codes."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import yaml
from tests.api.live_server import SPEC, LiveServer
from tests.service.fake_cluster import line

from holdfast import Client
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast_service.reports import EventKind

pytestmark = pytest.mark.usefixtures("at_server")


@pytest.fixture
def at_server(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_ADDRESS", server.address)


@pytest.fixture
def spec_file(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    return str(path)


def submitted(spec_file: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(["submit", spec_file]) == ExitCode.OK
    return capsys.readouterr().out.strip()


def test_submit_list_describe(
    spec_file: str, server: LiveServer, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = submitted(spec_file, capsys)
    supervisor = server.run_job(job_id, end=False)
    supervisor.say(
        EventKind.INCIDENT_OPENED,
        incident=1,
        cause="worker_crash",
        attempt=1,
        lost=[{"rank": 3, "worker": "n1.a.3"}],
        evidence=["rank 3 ended by signal 9"],
        decision="replace the worker",
        reason="its agent is healthy",
        restored_step=5,
        steps_lost=0,
        tiers={"0": "own_ram", "3": "partner_ram"},
        phases_s={"detect": 0.002, "total": 0.2},
        opened_at=2000.0,
        closed_at=None,
        resolution=None,
    )
    supervisor.end("FAILED", "user_error", message="it raised", traceback="Traceback\n  boom [x]")
    assert run(["wait", job_id, "--timeout", "10"]) == ExitCode.JOB_FAILED
    ended = capsys.readouterr()
    assert "FAILED" in ended.out
    assert "boom [x]" in ended.err

    assert run(["describe", job_id]) == ExitCode.OK
    shown = capsys.readouterr().out
    for fact in (
        "user_error: it raised",
        "dp_shard 2 × tp 2",
        "103",
        "standby: n2",
        "worker_crash",
        "rank 3 ended by signal 9",
        "replace the worker (its agent is healthy)",
        "own RAM (rank 0); a partner's RAM (rank 3)",
        "detect 2 ms, total 200 ms",
        "boom [x]",
    ):
        assert fact in shown, fact

    assert run(["describe", job_id, "--json"]) == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    assert document["job"]["outcome"]["code"] == "user_error"
    assert document["incidents"][0]["tiers"] == {"0": "own_ram", "3": "partner_ram"}

    assert run(["ls"]) == ExitCode.OK
    assert job_id in capsys.readouterr().out
    assert run(["ls", "--json", "--state", "FAILED"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(text)["id"] for text in lines] == [job_id]


@pytest.mark.parametrize("json_wanted", [False, True])
def test_submit_and_follow_ends_as_the_job_does(
    spec_file: str,
    server: LiveServer,
    client: Client,
    capsys: pytest.CaptureFixture[str],
    json_wanted: bool,
) -> None:
    def play() -> None:
        while not (jobs := list(client.list())):
            pass
        server.run_job(jobs[0].id, steps=7)

    player = threading.Thread(target=play)
    player.start()
    flags = ["--json"] if json_wanted else []
    code = run(["submit", spec_file, "--set", "train.steps=7", "--follow", *flags])
    player.join()
    assert code == ExitCode.OK
    out = capsys.readouterr().out.splitlines()
    if json_wanted:
        assert json.loads(out[0])["kind"] == "job.submitted"
        assert [json.loads(text)["seq"] for text in out] == list(range(1, len(out) + 1))
    else:
        assert "SUCCEEDED" in out[-1]
        assert any("step    7/7" in text for text in out)


def test_logs_of_a_rank(
    spec_file: str, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = submitted(spec_file, capsys)
    supervisor = server.run_job(job_id, end=False)
    supervisor.logs += [line(1, "of zero [bold]"), line(2, "of one", rank=1)]
    supervisor.end()
    assert run(["logs", job_id, "-f", "--rank", "0"]) == ExitCode.OK
    assert capsys.readouterr().out.endswith("1/rank 0 of zero [bold]\n")
    assert run(["logs", job_id, "--json"]) == ExitCode.OK
    texts = [json.loads(text)["text"] for text in capsys.readouterr().out.splitlines()]
    assert texts == ["of zero [bold]", "of one"]


def test_exit_codes_of_what_goes_wrong(
    spec_file: str, server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(code: ExitCode, says: str, *arguments: str) -> None:
        assert run(list(arguments)) == code, arguments
        told = capsys.readouterr()
        assert told.out == ""
        assert says in told.err

    refused(ExitCode.USAGE, "parallel.tp", "submit", spec_file, "--set", "parallel.tp=3")
    refused(ExitCode.USAGE, "No such file", "submit", str(tmp_path / "none.yaml"))
    refused(ExitCode.USAGE, "path.to.key=value", "submit", spec_file, "--set", "steps")
    refused(ExitCode.USAGE, "nope", "nope")
    refused(ExitCode.USAGE, "--nope", "ls", "--nope")
    refused(ExitCode.NOT_FOUND, "job_not_found", "describe", "01a1facd")
    job_id = submitted(spec_file, capsys)
    refused(ExitCode.TIMEOUT, "wait_timeout", "wait", job_id, "--timeout", "0.1")
    server.supervisor(job_id)
    assert run(["cancel", job_id, "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["desired"] == "cancelled"
    assert run(["wait", job_id]) == ExitCode.CANCELLED
    capsys.readouterr()
    done = submitted(spec_file, capsys)
    server.run_job(done)
    assert run(["wait", done]) == ExitCode.OK
    capsys.readouterr()
    refused(ExitCode.CONFLICT, "job_ended", "cancel", done)
    server.stop()
    refused(ExitCode.UNREACHABLE, "holdfast serve", "ls")
