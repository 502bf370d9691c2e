"""Several machines from bare to a trained job: `holdfast cluster up`, `join`, `serve`, and a host
without power."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.machine_room.host import HOME
from tests.support.machine_room.paced import PACE, RECIPE
from tests.support.machine_room.training_room import JOIN, TrainingRoom, training_room
from tests.support.waiting import eventually

from holdfast_service.errors import JobEnded
from holdfast_service.job_model.supervisor_protocol import EventKind

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
STEPS = 120
LONG_STEPS = 100_000
JOB_S = 120.0
EXAMPLE_S = 400.0
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingRoom]:
    with training_room(tmp_path_factory.mktemp("logs"), ["a", "b", "c", "d"]) as made:
        made.up()
        made.join("a", "b", "c", options="--cpus 1 --label holdfast.io/domain=rack-1")
        made.copy_token("d")
        yield made


def refusal(room: TrainingRoom, name: str, command: str) -> str:
    refused = room.room[name].run(command, check=False)
    assert refused.returncode == 8, refused.stdout
    return refused.stdout


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (f"echo {'0' * 64} > wrong; chmod 600 wrong; {JOIN} --token-file wrong", "refuses this"),
        (f"cp token open; chmod 644 open; {JOIN} --token-file open", "chmod 600 open"),
        (f"{JOIN} --token-file none", "cannot read the token file none"),
        ("holdfast cluster join head:1 --token-file token", "no head answers at .*:1 .*up --head"),
        ("holdfast cluster join nowhere --token-file token", "nowhere is not a known machine"),
        ("holdfast cluster leave", "not part of a cluster"),
    ],
)
def test_a_machine_that_cannot_join_says_why(room: TrainingRoom, command: str, why: str) -> None:
    words = command.replace("--token-file token --token-file", "--token-file")
    assert re.search(why, refusal(room, "d", words))


def test_a_machine_joins_one_cluster_only(room: TrainingRoom) -> None:
    assert "part of the cluster at" in refusal(room, "a", JOIN)
    assert "is the head of the cluster" in refusal(room, "head", "holdfast cluster up --head")


def test_a_machine_with_another_version_does_not_join(room: TrainingRoom) -> None:
    replace = (
        "import json, sys\n"
        "from ray._raylet import GcsClient\n"
        "client = GcsClient(address=sys.argv[1])\n"
        "key, space = b'CLUSTER_METADATA', b'cluster'\n"
        "was = client.internal_kv_get(key, space)\n"
        "now = json.dumps({**json.loads(was), **json.loads(sys.argv[2])}).encode()\n"
        "client.internal_kv_put(key, now, True, space)\n"
        "print(was.decode())\n"
    )
    room.head.write(f"{HOME}/replace.py", replace)

    def set_versions(versions: str) -> str:
        token = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={HOME}/.holdfast/node/token"
        command = f"{token} python replace.py {room.head.address}:6379 '{versions}'"
        return room.head.run(command).stdout.splitlines()[-1]

    before = set_versions('{"ray_version": "2.0.0"}')
    assert "has Ray 2.0.0, this machine has" in refusal(room, "d", JOIN)
    set_versions(before)


def test_the_status_names_all_nodes_with_their_labels(room: TrainingRoom) -> None:
    status = json.loads(room.room["a"].run("holdfast cluster status --json").stdout)
    assert status["running"]
    found = {node["name"]: (node["alive"], node["cpus"]) for node in status["nodes"]}
    assert found == {"head": (True, 0), "a": (True, 1), "b": (True, 1), "c": (True, 1)}
    assert all(
        node["labels"] == {"holdfast.io/domain": "rack-1"}
        for node in status["nodes"]
        if node["name"] != "head"
    )


def test_a_host_loses_power_and_the_job_goes_on_with_the_same_bits(room: TrainingRoom) -> None:
    client = room.serve()
    job = client.submit(room.spec(STEPS))
    eventually(lambda: (client.get(job.id).progress.step or 0) >= 5, JOB_S)
    before = room.hosts_of(job.id)
    lost = before[1]
    room.room.power_off(lost)
    ended = client.wait(job.id, JOB_S)
    assert ended.state == "SUCCEEDED", ended
    after = room.hosts_of(job.id)
    assert after[0] == before[0]
    assert after[1] not in before.values()
    (incident,) = client.incidents(job.id)
    assert incident.resolution, incident
    print("recovery, in seconds:", incident.phases_s)
    check_bits(room, job.id, room.spec(STEPS))
    assert any(job.id in key for key in room.services.objects())


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_example_outlives_the_loss_of_a_host(tmp_path: Path) -> None:
    """`examples/stdlib-lm.yaml` as it is, on three hosts."""
    spec = yaml.safe_load((REPOSITORY / "examples" / "stdlib-lm.yaml").read_text())
    with training_room(tmp_path, ["a", "b", "c"]) as room:
        room.up()
        room.join("a", "b", "c")
        client = room.serve()
        job = client.submit(spec)
        eventually(lambda: (client.get(job.id).progress.step or 0) >= 20, JOB_S)
        lost = room.hosts_of(job.id)[2]
        room.room.power_off(lost)
        ended = client.wait(job.id, EXAMPLE_S)
        assert ended.state == "SUCCEEDED", ended
        assert lost not in room.hosts_of(job.id).values()
        (incident,) = client.incidents(job.id)
        print("recovery, in seconds:", incident.phases_s, "steps lost:", incident.steps_lost)
        check_bits(room, job.id, spec, EXAMPLE_S)


def check_bits(
    room: TrainingRoom, job_id: str, spec: dict[str, Any], within_s: float = JOB_S
) -> None:
    """The same job on two nodes, undisturbed, has the same digest at each step that was made."""
    digests = room.client.digests(job_id)
    reached = max(digests)
    assert set(digests) >= set(range(1, reached + 1))
    spec["resources"]["standby_nodes"] = 0
    undisturbed = room.client.submit(spec)

    def made() -> dict[int, str]:
        return room.client.digests(undisturbed.id)

    eventually(lambda: reached in made(), within_s)
    with suppress(JobEnded):
        room.client.cancel(undisturbed.id)
    assert digests.items() <= made().items()


@pytest.mark.soak
@pytest.mark.timeout(500)
def test_a_host_is_cut_off_another_is_added_and_a_third_dies(tmp_path: Path) -> None:
    with training_room(tmp_path, ["a", "b", "c", "d"]) as room:
        room.up()
        room.join("a", "b", "c")
        client = room.serve()
        spec = room.spec(LONG_STEPS, recipe=RECIPE)
        job = client.submit({**spec, "env": {PACE: "0.1"}})
        eventually(lambda: (client.get(job.id).progress.step or 0) >= 5, JOB_S)

        cut = room.hosts_of(job.id)[1]
        room.room.link(cut, up=False)
        eventually(lambda: cut not in room.hosts_of(job.id).values(), JOB_S)
        seen = newest_event(room, job.id)
        room.join("d")  # a new machine takes the standby's seat, which is free
        room.room.link(cut, up=True)
        # The head has declared the node dead, and Ray ends it once it learns of that.
        status = "holdfast cluster status"
        eventually(lambda: room.room[cut].run(status, check=False).returncode == 8, JOB_S)

        lost = room.hosts_of(job.id)[0]
        eventually(lambda: is_standby_ready(room, job.id, seen), JOB_S)
        room.room.power_off(lost)
        eventually(lambda: lost not in room.hosts_of(job.id).values(), JOB_S)
        assert "d" in room.hosts_of(job.id).values()
        step = client.get(job.id).progress.step or 0
        eventually(lambda: (client.get(job.id).progress.step or 0) > step, JOB_S)
        client.cancel(job.id)
        assert client.wait(job.id, JOB_S).state == "CANCELLED"
        for incident in client.incidents(job.id):
            print("recovery, in seconds:", incident.phases_s)
        room.join(cut)
        check_bits(room, job.id, spec)


def newest_event(room: TrainingRoom, job_id: str) -> int:
    return max(event.seq for event in room.client.all_events(job_id))


def is_standby_ready(room: TrainingRoom, job_id: str, since: int) -> bool:
    said = [e for e in room.client.all_events(job_id, since) if e.kind == EventKind.STANDBY]
    return any(event.data["state"] == "ready" for event in said)
