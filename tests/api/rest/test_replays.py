"""`POST /jobs/{id}/replay` and `GET /jobs/{id}/comparison`."""

from __future__ import annotations

import httpx
import pytest
from tests.support.service.live_server import SPEC, LiveServer
from tests.support.service.replayed import change_digest, end_of, play

from holdfast import AsyncClient, Client


@pytest.mark.seconds
def test_a_replay_is_submitted_like_a_job_and_compared(
    http: httpx.Client, client: Client, server: LiveServer
) -> None:
    job_id = client.submit(SPEC).id
    path = f"/api/v1/jobs/{job_id}"
    refused = http.post(f"{path}/replay")
    assert (refused.status_code, refused.json()["code"]) == (409, "nothing_to_replay")
    play(server, client, job_id, 5)
    end_of(server, client, job_id)
    key = {"Idempotency-Key": "once"}
    first = http.post(f"{path}/replay", headers=key)
    again = http.post(f"{path}/replay", headers=key)
    assert (first.status_code, again.status_code) == (201, 200)
    assert (
        again.headers["location"]
        == first.headers["location"]
        == again.request.url.path.replace(f"{job_id}/replay", first.json()["id"])
    )
    replay = first.json()
    assert (replay["name"], replay["spec"]["labels"]["replay-of"]) == ("tiny-replay", job_id)
    play(server, client, replay["id"], 4)
    found = http.get(f"{first.headers['location']}/comparison").json()
    assert (found["result"], found["equal"], found["to_come"]) == ("running", 4, 1)
    server.supervisor(replay["id"]).run(1, 5, 5)
    end_of(server, client, replay["id"])
    found = http.get(f"{first.headers['location']}/comparison").json()
    assert (found["result"], found["equal"], found["compared"]) == ("equal", 5, 5)
    assert found["meshes"] == [{"after_step": 0, "mesh": {"dp_shard": 2, "tp": 2}, "ranks": 4}]
    change_digest(server, job_id, 3)
    found = http.get(f"{first.headers['location']}/comparison").json()
    assert found["result"] == "different"
    assert found["first_difference"] == {"step": 3, "original": "changed", "replay": "d3"}
    refused = http.get(f"{path}/comparison")
    assert (refused.status_code, refused.json()["code"]) == (409, "not_a_replay")


@pytest.mark.seconds
async def test_the_clients_add_the_pages_of_a_comparison(server: LiveServer) -> None:
    with Client(server.address) as client:
        spec = {**SPEC, "train": {**SPEC["train"], "steps": 20_020}}
        job_id = client.submit(spec).id
        server.supervisor(job_id).rows_per_poll = 20_000
        play(server, client, job_id, 10_010)
        end_of(server, client, job_id)
        replay_id = client.replay(job_id).id
        server.supervisor(replay_id).rows_per_poll = 20_000
        play(server, client, replay_id, 10_012)
        found = client.comparison(replay_id)
    assert (found.result, found.equal, found.compared) == ("equal", 10_010, 10_010)
    async with AsyncClient(server.address) as remote:
        assert await remote.comparison(replay_id) == found
        replay = await (await remote.jobs.get(job_id)).replay()
        assert (await replay.comparison()).to_come == 10_010
