"""Faults over REST, client and command line: validated, stored, sent to the supervisor once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import httpx
import pytest
from tests.support.service.live_server import SPEC, LiveServer, live_server
from tests.support.waiting import eventually

from holdfast import Client
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast.client import fault_storm
from holdfast.errors import ApiError, Conflict, InvalidSpec
from holdfast_workers.fault_injection.kinds import FaultKind


@pytest.fixture
def running_job(server: LiveServer, client: Client) -> str:
    """The id of a running job."""
    submitted = client.submit(SPEC)
    server.run_job(submitted.id, end=False)
    return submitted.id


def test_a_server_injects_nothing_by_default(tmp_path: Path) -> None:
    with (
        live_server(tmp_path, allow_fault_injection=False) as server,
        Client(server.address) as client,
    ):
        job = client.submit(SPEC)
        with pytest.raises(ApiError, match="--allow-fault-injection") as refused:
            client.inject(job.id, "kill", rank=1)
        assert (refused.value.status, refused.value.code) == (403, "injection_disabled")
        assert client.faults(job.id) == []


def test_all_problems_of_a_fault_are_reported(client: Client, running_job: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        client.inject(running_job, "kill", rank=4, duration_s=3, colour="red")
    assert refused.value.code == "invalid_fault"
    assert {fault["path"] for fault in refused.value.faults} == {"rank", "duration_s", "colour"}


def test_a_fault_is_sent_to_the_supervisor_and_recorded(
    server: LiveServer, client: Client, running_job: str
) -> None:
    chosen = client.inject(running_job, "kill")
    client.inject(running_job, "bit_flip", rank=2, at_step=50, where="moment")
    received = server.supervisor(running_job).wanted_faults
    eventually(lambda: len(received) == 2)
    assert chosen.fault["rank"] in range(4)  # chosen randomly, and stored
    assert received == [
        (1, {"kind": "kill", "rank": chosen.fault["rank"]}),
        (2, {"kind": "bit_flip", "rank": 2, "at_step": 50, "where": "moment"}),
    ]
    eventually(lambda: all(fault.injected_at for fault in client.faults(running_job)))
    events = [event for event in client.events(running_job).items if event.kind == "fault.injected"]
    assert [event.data["number"] for event in events] == [1, 2]


def test_an_idempotency_key_returns_the_same_fault_or_a_conflict(
    client: Client, running_job: str
) -> None:
    first = client.inject(running_job, "stop", rank=1, idempotency_key="k")
    assert client.inject(running_job, "stop", rank=1, idempotency_key="k").number == first.number
    with pytest.raises(Conflict):
        client.inject(running_job, "stop", rank=2, idempotency_key="k")
    assert len(client.faults(running_job)) == 1


def test_an_ended_job_rejects_a_fault(
    server: LiveServer, client: Client, http: httpx.Client, running_job: str
) -> None:
    server.supervisor(running_job).end()
    eventually(lambda: client.get(running_job).state.terminal)
    answer = http.post(f"/api/v1/jobs/{running_job}/faults", json={"kind": "kill"})
    assert (answer.status_code, answer.json()["code"]) == (409, "job_ended")
    assert run(["inject", running_job, "kill", "--address", client.address]) == ExitCode.CONFLICT


def test_the_command_injects_a_fault_and_prints_its_settings(
    server: LiveServer, client: Client, running_job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"inject {running_job} slow --rank 3 --set factor=2.5 --set steps=4".split()
    assert run([*words, "--json", "--address", client.address]) == ExitCode.OK
    shown = json.loads(capsys.readouterr().out)
    assert shown["fault"] == {"kind": "slow", "rank": 3, "factor": 2.5, "steps": 4}
    words = ["inject", running_job, "gil", "--phase", "forward", "--duration", "500ms"]
    assert run([*words, "--address", client.address]) == ExitCode.OK
    assert client.faults(running_job)[1].fault["duration_s"] == 0.5
    assert run(["inject", running_job, "gil", "--duration", "soon"]) == ExitCode.USAGE


@pytest.mark.slow
def test_a_storm_is_reproducible_by_its_seed_and_ends_after_its_duration(
    server: LiveServer, client: Client, running_job: str
) -> None:
    words = f"inject {running_job} kill stop --storm mtbf=30ms --seed 3 --for 1s".split()
    assert run([*words, "--address", client.address]) == ExitCode.OK
    struck = [(fault.kind, fault.fault["rank"]) for fault in client.faults(running_job)]
    schedule = fault_storm.schedule(0.03, 3, (FaultKind.KILL, FaultKind.STOP), 4)
    drawn = list(itertools.takewhile(lambda fault: fault.at_s <= 1.0, schedule))
    assert struck == [(fault.injection.kind, fault.injection.rank) for fault in drawn]
    assert len(struck) > 15 and set(struck) == {(k, r) for k in ("kill", "stop") for r in range(4)}
