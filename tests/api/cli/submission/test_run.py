"""`holdfast run` submits a program with the current folder, and reports what it ignores."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.support.service.fake_cluster import row
from tests.support.service.live_server import SPEC, LiveServer
from tests.support.waiting import DEADLINE_S, eventually

from holdfast import Client
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast.cli.submission import local_run
from holdfast.cli.submission.job_follower import JobFollower, progress_line
from holdfast_service.job_model.lifecycle import START_WAIT
from holdfast_service.job_model.supervisor_protocol import Capacity, EventKind, NodeCapacity
from holdfast_service.views.jobs import JobView, WaitingView
from holdfast_workers.protocol.messages import LogLine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("print('step 1 loss 2')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def at_server(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HOLDFAST_ADDRESS", server.address)
    return server.address


def resolved(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["run", "--dry-run", "--json", *arguments]) == ExitCode.OK
    spec: dict[str, Any] = json.loads(capsys.readouterr().out)
    return spec


@pytest.mark.usefixtures("folder", "at_server")
def test_the_options_become_the_spec(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    (folder / "needs.txt").write_text("einops>=0.8  # shapes\n")
    monkeypatch.setenv("FROM_HERE", "yes")
    spec = resolved(
        capsys,
        *("--nproc-per-node", "2", "--preload", "torch,json"),
        *("--pip", "needs.txt", "--pip", "timm==1.0.11"),
        *("--env", "A=1", "--env", "FROM_HERE", "--name", "mine", "--set", "program.grace_s=3"),
        *("--", "train.py", "--lr", "3e-4", "--name", "of script"),
    )
    assert (spec["name"], spec["script"]) == (
        "mine",
        ["train.py", "--lr", "3e-4", "--name", "of script"],
    )
    assert (spec["parallel"]["dp_shard"], spec["resources"]["workers_per_node"]) == (2, 2)
    assert spec["program"]["preload"] == ["torch", "json"] and spec["program"]["grace_s"] == 3
    assert spec["env"] == {"A": "1", "FROM_HERE": "yes"}
    assert spec["runtime_env"]["pip"] == ["einops>=0.8", "timm==1.0.11"] and spec[
        "code"
    ].startswith("sha256:")
    assert not {"model", "data", "train", "guards", "command"} & spec.keys(), "a script has none"


@pytest.mark.usefixtures("folder", "at_server")
def test_options_of_torchrun_are_accepted_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--standalone", "--rdzv_backend=c10d", "--max-restarts", "3", "--no-follow"]
    assert run(["run", *arguments, "--", "torchrun", "--tee", "3", "train.py"]) == ExitCode.OK
    shown = capsys.readouterr()
    for name in ("--standalone", "--rdzv-backend", "--max-restarts", "--tee"):
        assert f"{name} is ignored: " in shown.err
    with Client() as client:
        job = client.get(shown.out.strip())
    assert (job.brings, job.level, job.progress.steps) == ("script", None, None)


@pytest.mark.usefixtures("folder", "at_server")
def test_a_command_needs_no_code(capsys: pytest.CaptureFixture[str]) -> None:
    spec = resolved(capsys, "--no-code", "--", "trainer", "--fast")
    assert (spec["command"], spec["code"]) == (["trainer", "--fast"], None)
    assert run(["run", "--no-code", "--gpus", "1", "--", "trainer"]) == ExitCode.USAGE
    assert "no node has 1 GPU for 1 worker: the largest has 0" in capsys.readouterr().err


@pytest.mark.seconds
@pytest.mark.usefixtures("folder", "at_server")
def test_ranks_get_the_gpus_that_the_nodes_have_unless_an_option_says_otherwise(
    server: LiveServer, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("run", "--dry-run", "--json", "--nproc-per-node", "2")
    assert resolved(capsys, "--", "train.py")["resources"]["gpus_per_worker"] == 0
    nodes = [
        NodeCapacity(f"node{n}", f"127.0.0.{n}", cpus=2.0, gpus=gpus)
        for n, gpus in enumerate((0.0, 8.0))
    ]
    server.cluster.nodes = Capacity(nodes=tuple(nodes), can_grow=False)
    eventually(lambda: any(node.gpus for node in client.nodes()))
    for options, gpus in (
        ((), 1),
        (("--gpus", "0"), 0),
        (("--gpus", "1"), 1),
        (("--set", "resources.gpus_per_worker=0"), 0),
    ):
        assert run([*line, *options, "--", "train.py"]) == ExitCode.OK
        shown = capsys.readouterr()
        assert json.loads(shown.out)["resources"]["gpus_per_worker"] == gpus
        assert ("--gpus 0 for none" in shown.err) == (not options)


@pytest.mark.usefixtures("folder")
def test_wrong_usage_is_told_before_a_server_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, shown in (
        (["--", "other.py"], "there is no file other.py"),
        (["--", "accelerate", "launch", "train.py"], "holdfast run --nproc-per-node N"),
        (["--env", "NOT_SET_HERE", "--", "train.py"], "write NOT_SET_HERE=TEXT"),
        (["--nproc-per-node", "gpu", "--", "train.py"], "--gpus 1"),
        ([], "nothing to start"),
    ):
        assert run(["run", "--address", "http://127.0.0.1:9", *arguments]) == ExitCode.USAGE
        assert shown in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_without_a_server_it_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "--no-follow", "--address", "http://127.0.0.1:9", "--", "train.py"]
    assert run(arguments) == ExitCode.UNREACHABLE
    shown = " ".join(capsys.readouterr().err.split())
    assert "`holdfast serve`" in shown and "holdfast run --local" in shown


@pytest.mark.usefixtures("folder")
def test_what_has_no_meaning_with_a_server_of_its_own_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, shown in (
        (["--local", "--address", "http://127.0.0.1:9"], "leave out --address"),
        (["--local", "--no-follow"], "--no-follow needs a server"),
        (["--data-dir", "here"], "--data-dir is for --local"),
    ):
        assert run(["run", *arguments, "--", "train.py"]) == ExitCode.USAGE
        assert shown in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("folder")
def test_a_place_without_room_for_the_run_is_named(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "file").write_text("")
    line = ["run", "--local", "--data-dir", str(folder / "file"), "--", "train.py"]
    assert run(line) == ExitCode.USAGE
    assert "name another place with --data-dir" in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("folder", "at_server")
def test_a_followed_run_shows_what_its_ranks_write(
    server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of several ranks name their rank; an agent's lines are not those of the program."""
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)

    def play() -> None:
        with Client(server.address) as client:
            eventually(lambda: list(client.list()))
            (job,) = client.list()
        supervisor = server.run_job(job.id, steps=3, end=False)
        lines = ((0, "step 1 loss 2.5"), (1, "only \x1b[1mme"), (None, "of the agent"))
        supervisor.logs = [
            LogLine("n0", "a", seq, 1.0, "n0.a.0", 1, rank, "stdout", text)
            for seq, (rank, text) in enumerate(lines, 1)
        ]
        eventually(lambda: "attempt 1 runs" in err.getvalue())
        supervisor.end()

    player = threading.Thread(target=play)
    player.start()
    assert run(["run", "--nproc-per-node", "2", "--", "train.py"]) == ExitCode.OK
    player.join()
    shown = capsys.readouterr()
    assert shown.out == "[rank 0] step 1 loss 2.5\n[rank 1] only \x1b[1mme\x1b[0m\n"
    assert "SUCCEEDED" in err.getvalue()
    assert "rank 0 pid 100, rank 1 pid 101 on n0; rank 2 pid 102" in err.getvalue()
    assert f"relative paths are in {server.settings.data_dir}/cache/programs/" in err.getvalue()


