"""Successful requests to the resources of jobs."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import yaml
from tests.support.service.fake_cluster import row
from tests.support.service.live_server import SPEC, LiveServer, live_server
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_service.job_model.supervisor_protocol import EventKind


def submitted(http: httpx.Client, **changes: object) -> str:
    response = http.post("/api/v1/jobs", json={**SPEC, **changes})
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


def test_json_and_yaml_give_the_same_spec(http: httpx.Client) -> None:
    from_json = http.post("/api/v1/jobs", json=SPEC)
    from_yaml = http.post(
        "/api/v1/jobs", content=yaml.safe_dump(SPEC), headers={"Content-Type": "application/yaml"}
    )
    assert from_json.status_code == from_yaml.status_code == 201
    assert from_json.json()["spec"] == from_yaml.json()["spec"]
    again = http.post("/api/v1/jobs", json=from_json.json()["spec"])
    assert again.json()["spec"] == from_json.json()["spec"]
    assert http.get(from_json.headers["location"]).json()["id"] == from_json.json()["id"]


@pytest.mark.seconds
def test_the_history_of_a_job_is_complete(http: httpx.Client, server: LiveServer) -> None:
    job_id = submitted(http)
    server.run_job(job_id)
    path = f"/api/v1/jobs/{job_id}"
    eventually(lambda: http.get(path).json()["state"] == "SUCCEEDED")
    assert http.get(path).json()["progress"]["step"] == 5
    members = http.get(f"{path}/attempts").json()["items"][0]["members"]
    assert [member["pid"] for member in members] == [100, 101, 102, 103]
    digests = http.get(f"{path}/digests").json()["items"]
    assert digests == [{"step": step, "digest": f"d{step}"} for step in range(1, 6)]
    points = http.get(f"{path}/metrics", params={"name": ["loss", "samples"]}).json()["items"]
    assert [point["step"] for point in points] == [1, 2, 3, 4, 5]
    assert points[0]["values"] == {"loss": 1.5, "samples": "s1"}
    assert http.get(f"{path}/incidents").json() == {"items": [], "next_cursor": None}
    goodput = http.get(f"{path}/goodput").json()
    assert (goodput["steps"], goodput["devices"], goodput["final"]) == (5, 4, True)
    assert sum(goodput["by_kind_s"].values()) == pytest.approx(goodput["held_s"], abs=1e-6)
    checkpoints = http.get(f"{path}/checkpoints").json()
    assert checkpoints == {
        "memory": {"protected_step": None, "where": "none: they end with the job"},
        "items": [],
        "next_cursor": None,
        "storage_problem": None,
    }
    assert http.post(f"{path}/cancel").json()["code"] == "job_ended"
    in_state = http.get("/api/v1/jobs", params={"state": "SUCCEEDED"}).json()["items"]
    assert [job["id"] for job in in_state] == [job_id]


def test_prometheus_shows_totals_and_routes_without_ids(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = submitted(http)
    server.run_job(job_id, steps=3)
    succeeded = 'holdfast_jobs{state="SUCCEEDED"} 1.0'
    eventually(lambda: succeeded in http.get("/metrics").text)
    http.get(f"/api/v1/jobs/{job_id}")
    http.get("/wp-login.php")
    lines = http.get("/metrics").text.splitlines()
    requests = [line for line in lines if line.startswith("holdfast_http_requests_total")]
    assert any(
        'route="/api/v1/jobs/{job_id}"' in line and 'status="200"' in line for line in requests
    )
    assert not any(job_id in line or "wp-login" in line for line in lines)
    moves = [line for line in lines if line.startswith("holdfast_job_transitions_total{")]
    assert any('from="QUEUED"' in line and 'to="STARTING"' in line for line in moves)
    lag = next(line for line in lines if line.startswith("holdfast_reconcile_lag_seconds_count"))
    assert float(lag.split()[-1]) > 0


def test_prometheus_shows_the_durations_of_checkpoints(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = submitted(http)
    supervisor = server.supervisor(job_id)
    supervisor.form(1)
    supervisor.rows += [replace(row(1, step), checkpoint_wait_s=0.25) for step in (1, 2, 3)]

    def exported(part: str, tier: str, op: str) -> float:
        name = f"holdfast_checkpoint_seconds_{part}{{"
        labels = (f'op="{op}"', f'tier="{tier}"')
        found = [
            line.split()[-1]
            for line in http.get("/metrics").text.splitlines()
            if line.startswith(name) and all(label in line for label in labels)
        ]
        return float(found[0]) if found else 0.0

    eventually(lambda: exported("count", "memory", "wait") == 3)
    assert exported("sum", "memory", "wait") == pytest.approx(0.75)
    supervisor.emit(EventKind.CHECKPOINT_SAVED, step=2, attempt=1, tier="remote", uri="/x")
    eventually(lambda: exported("count", "remote", "save") == 1)
    assert exported("sum", "remote", "save") == supervisor.events[-1].at - 1002.0


def test_a_spec_of_another_version_is_reported(http: httpx.Client, server: LiveServer) -> None:
    job_id = submitted(http)
    server.run_job(job_id, steps=3, end=False)
    path = f"/api/v1/jobs/{job_id}"
    eventually(lambda: http.get(path).json()["state"] == "RUNNING")
    with sqlite3.connect(server.settings.data_dir / "holdfast.db", timeout=DEADLINE_S) as database:
        database.execute('UPDATE jobs SET spec = \'{"of": "2031"}\' WHERE id = ?', (job_id,))
    refused = http.get(f"{path}/goodput")
    assert (refused.status_code, refused.json()["code"]) == (409, "spec_unreadable")
    assert "another version" in refused.json()["detail"]
    for part in ("/incidents", "/checkpoints", "/verdict", "/timeline"):
        assert http.get(path + part).status_code == 200, part


def test_prometheus_shows_each_live_job_if_enabled(tmp_path: Path) -> None:
    with (
        live_server(tmp_path, metrics_of_jobs=True) as server,
        httpx.Client(base_url=server.address, timeout=DEADLINE_S, trust_env=False) as http,
    ):
        job_id = submitted(http)
        server.run_job(job_id, steps=3, end=False)
        step = f'holdfast_job_step{{job_id="{job_id}",name="tiny"}} 3.0'
        eventually(lambda: step in http.get("/metrics").text)
        assert (
            f'holdfast_job_goodput{{job_id="{job_id}",name="tiny"}} ' in http.get("/metrics").text
        )
