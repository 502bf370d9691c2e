"""Calls of the server while its connection to Ray is away or is made anew; without Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from tests.support.service.unwatched import Unwatched
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_service.cluster import connection, ray_cluster, ray_state
from holdfast_service.cluster.connection import ConnectionTimes, RayConnection
from holdfast_service.cluster.ray_cluster import RayCluster
from holdfast_service.job_model.supervisor_protocol import (
    ClusterUnavailable,
    Cursors,
    SupervisorUnavailable,
)

QUICK = ConnectionTimes(look_s=0.01, answer_s=2.0, lost_after_s=0.05, drain_s=0.5, renew_s=0.5)


class FakeRay:
    """The functions of Ray that the connection uses. `head` is None while the GCS is away."""

    def __init__(self) -> None:
        self.head: str | None = "cluster-1"
        self.own_raylet = True
        self.connected_to: list[str | None] = []
        self.hangs = threading.Event()
        """Set: `ray.init` returns."""
        self.hangs.set()

    def init(self, **_: Any) -> None:
        assert self.hangs.wait(600)
        self.connected_to.append(self.head)
        self.own_raylet = True

    def nodes(self, _timeout_s: float) -> list[ray_state.RayNode]:
        self.require_control()
        return [ray_state.RayNode("mine", "127.0.0.1", 1, self.own_raylet)]

    def require_control(self, *_: Any) -> None:
        if self.head is None or self.head != self.connected_to[-1]:
            raise ray_state.ControlServiceAway("the GCS does not answer")

    def cluster_at(self, *_: Any) -> str:
        if self.head is None:
            raise ClusterUnavailable("refused")
        return self.head


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray, "init", fake.init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "get_runtime_context", _Context)
    monkeypatch.setattr(ray_state, "nodes", fake.nodes)
    monkeypatch.setattr(ray_state, "require_control_service", fake.require_control)
    monkeypatch.setattr(ray_state, "own_cluster", lambda: ("there:1", fake.connected_to[-1]))
    monkeypatch.setattr(connection, "_cluster_at", fake.cluster_at)
    return fake


class _Context:
    def get_node_id(self) -> str:
        return "mine"


class Opened:
    def __init__(
        self,
        has_ended: Callable[[str], bool] = lambda _: False,
        times: ConnectionTimes = QUICK,
    ) -> None:
        self.renewed = 0
        self.stuck: list[str] = []
        self.connection = RayConnection(
            lambda: "there:1", "space", times, self.stuck.append, has_ended
        )
        self.connection.open(self._on_renewed)

    def _on_renewed(self) -> None:
        self.renewed += 1

    def control_works(self) -> bool:
        try:
            with self.connection.in_use(control=True):
                return True
        except ClusterUnavailable:
            return False


@pytest.fixture
def opened(fake: FakeRay) -> Iterator[Opened]:
    found = Opened()
    yield found
    found.connection.close()


def test_a_head_that_is_away_keeps_the_connection_and_calls_of_actors(
    fake: FakeRay, opened: Opened
) -> None:
    fake.head = None
    eventually(lambda: "GCS" in opened.connection.problem)
    with pytest.raises(ClusterUnavailable, match="GCS"), opened.connection.in_use(control=True):
        pass
    with opened.connection.in_use(control=False):
        pass
    fake.head = "cluster-1"
    eventually(lambda: not opened.connection.problem)
    assert fake.connected_to == ["cluster-1"] and opened.control_works()


def test_a_call_before_the_first_failed_look_learns_that_the_head_is_away(
    fake: FakeRay, opened: Opened
) -> None:
    opened.connection.close()  # no look follows
    time.sleep(0.05)
    fake.head = None
    assert not opened.control_works()


def test_a_dead_raylet_is_answered_by_a_new_connection(fake: FakeRay, opened: Opened) -> None:
    fake.own_raylet = False
    eventually(lambda: opened.renewed == 1)
    assert len(fake.connected_to) == 2
    eventually(opened.control_works)


def test_another_cluster_is_connected_to_once_it_answers(fake: FakeRay, opened: Opened) -> None:
    fake.head = None
    eventually(lambda: "GCS" in opened.connection.problem)
    fake.head = "cluster-2"
    eventually(lambda: opened.renewed == 1)
    assert fake.connected_to == ["cluster-1", "cluster-2"]


def test_the_end_of_a_cluster_is_answered_when_the_next_one_is_there(fake: FakeRay) -> None:
    opened = Opened(lambda _: True)
    fake.head = None
    eventually(lambda: "has ended; no new connection" in opened.connection.problem)
    assert fake.connected_to == ["cluster-1"], "Ray's client waits without limit for a GCS"
    fake.head = "cluster-2"
    eventually(lambda: opened.renewed == 1)
    opened.connection.close()


def test_a_client_is_not_shut_down_under_a_call(fake: FakeRay, opened: Opened) -> None:
    with opened.connection.in_use(control=False):
        fake.own_raylet = False
        eventually(lambda: bool(opened.stuck))
    assert opened.stuck == [
        "the raylet that this server was attached to has died; "
        "1 calls of the old connection do not end"
    ]
    assert len(fake.connected_to) == 1


def test_a_long_call_learns_that_it_must_end(fake: FakeRay) -> None:
    opened = Opened(times=replace(QUICK, drain_s=DEADLINE_S))
    assert not opened.connection.is_lost
    with opened.connection.in_use(control=False):
        fake.own_raylet = False
        eventually(lambda: opened.connection.is_lost)
    eventually(lambda: opened.renewed == 1)
    eventually(lambda: not opened.connection.is_lost)
    assert opened.stuck == []
    opened.connection.close()


def test_a_client_that_never_connects_ends_the_process(fake: FakeRay, opened: Opened) -> None:
    fake.hangs.clear()
    fake.own_raylet = False
    eventually(lambda: bool(opened.stuck))
    assert "did not connect anew within 0.5 s" in opened.stuck[0]
    with (
        pytest.raises(ClusterUnavailable, match=r"raylet .* has died"),
        opened.connection.in_use(control=False),
    ):
        pass
    fake.hangs.set()


def test_an_exit_of_rays_client_ends_one_call_only(opened: Opened) -> None:
    with pytest.raises(ClusterUnavailable), opened.connection.in_use(control=False):
        raise SystemExit(0)


async def test_a_wait_for_news_ends_with_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Future[bool]()

    class Method:
        def options(self, **_: Any) -> Method:
            return self

        def remote(self, *_: Any) -> Any:
            return type("Reference", (), {"future": lambda _: waiting})()

    supervisor = type("Supervisor", (), {"await_news": Method()})()
    monkeypatch.setattr(ray_cluster.RayCluster, "_supervisor", lambda *_: supervisor)
    cluster = RayCluster("", b"", Path(), can_grow=False, connection=Unwatched())
    news = asyncio.create_task(cluster.await_news("job", Cursors(), 600.0))
    await asyncio.to_thread(eventually, lambda: bool(cluster._awaited))
    await asyncio.to_thread(cluster.forget_connection)
    with pytest.raises(SupervisorUnavailable, match="anew"):
        await asyncio.wait_for(news, DEADLINE_S)
