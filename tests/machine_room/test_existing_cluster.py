"""A Ray cluster that others started: its nodes run the server's Holdfast, or are named and left
alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.machine_room import existing_cluster
from tests.support.machine_room.training_room import COMMAND_S, TrainingRoom, training_room
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
STEPS = 30
JOB_S = 120.0
BARE, OTHER = "a", "b"


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingRoom]:
    """Host `a` has no Holdfast, host `b` another build of it; both have all that it needs."""
    with training_room(tmp_path_factory.mktemp("logs"), [BARE, OTHER]) as made:
        existing_cluster.hide_holdfast(made.room[BARE], "holdfast_service", "holdfast_workers")
        existing_cluster.install_another_build(made.room[OTHER])
        existing_cluster.start_head(made)
        existing_cluster.start_nodes(made, BARE, OTHER)
        yield made


def doctor(room: TrainingRoom) -> list[dict[str, Any]]:
    """What is wrong with the nodes."""
    command = f"holdfast doctor --cluster --json --address {room.client.address}"
    done = room.head.run(command, check=False, timeout_s=COMMAND_S)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert results, done.stdout
    return [result for result in results if result["grade"] == "bad"]


def spec(room: TrainingRoom) -> dict[str, Any]:
    made = room.spec(STEPS)
    made["resources"]["standby_nodes"] = 0
    return made


def test_sent_code_trains_on_nodes_without_holdfast_and_with_another_build(
    room: TrainingRoom,
) -> None:
    client = room.serve("--send-code --allow-fault-injection", has_token=False)
    job = client.submit(spec(room))
    assert doctor(room) == []
    ended = client.wait(job.id, JOB_S)
    assert ended.state == "SUCCEEDED", ended
    assert set(room.hosts_of(job.id).values()) == {BARE, OTHER}


@pytest.mark.soak
def test_without_sent_code_the_nodes_are_named_and_the_job_waits(room: TrainingRoom) -> None:
    client = room.serve(has_token=False)
    found = {result["what"]: result for result in doctor(room)}
    bare, other = (f"{room.room.address(name)} holdfast" for name in (BARE, OTHER))
    assert set(found) == {bare, other}
    assert "Holdfast is not installed" in found[bare]["seen"]
    assert "--send-code" in found[bare]["advice"]
    job = client.submit(spec(room))

    def waiting() -> str:
        now = client.get(job.id)
        return now.waiting.reason if now.state == "QUEUED" and now.waiting else ""

    try:
        eventually(lambda: room.room.address(BARE) in waiting(), JOB_S)
    finally:
        print(client.get(job.id), [*client.all_events(job.id)])
        print(room.server.output()[-3000:])
    client.cancel(job.id)
    client.wait(job.id, JOB_S)
