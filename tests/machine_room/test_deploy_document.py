"""`docs/deploy.md`, followed word for word on the hosts of a machine room."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tests.support.machine_room.followed_document import FollowedDocument, as_systemd, blocks
from tests.support.machine_room.training_room import COMMAND_S, TrainingRoom, training_room

DOCUMENT = Path(__file__).parents[2] / "docs/deploy.md"
HOSTS = ["head", "a", "b", "c"]


def test_every_block_of_the_document_says_where_it_belongs() -> None:
    found = blocks(DOCUMENT.read_text())
    assert len(found) > 10
    for block in found:
        assert set(block.hosts) <= set(HOSTS), block
        assert block.file or block.language == "sh", block


def test_words_of_a_unit_are_those_of_systemd() -> None:
    given = {"ONE": "a b", "MORE": "--x 1", "NONE": ""}
    assert as_systemd("p ${ONE} $MORE $NONE $UNSET end", given) == ["p", "a b", "--x", "1", "end"]


@pytest.mark.cluster
@pytest.mark.soak
@pytest.mark.timeout(500)
def test_the_document_is_true(tmp_path: Path) -> None:
    with training_room(tmp_path, HOSTS[1:]) as room:
        followed = FollowedDocument(room.room)
        sections = list(dict.fromkeys(block.section for block in blocks(DOCUMENT.read_text())))
        for section in sections:
            if section == "A machine is replaced":
                room.room.power_off("c")
                room.room.boot("c")
            for block in blocks(DOCUMENT.read_text()):
                if block.section == section:
                    followed.follow(block)
            if section == "A first job":
                check_job(room)
            if section == "A machine is replaced":
                assert alive(room) == {"head", "a", "c"}
        for host in HOSTS:
            left = room.room[host].run("ls -d /tmp/holdfast-* /dev/shm/*", check=False).stdout
            assert left.count("No such file") == 2, (host, left)
        unit = followed.started["a", "holdfast-node"]
        assert unit.wait(COMMAND_S) == 0, unit.output()
        serving = followed.started["head", "serve"]
        serving.signal(signal.SIGTERM)
        serving.wait(COMMAND_S)
        assert not any(room.room[name].pids() for name in HOSTS)


def check_job(room: TrainingRoom) -> None:
    (job,) = json.loads(f"[{room.head.run('holdfast ls -o jsonl').stdout}]")
    assert job["state"] == "SUCCEEDED"
    assert any(job["id"] in key for key in room.services.objects())


def alive(room: TrainingRoom) -> set[str]:
    status = json.loads(room.head.run("holdfast cluster status --json").stdout)
    return {node["name"] for node in status["nodes"] if node["alive"]}
