"""`holdfast verify`: its result as a sentence and as an exit code, and the end of the replay."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tests.support.service.live_server import SPEC, LiveServer
from tests.support.service.replayed import change_digest, end_of, form_again, play, stored
from tests.support.waiting import DEADLINE_S, eventually

from holdfast import Client
from holdfast.cli import verify
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast_service.job_model.lifecycle import STOPPED_EARLY, State

FIXED = {**SPEC, "train": {"steps": 30}}
ELASTIC = {
    **FIXED,
    "name": "elastic",
    "parallel": {"dp_shard": "auto", "tp": 2},
    "resources": {"nodes": {"min": 1, "max": 3}, "workers_per_node": 2, "standby_nodes": 0},
    "train": {"steps": 30, "global_batch": 12, "micro_batch": 2},
}


@pytest.fixture(autouse=True)
def at_server(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_ADDRESS", server.address)
    monkeypatch.setattr(verify, "POLL_S", 0.02)


@pytest.fixture
def job_id(server: LiveServer, client: Client) -> str:
    """A job that was cancelled after 8 of its 30 steps."""
    made = client.submit(FIXED).id
    play(server, client, made, 8)
    server.supervisor(made).end("CANCELLED", "cancelled")
    eventually(lambda: client.get(made).state is State.CANCELLED)
    return made


@pytest.fixture
def elastic_id(server: LiveServer, client: Client) -> str:
    made = client.submit(ELASTIC).id
    play_elastic(server, made, steps=5, restored=4, last=8)
    stored(client, made, 8)
    server.supervisor(made).end("CANCELLED", "cancelled")
    eventually(lambda: client.get(made).state is State.CANCELLED)
    return made


def play_elastic(server: LiveServer, job_id: str, *, steps: int, restored: int, last: int) -> None:
    """Six ranks compute some steps; then four go on from the step `restored` to the last."""
    supervisor = server.supervisor(job_id)
    supervisor.form(1, 0, {"dp_shard": 3, "tp": 2})
    supervisor.run(1, 1, steps)
    form_again(server, job_id, restored, 2, last)


@contextmanager
def meanwhile(server: LiveServer, client: Client, play: Callable[[str], None]) -> Iterator[None]:
    """Play the replay that a command submits, in another thread."""

    def watch() -> None:
        eventually(lambda: any(job.name.endswith("-replay") for job in client.list()))
        play(next(job.id for job in client.list() if job.name.endswith("-replay")))

    player = threading.Thread(target=watch)
    player.start()
    yield
    player.join(DEADLINE_S)
    assert not player.is_alive()


def replay_of(client: Client) -> str:
    return next(job.id for job in client.list() if job.name.endswith("-replay"))


@pytest.mark.seconds
def test_all_steps_are_equal_and_the_replay_is_ended(
    server: LiveServer, client: Client, job_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with meanwhile(server, client, lambda replay: play(server, client, replay, 8)):
        assert run(["verify", job_id]) == ExitCode.OK
    assert capsys.readouterr().out == "8 of 8 steps equal on 1 mesh (4 ranks)\n"
    eventually(lambda: client.get(replay_of(client)).state is State.CANCELLED)


@pytest.mark.slow
def test_the_meshes_of_an_elastic_job_are_named(
    server: LiveServer, client: Client, elastic_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def replay(replay_id: str) -> None:
        play_elastic(server, replay_id, steps=4, restored=4, last=9)

    with meanwhile(server, client, replay):
        assert run(["verify", "elastic"]) == ExitCode.OK
    text = "8 of 8 steps equal on 2 meshes (6 ranks to step 4, 4 to step 8)\n"
    assert capsys.readouterr().out == text


@pytest.mark.slow
def test_a_replay_that_went_through_to_its_end_is_not_cancelled(
    server: LiveServer, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = client.submit(SPEC).id
    play(server, client, job_id, 5)
    end_of(server, client, job_id)
    with meanwhile(server, client, lambda replay: play(server, client, replay, 5)):
        assert run(["verify", job_id, "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["equal"] == 5
    assert client.get(replay_of(client)).desired == "running", "no cancel was asked for"


@pytest.mark.seconds
def test_a_replay_of_a_job_that_stopped_early_ends_by_itself_as_well(
    server: LiveServer, client: Client
) -> None:
    job_id = client.submit(FIXED).id
    play(server, client, job_id, 8)
    server.supervisor(job_id).end("SUCCEEDED", STOPPED_EARLY)
    eventually(lambda: client.get(job_id).state.terminal)
    with meanwhile(server, client, lambda replay: play(server, client, replay, 8)):
        assert run(["verify", job_id]) == ExitCode.OK
    assert client.get(replay_of(client)).desired == "running", "no cancel was asked for"


@pytest.mark.seconds
def test_a_difference_is_shown_with_both_digests(
    server: LiveServer, client: Client, job_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change_digest(server, job_id, 6)
    with meanwhile(server, client, lambda replay: play(server, client, replay, 8)):
        assert run(["verify", job_id]) == ExitCode.JOB_FAILED
    out = capsys.readouterr().out
    assert "different: step 6 has the digest changed in the job and d6 in its replay" in out


@pytest.mark.slow
def test_a_disturbed_replay_is_no_result(
    server: LiveServer, client: Client, elastic_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def replay(replay_id: str) -> None:
        play_elastic(server, replay_id, steps=5, restored=5, last=8)

    with meanwhile(server, client, replay):
        assert run(["verify", elastic_id]) == ExitCode.USAGE
    out = capsys.readouterr().out
    assert out.startswith("disturbed: the job and its replay have different meshes after step 4")
    assert out.endswith(f"Run it again: holdfast verify {elastic_id}\n")


@pytest.mark.slow
def test_a_replay_that_fails_is_no_result(
    server: LiveServer, client: Client, job_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(replay_id: str) -> None:
        server.run_job(replay_id, steps=3, end=False)
        server.supervisor(replay_id).end("FAILED", "user_error", message="no such file")

    with meanwhile(server, client, fail):
        assert run(["verify", job_id]) == ExitCode.USAGE
    text = "incomplete: the replay is FAILED at step 3 of 8: no such file; 3 of 3 steps equal\n"
    assert capsys.readouterr().out == text


@pytest.mark.seconds
def test_a_replay_goes_on_after_the_timeout_and_is_waited_for_again(
    server: LiveServer, client: Client, job_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", job_id, "--timeout", "50ms"]) == ExitCode.TIMEOUT
    replay_id = replay_of(client)
    assert f"holdfast verify {replay_id}" in capsys.readouterr().err
    play(server, client, replay_id, 8)
    assert run(["verify", replay_id]) == ExitCode.OK
    assert "8 of 8 steps equal" in capsys.readouterr().out
    assert len(list(client.list())) == 2, "a replay is not replayed"


def test_no_wait_prints_the_replay(
    server: LiveServer, client: Client, job_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", job_id, "--no-wait"]) == ExitCode.OK
    assert capsys.readouterr().out.strip() == replay_of(client)


@pytest.mark.seconds
def test_ctrl_c_leaves_the_replay_running(server: LiveServer, client: Client, job_id: str) -> None:
    waiting = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "verify", job_id],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert waiting.stderr is not None
    assert waiting.stderr.readline().startswith("replay ")
    waiting.send_signal(signal.SIGINT)
    _, notice = waiting.communicate(timeout=DEADLINE_S)
    assert waiting.returncode == ExitCode.INTERRUPTED
    replay_id = replay_of(client)
    assert f"holdfast verify {replay_id}" in notice
    assert not client.get(replay_id).state.terminal
