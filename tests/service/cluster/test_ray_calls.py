"""Calls of Ray have threads of their own."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import ray
from tests.support.service.unwatched import Unwatched
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_service.cluster import agents, ray_cluster
from holdfast_service.cluster.agents import RayAgents
from holdfast_service.cluster.ray_cluster import RayCluster
from holdfast_service.cluster.ray_state import ControlServiceAway
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.supervisor_protocol import ClusterUnavailable, JobPlan
from holdfast_workers.protocol.answers import Done
from holdfast_workers.protocol.commands import Request, WarmUp
from holdfast_workers.protocol.process_identity import ProcessIdentity
from holdfast_workers.protocol.processes import StorageOptions


async def test_blocked_threads_of_the_server_delay_no_call_of_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray_cluster, "draining_nodes", set)
    # Ray would start a cluster for these.
    monkeypatch.setattr(ray_cluster, "available_resources_per_node", dict)
    monkeypatch.setattr(ray_cluster, "_placed_bundles", lambda _: [])
    over = threading.Event()
    loop = asyncio.get_running_loop()
    blocked = [loop.run_in_executor(None, over.wait, 600) for _ in range(64)]
    try:
        cluster = RayCluster("", b"", Path(), can_grow=False, connection=Unwatched())
        assert (await cluster.capacity()).nodes == ()
    finally:
        over.set()
        await asyncio.gather(*blocked)


@pytest.mark.slow
async def test_calls_of_ray_that_hang_delay_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(ray, "nodes", lambda: over.wait(600))
    monkeypatch.setattr(ray_cluster, "draining_nodes", set)
    monkeypatch.setattr(ray_cluster, "CALL_S", 0.1)
    monkeypatch.setattr(ray_cluster, "RELEASE_S", 0.1)
    cluster = RayCluster("", b"", Path(), can_grow=False, connection=Unwatched())
    try:
        answers = await asyncio.gather(
            *[cluster.capacity() for _ in range(64)], return_exceptions=True
        )
        assert {type(answer) for answer in answers} == {ClusterUnavailable}
        assert await asyncio.get_running_loop().run_in_executor(None, lambda: 7) == 7
    finally:
        over.set()


def test_restarts_that_wait_for_the_control_service_delay_no_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()
    monkeypatch.setattr(agents, "runs", lambda *_: not over.wait(600))
    monkeypatch.setattr(RayAgents, "_call", lambda *_: Done())
    job = RayAgents(JobPlan("job", JobSpec(name="x")), b"", StorageOptions())
    job._handles["n0"] = None
    try:
        for pid in range(200):  # more than any pool has threads
            job.restart("n0", ProcessIdentity("", pid, 0))
        answer = job.call("n0", Request(WarmUp("n0", 1)), Done, timeout_s=DEADLINE_S)
        assert answer.result(DEADLINE_S) == Done()
    finally:
        over.set()
        job.close()


def test_what_ray_must_do_is_done_once_its_head_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    away, asked = [True], [0]
    done: list[object] = []

    def require() -> None:
        asked[0] += 1
        if away[0]:
            raise ControlServiceAway

    def runs(*_: object) -> bool:
        require()
        return True

    monkeypatch.setattr(agents, "HEAD_PAUSE_S", 0.01)
    monkeypatch.setattr(agents, "require_control_service", require)
    monkeypatch.setattr(agents, "runs", runs)
    monkeypatch.setattr(ray, "kill", lambda actor, **_: done.append(actor))
    monkeypatch.setattr(RayAgents, "_placement_group", lambda _: "the group")
    monkeypatch.setattr(RayAgents, "_create", lambda *call: f"agent {call[2]}")
    job = RayAgents(JobPlan("job", JobSpec(name="x")), b"", StorageOptions())
    job._handles["n0"] = "the agent"
    try:
        job.restart("n0", ProcessIdentity("", 1, 0))
        eventually(lambda: asked[0] > 5)
        assert done == []
        away[0] = False
        eventually(lambda: done == ["the agent"])
        away[0] = True
        ensuring = threading.Thread(target=job.ensure)
        ensuring.start()
        eventually(lambda: asked[0] > 20)
        assert ensuring.is_alive()
        away[0] = False
        ensuring.join(DEADLINE_S)
        assert job._handles["n0"] == "agent 0"
    finally:
        away[0] = False
        job.close()
