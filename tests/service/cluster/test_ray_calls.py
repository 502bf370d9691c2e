"""Calls of Ray have threads of their own."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import ray

from holdfast_service.cluster import ray_cluster
from holdfast_service.cluster.ray_cluster import RayCluster
from holdfast_service.job_model.supervisor_protocol import ClusterUnavailable


async def test_blocked_threads_of_the_server_delay_no_call_of_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray_cluster, "draining_nodes", set)
    over = threading.Event()
    loop = asyncio.get_running_loop()
    blocked = [loop.run_in_executor(None, over.wait, 60) for _ in range(64)]
    try:
        cluster = RayCluster("", b"", Path(), can_grow=False)
        assert (await cluster.capacity()).nodes == ()
    finally:
        over.set()
        await asyncio.gather(*blocked)


async def test_calls_of_ray_that_hang_delay_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(ray, "nodes", lambda: over.wait(60))
    monkeypatch.setattr(ray_cluster, "draining_nodes", set)
    monkeypatch.setattr(ray_cluster, "CALL_S", 0.1)
    monkeypatch.setattr(ray_cluster, "RELEASE_S", 0.1)
    cluster = RayCluster("", b"", Path(), can_grow=False)
    try:
        answers = await asyncio.gather(
            *[cluster.capacity() for _ in range(64)], return_exceptions=True
        )
        assert {type(answer) for answer in answers} == {ClusterUnavailable}
        assert await asyncio.get_running_loop().run_in_executor(None, lambda: 7) == 7
    finally:
        over.set()
