"""`holdfast upgrade`: running jobs continue in the server's build, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.support.service.fake_cluster import FakeSupervisor
from tests.support.service.live_server import SPEC, LiveServer
from tests.support.waiting import eventually

from holdfast import Client
from holdfast.cli import upgrade
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast_service.job_model.lifecycle import Phase, State
from holdfast_service.job_model.supervisor_protocol import EventKind

ONE_NODE = {**SPEC, "parallel": {"dp_shard": 1}, "resources": {"workers_per_node": 1}}


@pytest.fixture(autouse=True)
def at_server(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_ADDRESS", server.address)
    monkeypatch.setattr(upgrade, "POLL_S", 0.02)


def started(server: LiveServer, client: Client, name: str, build: str) -> FakeSupervisor:
    job_id = client.submit({**ONE_NODE, "name": name}).id
    supervisor = server.supervisor(job_id)
    supervisor.build = build
    supervisor.train(5)
    eventually(lambda: client.get(job_id).progress.step == 5 and client.get(job_id).build)
    return supervisor


def text(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr()
    return " ".join(f"{printed.out} {printed.err}".split())


def successors(server: LiveServer, build: str, restored: int) -> Callable[[str], None]:
    """Lets the next supervisor of a job train in `build` from the step `restored`."""

    def play(job_id: str, former: FakeSupervisor) -> None:
        eventually(lambda: server.cluster.supervisors.get(job_id) not in (None, former), 60)
        supervisor = server.supervisor(job_id)
        supervisor.build = build
        supervisor.form(2, restored)
        supervisor.enter(Phase.RUNNING)

    return lambda job_id: threading.Thread(
        target=play, args=(job_id, server.supervisor(job_id)), daemon=True
    ).start()


@pytest.mark.slow
def test_only_jobs_of_another_build_are_restarted_and_nothing_before_yes(
    server: LiveServer, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    present = client.version().build
    old = started(server, client, "old", "0123456789ab").launch.job_id
    new = started(server, client, "new", present).launch.job_id
    assert run(["upgrade"]) == ExitCode.OK
    plan = text(capsys)
    assert f"build {present}" in plan and "0123456789ab saves step 5" in plan
    assert {client.get(job).generation for job in (old, new)} == {1}
    server.supervisor(old).emit(
        EventKind.ATTEMPT_ENDED, attempt=1, reason="paused", last_step=7, gone=[]
    )
    successors(server, present, restored=5)(old)
    assert run(["upgrade", "--yes"]) == ExitCode.OK
    shown = text(capsys)
    assert f"old ({old}): trains from step 5 after" in shown and "2 steps lost 1 job of 1" in shown
    assert (client.get(old).build, client.get(old).state) == (present, State.RUNNING)
    assert client.get(new).generation == 1
    kinds = [event.kind for event in client.all_events(old)]
    assert kinds.count("job.restart_requested") == 1
    assert run(["upgrade", "--yes"]) == ExitCode.OK
    assert "0 jobs of 0" in text(capsys)


def test_a_job_that_its_user_stops_is_left_alone(
    server: LiveServer, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = started(server, client, "old", "0123456789ab")
    supervisor.obeys = False
    client.pause(supervisor.launch.job_id)
    assert run(["upgrade", "--yes"]) == ExitCode.OK
    assert "0 jobs of 0" in text(capsys)


@pytest.mark.seconds
def test_a_job_that_does_not_train_in_time_is_reported_and_goes_on(
    server: LiveServer, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    old = started(server, client, "old", "0123456789ab").launch.job_id
    assert run(["upgrade", "--yes", "--timeout", "1s"]) == ExitCode.JOB_FAILED
    shown = text(capsys)
    assert f"old ({old}): is " in shown and "after 1 s" in shown and "0 jobs of 1" in shown
    assert client.get(old).desired == "running"
    assert run(["restart", old]) == ExitCode.OK  # once more
