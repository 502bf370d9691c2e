"""The command line prints results to stdout, errors to stderr, and has documented exit codes."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import httpx
import pytest
import yaml
from tests.support.service.fake_cluster import line
from tests.support.service.live_server import SPEC, LiveServer
from tests.support.waiting import DEADLINE_S, eventually

from holdfast import Client
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast.cli.printing.describe import (
    command_line,
    goodput_lines,
    guard_lines,
    protection_lines,
)
from holdfast_service.job_model.supervisor_protocol import Capacity, EventKind
from holdfast_service.placement.durability import protection
from holdfast_service.placement.replica_placement import Site, place_partners
from holdfast_service.policy.decision_ladder import Budget
from holdfast_service.views.goodput import GoodputView
from holdfast_service.views.jobs import GuardsView, TripView

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


def test_describe_shows_the_time_of_each_kind() -> None:
    account = GoodputView(
        held_s=100.0,
        by_kind_s={"starting": 5.0, "productive": 90.0, "recovery.fence": 5.0, "replayed": 0.0},
        device_seconds_held=400.0,
        device_seconds_by_kind={
            "starting": 20.0,
            "productive": 360.0,
            "recovery.fence": 20.0,
            "replayed": 0.0,
        },
        goodput=0.9,
        effective_training_time_ratio=0.9,
        steps=90,
        steps_replayed=0,
        devices=4,
        device_seconds_lost=20.0,
        device_seconds_lost_by_incident={1: 20.0},
        device_seconds_lost_otherwise=0.0,
        final=True,
    )
    first, second = (line.plain for line in goodput_lines(account))
    assert first.startswith("Goodput 0.900, effective training time 0.900 of ")
    assert first.endswith("; 20 of 400 device-seconds lost to faults")
    assert second == "  productive 90.0 s, starting 5.0 s, recovery.fence 5.0 s"
    unknown = account.model_copy(update={"goodput": None, "effective_training_time_ratio": None})
    assert list(goodput_lines(unknown)) == []


def test_what_a_program_runs_is_shown_as_a_shell_takes_it() -> None:
    assert command_line(["train.py", "--name", "two words"]) == "train.py --name 'two words'"
    assert command_line("train:main") == "train:main"


@pytest.mark.parametrize(
    ("nodes", "words"), [(1, "on the node of each rank only"), (2, "1 copy on")]
)
def test_the_memory_line_says_where_the_copies_are(nodes: int, words: str) -> None:
    seats = {rank: f"n{rank % nodes}" for rank in range(2)}
    sites = [Site(f"n{node}", f"host {node}") for node in range(nodes)]
    kept = protection(place_partners({"dp_shard": 2}, seats, sites, copies=1))
    assert kept.copies == nodes - 1
    first, *gaps = (line.plain for line in protection_lines(kept))
    assert words in first and (nodes > 1) is ("other nodes" in first), first
    assert [gap for gap in gaps if "the job has one node" in gap] or nodes > 1


def test_a_rank_without_a_copy_does_not_hide_the_copies_of_the_others() -> None:
    seats = {rank: f"n{rank}" for rank in range(4)}
    sites = [Site(agent, f"host of {agent}") for agent in seats.values()]
    broken = frozenset(("n3", f"n{partner}") for partner in range(3))
    kept = protection(place_partners({"dp_shard": 4}, seats, sites, copies=1, avoid=broken))
    first, *_ = (line.plain for line in protection_lines(kept))
    assert kept.copies == 0 and "no copy of some ranks on other nodes" in first and "75%" in first


def test_describe_shows_guard_trips_and_skipped_data() -> None:
    trip = TripView(
        at=1.0,
        attempt=1,
        kind="nonfinite",
        step=10,
        window=9,
        loss=None,
        grad_norm=None,
        limit=None,
        decision="skip",
        why="loss nan",
        skipped=(9, 10),
        back_to=None,
        ranks=(2,),
        micro_batch=1,
        layer="blocks.1",
        what="output",
    )
    guards = GuardsView(trips=1, ledger=((9, 10),), recent=(trip,))
    lines = [line.plain.strip() for line in guard_lines(guards)]
    assert lines[1] == "Guards: tripped once"
    assert lines[2].endswith("step 10, nonfinite: loss nan")
    assert lines[3] == "It started on rank 2, micro-batch 1, in the output of blocks.1."
    assert lines[4:] == ["The decision was to skip, without window 9.", "Skipped data: window 9."]
    assert list(guard_lines(GuardsView())) == []


def test_describe_says_where_bits_do_not_repeat(
    tmp_path: Path, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for mode in ("strict", "fast"):
        path = tmp_path / f"{mode}.yaml"
        path.write_text(f"{{name: {mode}, train: {{deterministic: {mode}}}}}")
        assert run(["describe", submitted(str(path), capsys)]) == ExitCode.OK
        shown[mode] = capsys.readouterr().out
    assert "Bits" in shown["fast"] and "deterministic is fast" in shown["fast"]
    assert "Bits" not in shown["strict"]


def test_describe_says_which_nodes_the_cluster_was_asked_for(
    spec_file: str, server: LiveServer, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    server.cluster.nodes = Capacity((), can_grow=True)
    job_id = submitted(spec_file, capsys)

    def asked() -> bool:
        waiting = client.get(job_id).waiting
        return waiting is not None and waiting.asked is not None

    eventually(asked, failure_message="nothing was asked for")
    assert run(["describe", job_id]) == ExitCode.OK
    shown = " ".join(capsys.readouterr().out.split())
    assert "the cluster grows: it was asked for 3 more nodes with" in shown
    assert "Asked for 3 more nodes of" in shown and "first " in shown
    series = httpx.get(f"{server.address}/metrics", timeout=DEADLINE_S).text
    assert "holdfast_growth_asked_nodes 3.0" in series
    assert 'holdfast_growth_size{resource="nodes"} 3.0' in series
    assert "holdfast_growth_bound{resource" not in series, "none is set"


@pytest.mark.seconds
def test_submit_list_describe(
    spec_file: str, server: LiveServer, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = submitted(spec_file, capsys)
    supervisor = server.run_job(job_id, end=False)
    supervisor.emit(
        EventKind.INCIDENT_CLOSED,
        incident=1,
        cause="worker_crash",
        attempt=1,
        lost=[{"rank": 3, "worker": "n1.a.3"}],
        evidence=["rank 3 ended by signal 9"],
        decision="replace the worker",
        reason="its agent is healthy",
        suspects=[{"rank": 3, "score": 0.9}],
        stacks=[{"ranks": [0, 1], "frames": [f"f{depth} (a.py:{depth})" for depth in range(9)]}],
        refused=[{"decision": "re-form in place", "why": "a process is gone"}],
        budget={**vars(Budget(failures=1, max_failures=20)), "failures_left": 19},
        failures=[1999.0],
        restored_step=5,
        steps_lost=0,
        tiers={"0": "own_ram", "3": "partner_ram"},
        phases_s={"detect": 0.002, "total": 0.2},
        opened_at=2000.0,
        closed_at=2001.0,
        resolution="attempt 2 runs from step 5",
    )
    supervisor.emit(
        EventKind.MEMORY_PLACED,
        attempt=1,
        copies=1,
        partners={"0": ["n1"], "3": ["n0"]},
        recoverable={
            "1": {"probability": 1.0, "standard_error": 0.0},
            "2": {"probability": 2 / 3, "standard_error": 0.01},
        },
        unprotected=["losing the failure domain rack loses the state of rank 0: no other"],
    )
    supervisor.end("FAILED", "user_error", message="it raised", traceback="Traceback\n  boom [x]")
    assert run(["wait", job_id, "--timeout", "60"]) == ExitCode.JOB_FAILED
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
        "Rank 3 is suspected with a score of 0.90.",
        "Ranks 0 and 1 were in f0 (a.py:0), called from f1 (a.py:1), called from",
        "The decision was to replace the worker, because its agent is healthy.",
        f"1 alternative was refused; `holdfast incidents {job_id} 1 --alternatives` lists them.",
        "The failure budget has 19 of 20 failures left within",
        "Training continued from step 5.",
        "No step was lost.",
        "own RAM (rank 0); a partner's RAM (rank 3)",
        "The recovery took 200 ms: 2 ms for the report of the fault.",
        "1 copy on other nodes; training continues from memory after 1 lost node: 100%, "
        "2 lost nodes: 67%",
        "not protected: losing the failure domain rack",
        "boom [x]",
    ):
        assert fact in shown, fact

    for arguments in (["describe", job_id], ["incidents", job_id, "1"]):
        assert run([*arguments, "--alternatives"]) == ExitCode.OK
        shown = capsys.readouterr().out
        assert "The alternative 're-form in place' was refused: a process is gone." in shown

    assert run(["describe", job_id, "--json"]) == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    assert document["job"]["outcome"]["code"] == "user_error"
    protection = document["attempts"][0]["memory_protection"]
    assert protection["partners"] == {"0": ["n1"], "3": ["n0"]}
    assert protection["recoverable"]["2"]["standard_error"] == 0.01
    incident = document["incidents"][0]
    assert incident["tiers"] == {"0": "own_ram", "3": "partner_ram"}
    assert incident["budget"]["failures_left"] == 19
    assert incident["attempts_lost"] == 1
    accounted = document["goodput"]["device_seconds_lost_by_incident"]
    assert incident["device_seconds_lost"] == accounted.get("1", 0.0)

    assert run(["ls"]) == ExitCode.OK
    assert job_id in capsys.readouterr().out
    assert run(["ls", "--json", "--state", "FAILED"]) == ExitCode.OK
    assert [job["id"] for job in json.loads(capsys.readouterr().out)] == [job_id]
    for empty, nothing in (("json", "[]\n"), ("jsonl", "")):
        assert run(["ls", "-o", empty, "--state", "PAUSED"]) == ExitCode.OK
        assert capsys.readouterr().out == nothing


@pytest.mark.parametrize("json_wanted", [False, True])
def test_submit_follow_exits_with_the_result_of_the_job(
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
    flags = ["-o", "jsonl"] if json_wanted else []
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


def test_resize_explains_why_it_refuses_a_job_of_one_size(
    spec_file: str, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = submitted(spec_file, capsys)
    assert run(["resize", job_id, "--nodes", "1"]) == ExitCode.USAGE
    assert "only a spec with resources.nodes" in capsys.readouterr().err


@pytest.mark.seconds
def test_pause_resume_and_a_second_cancel(
    spec_file: str, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = submitted(spec_file, capsys)
    server.run_job(job_id, steps=2, end=False)
    assert run(["pause", job_id, "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["desired"] == "paused"
    eventually(lambda: not server.cluster.supervisors)
    assert run(["resume", job_id]) == ExitCode.OK
    supervisor = server.supervisor(job_id)
    supervisor.obeys = False
    for at_once in (False, True):
        assert run(["cancel", job_id]) == ExitCode.OK
        eventually(lambda: bool(supervisor.orders))

        def ordered(at_once: bool = at_once) -> bool:
            return (supervisor.orders[-1].deadline == 0.0) is at_once

        eventually(ordered)


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
    texts = [line["text"] for line in json.loads(capsys.readouterr().out)]
    assert texts == ["of zero [bold]", "of one"]


@pytest.mark.slow
def test_exit_codes_of_errors(
    spec_file: str, server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(code: ExitCode, message: str, *arguments: str) -> None:
        assert run(list(arguments)) == code, arguments
        printed = capsys.readouterr()
        assert printed.out == ""
        assert message in printed.err

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
    refused(ExitCode.CONFLICT, "job_ended", "pause", job_id)
    done = submitted(spec_file, capsys)
    server.run_job(done)
    assert run(["wait", done]) == ExitCode.OK
    capsys.readouterr()
    refused(ExitCode.CONFLICT, "job_ended", "cancel", done)
    server.stop()
    refused(ExitCode.UNREACHABLE, "holdfast serve", "ls")
