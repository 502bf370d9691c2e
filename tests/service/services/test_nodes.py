"""Nodes in the store, on both databases: recorded, blamed, set aside, and sent to supervisors."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, replace
from typing import Any

import pytest
from sqlalchemy import text as sql
from sqlalchemy.exc import DBAPIError
from tests.support.service.databases import paced
from tests.support.service.fake_cluster import FakeCluster, FakeSupervisor, three_nodes
from tests.support.service.job_drives import (
    JOB,
    kinds,
    reconciling,
    submitted,
    until,
    until_state,
    until_waits,
)

from holdfast_service.errors import InvalidTime, NodeNotFound
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.supervisor_protocol import Capacity, EventKind, NodeCapacity, Phase
from holdfast_service.policy.quarantine import Avoided, NodeStanding, cordoned_only
from holdfast_service.reconcile.reconciler import Reconciler
from holdfast_service.services.jobs import JobService
from holdfast_service.services.nodes import NodeService
from holdfast_service.services.overview import Overview
from holdfast_service.settings import Settings
from holdfast_service.store import nodes as stored_nodes
from holdfast_service.store.engine import Store, is_refused
from holdfast_workers.protocol.findings import HealthFinding, Level

NO_STANDBY = {"resources": {"workers_per_node": 2, "standby_nodes": 0}}
Start = Callable[..., Awaitable[FakeSupervisor]]
Drive = Callable[[], AbstractAsyncContextManager[Reconciler]]
LOST = {"cause": "node_lost", "rank": 0, "ranks": [0, 1], "worker": None}


def incident(number: int, agent: str = "n0", attempt: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "incident": number,
        "cause": "node_lost",
        "attempt": attempt,
        "lost": [{**LOST, "agent": agent, "attempt": attempt}],
        "evidence": ["gone"],
        "opened_at": time.time(),
        **changes,
    }


def unfit(node_id: str) -> dict[str, Any]:
    found = HealthFinding("accelerator", "xid", Level.UNFIT, "XID 48 of GPU-1", "GPU-1", 48)
    return {"agent": "n", "node_id": node_id, "host": "127.0.0.1", "findings": [asdict(found)]}


@pytest.fixture
def service(store: Store) -> NodeService:
    return NodeService(store)


@pytest.fixture
def drive(store: Store, cluster: FakeCluster, settings: Settings) -> Drive:
    """A reconciler that runs while its context is open."""
    return lambda: reconciling(store, cluster, settings)


@pytest.fixture
def start(jobs: JobService, cluster: FakeCluster) -> Start:
    """A job whose first attempt runs: ranks 0 and 1 on node0, 2 and 3 on node1."""

    async def started(**changed: object) -> FakeSupervisor:
        supervisor = await submitted(jobs, cluster, **changed)
        supervisor.form(1)
        supervisor.enter(Phase.RUNNING)
        await until_state(jobs, supervisor.launch.job_id, State.RUNNING)
        return supervisor

    return started


async def until_seen(service: NodeService, nodes: int = 3) -> None:
    async def seen() -> bool:
        return len((await service.list()).items) == nodes

    await until(seen)


async def until_node(service: NodeService, node: str, met: Callable[..., object]) -> None:
    """Wait until the node is recorded and satisfies the condition `met`."""

    async def seen() -> bool:
        with contextlib.suppress(NodeNotFound):
            return bool(met(await service.get(node)))
        return False

    await until(seen)


async def test_standbys_and_the_clusters_head_are_not_counted_as_free_nodes(
    cluster: FakeCluster, drive: Drive, start: Start, overview: Overview, service: NodeService
) -> None:
    head = NodeCapacity("head", "127.0.0.9", cpus=0.0, gpus=0.0, head=True)
    workers = three_nodes().nodes
    cluster.nodes = Capacity((head, *workers), can_grow=False)
    async with drive():
        job = (await start()).launch.job_id
        await until_seen(service, 4)
        shown = await overview.cluster()
    assert (shown.capacity.nodes, shown.capacity.free_nodes) == (3, 0)
    roles = {node.id: (node.head, node.jobs, node.standby_of) for node in shown.nodes}
    assert roles == {
        "head": (True, (), ()),
        "node0": (False, (job,), ()),
        "node1": (False, (job,), ()),
        "node2": (False, (), (job,)),
    }


async def test_a_paused_job_has_no_node(
    jobs: JobService, drive: Drive, start: Start, service: NodeService
) -> None:
    async with drive():
        supervisor = await start()
        job = supervisor.launch.job_id
        await until_node(service, "node2", lambda view: view.standby_of == (job,))
        await jobs.pause(job)
        await until_state(jobs, job, State.PAUSED)
    nodes = (await service.list()).items
    assert len(nodes) == 3 and not any(node.jobs or node.standby_of for node in nodes)


async def test_a_paused_job_is_not_shown_on_the_nodes_that_it_has_left(
    jobs: JobService, drive: Drive, start: Start, service: NodeService
) -> None:
    async with drive():
        await until_seen(service)
        job_id = (await start()).launch.job_id
        assert (await service.get("node0")).jobs == (job_id,)
        await jobs.pause(job_id)
        await until_state(jobs, job_id, State.PAUSED)
    assert (await service.get("node0")).jobs == ()


async def test_nodes_are_recorded_by_machine_and_stay_recorded(
    service: NodeService, cluster: FakeCluster, drive: Drive
) -> None:
    two_on_one = (
        NodeCapacity("a", "10.0.0.1", 4.0, 1.0),
        NodeCapacity("b", "10.0.0.1", 2.0, 1.0, head=True),
        NodeCapacity("c", "127.0.0.1", 1.0, 0.0),
    )
    cluster.nodes = Capacity(two_on_one, can_grow=False)
    async with drive():
        await until_seen(service, 2)
        cluster.nodes = Capacity(two_on_one[2:], can_grow=False)
    first, second = (await service.list()).items
    assert (first.id, first.cpus, first.gpus, first.head) == ("10.0.0.1", 6.0, 2.0, True)
    assert (second.id, second.state, second.there) == ("c", NodeStanding.READY, True)
    assert (first.reason, first.until, first.incidents) == (None, None, ())


async def test_a_node_with_several_incidents_is_quarantined_and_every_job_is_notified(
    jobs: JobService, service: NodeService, drive: Drive, start: Start
) -> None:
    async with drive():
        await until_seen(service)
        supervisor = await start()
        for number in (1, 2, 3):
            assert (await service.get("node0")).state is NodeStanding.READY
            supervisor.emit(EventKind.INCIDENT_OPENED, **incident(number))
            supervisor.emit(EventKind.INCIDENT_CLOSED, **incident(number, closed_at=time.time()))
            await until_node(service, "node0", lambda view, n=number: len(view.incidents) == n)
        await until_node(service, "node0", lambda view: view.state is NodeStanding.QUARANTINED)
        await until(lambda: bool(supervisor.avoided and "node0" in supervisor.avoided[-1]))
        avoided = supervisor.avoided[-1]["node0"]
        assert avoided.standing is NodeStanding.QUARANTINED and "3 incidents" in avoided.reason
    node = await service.get("node0")
    assert node.quarantines == 1 and node.until is not None
    assert node.until > time.time() + 500
    assert node.jobs == (supervisor.launch.job_id,)
    events = (await jobs.history.events(supervisor.launch.job_id, 0, 200)).items
    assert [e.data["node"] for e in events if e.kind == "node.quarantined"] == ["node0"]


async def test_an_unfit_node_is_quarantined_at_once_within_the_allowed_share(
    service: NodeService, drive: Drive, start: Start
) -> None:
    async with drive():
        supervisor = await start()
        for node in ("node1", "node0"):
            supervisor.emit(EventKind.NODE_HEALTH, **unfit(node))
        for node in ("node1", "node0"):
            await until_node(service, node, lambda view: view.findings)
    first, second = await service.get("node1"), await service.get("node0")
    assert first.state is NodeStanding.QUARANTINED and first.reason == "XID 48 of GPU-1"
    assert second.state is NodeStanding.READY, "two of three nodes: hardly the nodes' fault"
    assert second.findings[0].code == 48


async def test_a_job_that_needs_a_quarantined_node_starts_and_may_use_it(
    jobs: JobService, service: NodeService, cluster: FakeCluster, drive: Drive, start: Start
) -> None:
    async with drive():
        await until_seen(service)
        supervisor = await start()
        supervisor.emit(EventKind.NODE_HEALTH, **unfit("node0"))
        supervisor.end()
        await until_state(jobs, supervisor.launch.job_id, State.SUCCEEDED)
        later, _ = await jobs.submit(JOB)  # it needs all three
        await until(lambda: later.id in cluster.supervisors)
        events = (await jobs.history.events(later.id, 0, 200)).items
    (begun,) = [event.data for event in events if event.data.get("to") == State.STARTING]
    assert begun["reason"].startswith("nodes in quarantine are used, because 3 nodes")
    assert begun["reason"].endswith("set aside: node0 (quarantined: XID 48 of GPU-1)")
    launch = cluster.supervisors[later.id].launch
    assert launch.avoid["node0"].standing is NodeStanding.QUARANTINED
    assert cordoned_only(launch.avoid) == {}


def too_small(node_id: str, there: int, agent: str = "n") -> dict[str, Any]:
    """The health of a node that allows only so many more processes and threads."""
    what = f"a limit leaves {there} processes and threads, the job needs at least 26"
    found = HealthFinding("room", "tasks", Level.UNFIT, what, needed=26, there=there)
    return {"agent": agent, "node_id": node_id, "host": "127.0.0.1", "findings": [asdict(found)]}


async def test_a_node_too_small_for_a_job_is_no_worse_for_others_and_that_job_goes_elsewhere(
    jobs: JobService, service: NodeService, cluster: FakeCluster, drive: Drive
) -> None:
    async with drive():
        await until_seen(service)
        supervisor = await submitted(jobs, cluster, **NO_STANDBY)
        job = supervisor.launch.job_id
        supervisor.emit(EventKind.NODE_HEALTH, **too_small("node1", 20))
        supervisor.end("PAUSED", "no_nodes", message="1 of 2 nodes can be used")
        await until(lambda: cluster.starts[job] == 2)
        avoided = cluster.supervisors[job].launch.avoid["node1"]
        smaller = {"resources": {"workers_per_node": 1}, "parallel": {"dp_shard": 1}}
        other, _ = await jobs.submit({**JOB, **smaller, "name": "small"})
        await until(lambda: other.id in cluster.supervisors)
    assert avoided.standing is NodeStanding.CORDONED
    assert avoided.reason.startswith("too small: a limit leaves 20 processes")
    node = await service.get("node1")
    assert node.state is NodeStanding.READY
    (finding,) = node.findings
    assert (finding.there, finding.needed) == (20, 26) and finding.at is not None
    assert cluster.supervisors[other.id].launch.avoid == {}


async def test_reports_of_other_agents_and_jobs_do_not_hide_that_a_node_is_too_small(
    jobs: JobService, service: NodeService, cluster: FakeCluster, drive: Drive
) -> None:
    healthy = {**too_small("node1", 0), "findings": []}
    small = {"resources": {"workers_per_node": 1}, "parallel": {"dp_shard": 1}}
    async with drive():
        await until_seen(service)
        supervisor = await submitted(jobs, cluster, **NO_STANDBY)
        job = supervisor.launch.job_id
        supervisor.emit(EventKind.NODE_HEALTH, **too_small("node1", 20))
        await until_node(service, "node1", lambda view: view.findings)
        other, _ = await jobs.submit({**JOB, **small, "name": "small"})
        await until(lambda: other.id in cluster.supervisors)
        neighbour = cluster.supervisors[other.id]
        for reporter in (neighbour, supervisor):
            reporter.emit(EventKind.NODE_HEALTH, **{**healthy, "agent": "m"})
            reporter.emit(
                EventKind.NODE_HEALTH, **too_small("node2", 40, agent=reporter.launch.job_id)
            )
        await until_node(service, "node2", lambda view: len(view.findings) == 2)
        assert [finding.there for finding in (await service.get("node1")).findings] == [20]
        neighbour.end()
        supervisor.end("PAUSED", "no_nodes", message="1 of 2 nodes can be used")
        await until(lambda: cluster.starts[job] == 2)
        assert list(cluster.supervisors[job].launch.avoid) == ["node1"]
        cluster.supervisors[job].emit(EventKind.NODE_HEALTH, **healthy)
        await until_node(service, "node1", lambda view: not view.findings)


async def test_a_job_is_not_shown_that_its_nodes_are_too_small_for_others(
    jobs: JobService, service: NodeService, drive: Drive, start: Start
) -> None:
    async with drive():
        first = await start(**NO_STANDBY)
        second, _ = await jobs.submit({**JOB, **NO_STANDBY, "name": "second"})
        first.emit(EventKind.NODE_HEALTH, **too_small("node0", 20))
        await until_node(service, "node0", lambda view: view.findings)
        shown = (await jobs.get(first.launch.job_id)).unwell_nodes
        assert [node.node for node in shown] == ["node0"]
        assert (await jobs.get(second.id)).unwell_nodes == ()


async def test_a_node_that_lacks_software_is_used_by_no_job_and_not_quarantined(
    jobs: JobService, service: NodeService, cluster: FakeCluster, drive: Drive
) -> None:
    lacking = HealthFinding("software", "holdfast", Level.UNFIT, "no Holdfast", lost=True)
    async with drive():
        await until_seen(service)
        supervisor = await submitted(jobs, cluster, **NO_STANDBY)
        job = supervisor.launch.job_id
        found = {**too_small("node1", 0), "findings": [asdict(lacking)]}
        supervisor.emit(EventKind.NODE_HEALTH, **found)
        supervisor.end("PAUSED", "no_nodes", message="1 of 2 nodes can be used")
        await until(lambda: cluster.starts[job] == 2)
        smaller = {"resources": {"workers_per_node": 1}, "parallel": {"dp_shard": 1}}
        other, _ = await jobs.submit({**JOB, **smaller, "name": "small"})

        async def waits() -> bool:
            waiting = (await jobs.get(other.id)).waiting
            reason = waiting.reason if waiting is not None else ""
            return reason.endswith("node1 (cannot be used: no Holdfast)")

        await until(waits)
    avoided = cluster.supervisors[job].launch.avoid["node1"]
    assert avoided.standing is NodeStanding.CORDONED
    assert (await service.get("node1")).state is NodeStanding.READY


@pytest.mark.seconds
async def test_a_job_for_which_too_few_nodes_are_large_enough_waits_with_the_figures(
    jobs: JobService, store: Store, cluster: FakeCluster, settings: Settings, service: NodeService
) -> None:
    quick = paced(settings, node_room_fresh_s=5.0)
    async with reconciling(store, cluster, quick):
        await until_seen(service)
        supervisor = await submitted(jobs, cluster)  # with its standby it needs all three
        job = supervisor.launch.job_id
        supervisor.emit(EventKind.NODE_HEALTH, **too_small("node1", 20))
        supervisor.end("PAUSED", "no_nodes", message="2 of 3 nodes can be used")
        reasons: list[str] = []

        async def waits() -> bool:
            waiting = (await jobs.get(job)).waiting
            reasons.extend([waiting.reason] if waiting is not None else [])
            return any("too small" in reason for reason in reasons)

        await until(waits)
        assert reasons[-1].endswith(
            "2 of 2 nodes have them; 1 more are set aside: node1 (too small: a limit leaves 20 "
            "processes and threads, the job needs at least 26)"
        )
        await until(lambda: cluster.starts[job] == 2)  # another look, as the node may have changed


async def test_a_node_without_resources_does_not_count_for_the_quarantine_share(
    service: NodeService, cluster: FakeCluster, drive: Drive, start: Start
) -> None:
    two = three_nodes().nodes[:2]
    head = NodeCapacity("head", "127.0.0.9", 0.0, 0.0)
    cluster.nodes = Capacity((*two, head), can_grow=False)
    async with drive():
        await until_seen(service)
        supervisor = await start(**NO_STANDBY)
        supervisor.emit(EventKind.NODE_HEALTH, **unfit("node0"))
        await until_node(service, "node0", lambda view: view.findings)
    assert (await service.get("node0")).state is NodeStanding.READY


@pytest.mark.seconds
async def test_reports_of_two_jobs_on_the_same_nodes_do_not_deadlock(
    jobs: JobService,
    cluster: FakeCluster,
    drive: Drive,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster.nodes = three_nodes(roomy=True)
    both = asyncio.Barrier(2)
    record_health = stored_nodes.record_health

    async def record_and_meet(*given: Any) -> None:
        await record_health(*given)
        with contextlib.suppress(TimeoutError, asyncio.BrokenBarrierError):
            await asyncio.wait_for(both.wait(), 0.5)  # until each has reported its first node

    monkeypatch.setattr(stored_nodes, "record_health", record_and_meet)
    async with drive():
        there = [await start(**NO_STANDBY) for _ in range(2)]
        for supervisor, names in zip(there, (("node0", "node1"), ("node1", "node0")), strict=True):
            for name in names:
                supervisor.emit(EventKind.NODE_HEALTH, **unfit(name))
            supervisor.end()
        for supervisor in there:
            await until_state(jobs, supervisor.launch.job_id, State.SUCCEEDED)
    for supervisor in there:
        assert "event.unreadable" not in await kinds(jobs, supervisor.launch.job_id)


async def test_reports_that_the_database_rejected_temporarily_are_retried(
    jobs: JobService,
    service: NodeService,
    drive: Drive,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record_health, failures = (
        stored_nodes.record_health,
        [DBAPIError("", {}, Exception("deadlock"))],
    )

    async def note(*given: Any) -> None:
        if failures:
            raise failures.pop()
        await record_health(*given)

    monkeypatch.setattr(stored_nodes, "record_health", note)
    async with drive():
        supervisor = await start()
        supervisor.emit(EventKind.NODE_HEALTH, **unfit("node0"))
        supervisor.end()
        await until_state(jobs, supervisor.launch.job_id, State.SUCCEEDED)
    assert "event.unreadable" not in await kinds(jobs, supervisor.launch.job_id)
    assert (await service.get("node0")).findings


async def test_permanent_and_temporary_database_errors_are_distinguished(store: Store) -> None:
    if not store.postgres:
        return  # SQLite accepts any value
    statements = {
        "SELECT CAST(:x AS integer)": True,  # with a number too large for the driver
        "SELECT CAST('x' || pg_backend_pid() AS integer)": True,
        "SELECT * FROM nowhere": False,
    }
    for statement, refused in statements.items():
        with pytest.raises(DBAPIError) as caught:
            async with store.read() as session:
                await session.execute(sql(statement), {"x": 2**62} if ":x" in statement else {})
        assert is_refused(caught.value) is refused, statement


async def test_an_incident_reported_repeatedly_counts_once_and_for_its_first_node(
    jobs: JobService, service: NodeService, drive: Drive, start: Start
) -> None:
    async with drive():
        supervisor = await start()
        supervisor.emit(EventKind.INCIDENT_OPENED, **incident(1))
        supervisor.form(2)
        supervisor.emit(EventKind.INCIDENT_UPDATED, **incident(1, next_attempt=2))
        supervisor.emit(EventKind.INCIDENT_CLOSED, **incident(1, closed_at=time.time()))

        async def closed_now() -> bool:
            incidents = (await jobs.history.incidents(supervisor.launch.job_id)).items
            return bool(incidents and incidents[0].closed_at)

        await until(closed_now)
    assert len((await service.get("node0")).incidents) == 1
    assert (await service.get("node1")).incidents == ()


async def test_a_cordon_is_sent_at_once_if_this_process_drives_the_job(
    store: Store, cluster: FakeCluster, settings: Settings, start: Start
) -> None:
    """It waits neither for the next read of the nodes nor for the next poll."""
    cluster.tells = True
    seldom = paced(settings, node_look_s=3600.0, reconcile_interval_s=300.0)
    async with reconciling(store, cluster, seldom) as reconciler:
        service = NodeService(store, reconciler.wake_for_nodes)
        await until_seen(service)
        supervisor = await start()
        await service.cordon("node0", "repair", None)
        sent = supervisor.avoided
        await until(lambda: bool(sent) and set(sent[-1]) == {"node0"})
        await service.uncordon("node0")
        await until(lambda: sent[-1] == {})


@pytest.mark.seconds
async def test_a_supervisor_that_took_a_late_order_is_told_the_newest_again(
    service: NodeService, cluster: FakeCluster, drive: Drive, start: Start
) -> None:
    async with drive():
        await until_seen(service)
        supervisor = await start()
        sent = supervisor.avoided
        supervisor.avoids = {"node0": Avoided(NodeStanding.CORDONED, "of long ago")}
        await until(lambda: bool(sent))
        await asyncio.sleep(0.3)
        assert sent == [{}]


async def test_a_job_waits_for_cordoned_nodes_and_starts_without_them(
    jobs: JobService, service: NodeService, cluster: FakeCluster, drive: Drive
) -> None:
    async with drive():
        await until_seen(service)
        await service.cordon("node1", "new cables", None)
        job, _ = await jobs.submit(JOB)
        await until_waits(jobs, job.id, "nodes")
        waiting = (await jobs.get(job.id)).waiting
        assert waiting is not None
        assert waiting.reason.endswith(
            "2 of 2 nodes have them; 1 more are set aside: node1 (cordoned: new cables)"
        )
        one_more = NodeCapacity("node3", "127.0.0.9", 1.0, 0.0)
        cluster.nodes = replace(three_nodes(), nodes=(*three_nodes().nodes, one_more))
        await until(lambda: job.id in cluster.supervisors)
    launch = cluster.supervisors[job.id].launch
    assert set(launch.avoid) == {"node1"}
    assert launch.avoid["node1"].reason == "cordoned: new cables"
    assert set(cordoned_only(launch.avoid)) == {"node1"}


async def test_a_repeated_incident_report_does_not_quarantine_again(
    service: NodeService, drive: Drive, start: Start
) -> None:
    async with drive():
        await until_seen(service)
        supervisor = await start()
        for number in (1, 2, 3):
            supervisor.emit(EventKind.INCIDENT_OPENED, **incident(number))
        await until_node(service, "node0", lambda view: view.state is NodeStanding.QUARANTINED)
        await service.uncordon("node0")
        supervisor.emit(EventKind.INCIDENT_CLOSED, **incident(3, closed_at=time.time()))
        supervisor.emit(EventKind.INCIDENT_OPENED, **incident(4, agent="n1"))
        await until_node(service, "node1", lambda view: view.incidents)
        assert (await service.get("node0")).state is NodeStanding.READY


@pytest.mark.seconds
async def test_cordons_end_by_command_and_by_time(
    service: NodeService, drive: Drive, start: Start
) -> None:
    async with drive():
        await until_seen(service)
        supervisor = await start()
        await service.cordon("node2", "a look", None)
        await service.cordon("node1", "repair", None)
        await until(lambda: len(supervisor.avoided[-1:] and supervisor.avoided[-1]) == 2)
        await service.cordon("node2", "a look", time.time() + 2.0)
        await until(lambda: set(supervisor.avoided[-1]) == {"node1"})  # its time is over
        assert (await service.get("node2")).state is NodeStanding.READY
        supervisor.avoids = {}  # of a restarted one
        count = len(supervisor.avoided)
        await until(lambda: len(supervisor.avoided) > count)
        assert set(supervisor.avoided[-1]) == {"node1"}
        assert (await service.uncordon("node1")).state is NodeStanding.READY
        await until(lambda: supervisor.avoided[-1] == {})


async def test_a_starting_server_sends_no_empty_set_of_nodes_to_supervisors(
    jobs: JobService,
    service: NodeService,
    cluster: FakeCluster,
    drive: Drive,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with drive():
        await until_seen(service)
        supervisor = await start()
        await service.cordon("node2", "repair", None)
        await until(lambda: bool(supervisor.avoided and "node2" in supervisor.avoided[-1]))
    supervisor.avoided.clear()
    supervisor.avoids = {"node0": Avoided(NodeStanding.CORDONED, "of long ago")}
    looked = asyncio.Event()

    async def capacity_late() -> Capacity:
        await looked.wait()
        return three_nodes()

    monkeypatch.setattr(cluster, "capacity", capacity_late)
    async with drive():
        supervisor.run(1, 1, 3)

        async def at_step_3() -> bool:
            return (await jobs.get(supervisor.launch.job_id)).progress.step == 3

        await until(at_step_3)
        looked.set()
        await until(lambda: bool(supervisor.avoided))
    assert set(supervisor.avoided[0]) == {"node2"}


async def test_a_node_is_found_by_a_prefix_of_its_name(
    service: NodeService, cluster: FakeCluster, drive: Drive
) -> None:
    nodes = tuple(NodeCapacity(f"abcdef{n}", "127.0.0.1", 1.0, 0.0) for n in range(2))
    cluster.nodes = Capacity(nodes, can_grow=False)
    async with drive():
        await until_seen(service, 2)
    assert (await service.get("abcdef1")).id == "abcdef1"
    for wrong in ("abcdef", "abc", "unknown", "abcdef%"):
        with pytest.raises(NodeNotFound):
            await service.get(wrong)
    with pytest.raises(InvalidTime):
        await service.cordon("abcdef1", "too late", time.time() - 1)