@pytest.mark.seconds
@pytest.mark.usefixtures("folder", "at_server")
def test_describe_shows_the_level_and_the_lines_of_the_next(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(["run", "--no-follow", "--nproc-per-node", "2", "--nnodes", "2", "--", "train.py"])
        == ExitCode.OK
    )
    job_id = capsys.readouterr().out.strip()
    server.run_job(job_id, steps=41)
    with Client() as client:
        client.wait(job_id, timeout_s=DEADLINE_S)
    assert run(["describe", job_id]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "step 41, attempt 1" in shown and "train.py" in shown
    assert "0: Holdfast launches the program" in shown
    assert "Worth adding" in shown and "job = holdfast.attach()" in shown
    assert run(["ls"]) == ExitCode.OK
    assert " 41 " in capsys.readouterr().out


@pytest.mark.seconds
@pytest.mark.usefixtures("folder", "at_server")
def test_a_program_without_steps_is_not_shown_at_step_0(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", "--no-follow", "--", "train.py"]) == ExitCode.OK
    job_id = capsys.readouterr().out.strip()
    server.run_job(job_id, steps=0)
    assert run(["wait", job_id, "--timeout", "60"]) == ExitCode.OK
    assert capsys.readouterr().out.strip() == "SUCCEEDED"
    assert run(["describe", job_id]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "no step reported, attempt 1" in shown and "step 0" not in shown
    assert run(["ls"]) == ExitCode.OK
    assert re.search(r"SUCCEEDED +- ", capsys.readouterr().out)


@pytest.mark.usefixtures("folder", "at_server")
def test_tokens_that_a_program_does_not_report_are_not_measured(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", "--no-follow", "--", "train.py"]) == ExitCode.OK
    job_id = capsys.readouterr().out.strip()
    supervisor = server.supervisor(job_id)
    supervisor.form(1)
    supervisor.rows = [replace(row(1, step), tokens=0) for step in range(1, 4)]
    supervisor.end()
    assert run(["wait", job_id, "--timeout", "60"]) == ExitCode.OK
    assert run(["metrics", job_id, "tokens", "tokens_per_second", "loss"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "tokens: not measured" in shown and "tokens_per_second: not measured" in shown
    assert "loss  now" in shown
    assert run(["describe", job_id]) == ExitCode.OK
    assert re.search(r"^Tokens/s +-$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.usefixtures("folder", "at_server")
def test_the_line_of_a_followed_job_fits_the_terminal(client: Client) -> None:
    job = client.submit({**SPEC, "name": "a-name-of-a-job-that-is-long"})
    progress = job.progress.model_copy(update={"step": 12345, "steps": 99999, "loss": 1.23456})
    job = job.model_copy(update={"progress": progress})
    whole = progress_line(job).plain
    assert all(part in whole for part in ("12345/99999", "loss 1.2346", "tokens/s", "attempt 0"))
    for width in range(20, 121):
        assert len(progress_line(job, width).plain) <= width
    fitted = progress_line(job, 80).plain
    assert "12345/99999" in fitted and "tokens/s" not in fitted
    reason = "the first step of its program (it counts as started after 600 s without one)"
    waiting = WaitingView(resource=START_WAIT, reason=reason, since=time.time(), until=None)
    waits = progress_line(job.model_copy(update={"waiting": waiting}), 80).plain
    assert reason in waits and waits.endswith(" s so far."), "a sentence is not cut"


@pytest.mark.seconds
@pytest.mark.usefixtures("folder", "at_server")
def test_a_job_that_is_followed_on_shows_each_incident_and_process_once(
    server: LiveServer, client: Client
) -> None:
    """After Ctrl-C a local run is followed to its end."""
    spec = {"command": "true", "parallel": {"dp_shard": 4}, "resources": {"workers_per_node": 2}}
    job = client.submit({"name": "mine", **spec})
    supervisor = server.run_job(job.id, steps=3, end=False)
    supervisor.emit(
        EventKind.INCIDENT_CLOSED,
        incident=1,
        cause="worker_crash",
        attempt=1,
        level=0,
        lost=[{"cause": "worker_crash", "rank": 1}],
        opened_at=1000.0,
        closed_at=1001.0,
    )
    written = io.StringIO()
    follower = JobFollower(client, Console(file=written, width=200), is_of_program=True)

    def interrupt(job: JobView) -> None:
        assert not job.state.terminal
        if "Incident 1" in written.getvalue():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follower.follow(job.id, interrupt)
    assert "If ranks 0, 2 and 3 printed an error about a lost connection" in written.getvalue()
    supervisor.end()
    follower.follow(job.id)
    assert written.getvalue().count("Incident 1") == 1
    assert written.getvalue().count("attempt 1 runs") == 1


@pytest.mark.usefixtures("folder", "at_server")
def test_ctrl_c_says_how_long_the_program_has_and_what_it_missed(client: Client) -> None:
    job = client.submit({"name": "mine", "command": "true", "parallel": {"dp_shard": 2}})
    for level, said in (
        (None, "has not started"),
        (0, "gets SIGTERM, and 30 s later SIGKILL"),
        (2, "(`should_stop`); 30 s later it gets SIGTERM, and 60 s later SIGKILL"),
        (3, "its last step is saved, in 60 s at most"),
    ):
        ended = job.model_copy(update={"level": level, "ended_at": 1031.0})
        assert said in local_run.time_to_save(ended)
        hint = local_run.late_end(ended, 1000.0)
        assert (hint is not None and "`job.should_stop`" in hint) == (level == 2)
        assert local_run.late_end(ended, 1002.0) is None, "it ended when it was asked"
