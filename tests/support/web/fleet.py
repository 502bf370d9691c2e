"""The nodes of a busy cluster: in use, unhealthy, cordoned, quarantined or gone."""

from __future__ import annotations

import random
import time
from dataclasses import asdict
from typing import Any

from sqlalchemy import select
from tests.support.service.live_server import SPEC, LiveServer
from tests.support.web.crowd import add_crowd

from holdfast_service.job_model.supervisor_protocol import Capacity, NodeCapacity
from holdfast_service.store.engine import Store
from holdfast_service.store.models import AttemptMember, AttemptRow, JobRecord, NodeRow, NodeTrouble
from holdfast_workers.protocol.findings import HealthFinding, Level

ON_GPUS: dict[str, Any] = {
    **SPEC,
    "train": {**SPEC["train"], "global_batch": 32},
    "parallel": {"dp_shard": 8, "tp": 2},
    "resources": {"workers_per_node": 8, "gpus_per_worker": 1, "cpus_per_worker": 8},
}
"""Sixteen ranks on two nodes."""

MACHINES = 21
HEAD = "3f2a9c41" + "a" * 48
"""Ray's id of the head, which shares its address with another raylet, like in a demo."""
GPUS = 8
XID = HealthFinding(
    "accelerator", "xid", Level.SUSPECT, "XID 63: a row of memory is to be remapped", "gpu3", 63
)
HOT = HealthFinding(
    "accelerator", "throttling", Level.NOTE, "gpu5 runs at 81% of its clock: hot", "gpu5"
)
FULL = HealthFinding("host", "disk", Level.SUSPECT, "/var/lib has 2.1 GB left", "/var/lib")


def host(number: int) -> str:
    return f"10.4.{1 + number // 8}.{10 + number % 8}"


async def add_fleet(server: LiveServer) -> None:
    """Call before the server starts."""
    machines = [
        NodeCapacity(f"ray{number}", host(number), cpus=96.0, gpus=float(GPUS))
        for number in range(MACHINES - 1)  # the last one is gone
    ]
    head = NodeCapacity(HEAD, "127.0.0.1", cpus=0.0, gpus=0.0, head=True)
    raylet = NodeCapacity("3f2a9c41" + "b" * 48, "127.0.0.1", cpus=1.0, gpus=0.0)
    seen = (*server.cluster.nodes.nodes, head, raylet, *machines)
    server.cluster.nodes = Capacity(seen, can_grow=False)
    await add_crowd(server.settings, 18, seed=8, spec=ON_GPUS)
    store = await Store.open(server.settings)
    rng = random.Random(3)
    try:
        async with store.write() as session:
            session.add_all(_node(number) for number in range(MACHINES))
            held = JobRecord.state.in_(("RUNNING", "RECOVERING", "STARTING"))
            jobs = list(await session.scalars(select(JobRecord).where(held)))
            free = [number for number in range(MACHINES - 1) if number not in (4, 9, 16)]
            rng.shuffle(free)
            for job in jobs:
                session.add_all(_members(job, [free.pop(), free.pop()]))
            session.add(_attempt(jobs[0], standby=free.pop()))
            session.add_all(_troubles(jobs, rng))
    finally:
        await store.close()


def _node(number: int) -> NodeRow:
    now = time.time()
    row: dict[str, Any] = {
        "state": "ready",
        "reason": "",
        "since": 0.0,
        "until": None,
        "strikes": 0,
    }
    if number == 4:
        row |= {
            "state": "cordoned",
            "reason": "replacement of its power supply",
            "since": now - 5400,
        }
    if number in (9, 16):
        reason = "3 incidents within an hour: node_lost, node_lost, xid"
        row |= {"state": "quarantined", "reason": reason, "since": now - 900, "strikes": 1}
        row["until"] = now + 2700
    findings = {2: [XID], 7: [HOT], 11: [FULL, HOT]}.get(number, [])
    return NodeRow(
        id=host(number),
        host=host(number),
        cpus=96.0,
        gpus=float(GPUS),
        first_seen=now - 86400 * 12,
        last_seen=now - (7200 if number == MACHINES - 1 else 0),
        findings=[asdict(finding) for finding in findings],
        measured={f"gpu{device}": 2890.0 + device for device in range(2)},
        **row,
    )


def _members(job: JobRecord, machines: list[int]) -> list[AttemptMember]:
    return [
        AttemptMember(
            job_id=job.id,
            attempt=job.attempt,
            rank=rank,
            worker=f"n{rank // GPUS}.a.{rank}",
            agent=f"n{rank // GPUS}",
            node_id=f"ray{machines[rank // GPUS]}",
            host=host(machines[rank // GPUS]),
            pid=None,
            role="worker",
        )
        for rank in range(GPUS * len(machines))
    ]


def _attempt(job: JobRecord, standby: int) -> AttemptRow:
    return AttemptRow(
        job_id=job.id,
        number=job.attempt,
        state="running",
        mesh={"dp_shard": 8, "tp": 2},
        world_size=16,
        standbys=[
            {"agent": "n2", "node_id": f"ray{standby}", "host": host(standby), "workers": []}
        ],
        restore={},
        joined={},
        forming_at=time.time(),
    )


def _troubles(jobs: list[JobRecord], rng: random.Random) -> list[NodeTrouble]:
    now = time.time()
    return [
        NodeTrouble(
            node_id=host(number),
            job_id=job.id,
            incident=1 + place,
            cause=cause,
            at=now - 1000 * place,
        )
        for number in (2, 9, 16)
        for place, (job, cause) in enumerate(
            zip(rng.sample(jobs, 3), ("node_lost", "node_unwell", "node_lost"), strict=True), 1
        )
    ]
