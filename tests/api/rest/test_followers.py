"""Followers of events and logs: they share reads of the store and do not disturb each other."""

from __future__ import annotations

import asyncio
import re
import socket
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event
from tests.support.service.fake_cluster import FakeCluster, line
from tests.support.service.job_drives import until
from tests.support.waiting import DEADLINE_S

from holdfast.rest.http import streams
from holdfast.rest.serve import _http, bound
from holdfast.rest.services import Services, services_over
from holdfast_service.job_model.events.codec import UnknownEvent
from holdfast_service.job_model.lifecycle import State
from holdfast_service.live import followers as live_followers
from holdfast_service.live import hub as live_hub
from holdfast_service.live.followers import JobFeed
from holdfast_service.readers import logs
from holdfast_service.settings import Settings
from holdfast_service.store import series
from holdfast_service.store.engine import Store
from holdfast_service.store.models import JobRecord
from holdfast_service.store.transaction import job_transaction

COMPLETE = "\n0\r\n\r\n"
"""The end of a chunked body."""

on_sqlite = pytest.mark.parametrize("settings", ["sqlite"], indirect=True)


class Server:
    """The HTTP server on a real port, without a reconciler."""

    def __init__(self, services: Services, port: int) -> None:
        self.services = services
        self.port = port

    async def new_job(self) -> str:
        return (await self.services.jobs.submit({"name": "x"}))[0].id

    async def open(
        self, job_id: str, feed: str, query: str = "", after: int = 0, buffer: int = 0
    ) -> asyncio.StreamReader:
        """A connection that has sent its request. `buffer`: size of the socket's buffer."""
        connection = socket.socket()
        if buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        limit = buffer or 2**16
        reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
        resumed = f"Last-Event-ID: {after}\r\n" if after else ""
        writer.write(
            f"GET /api/v1/jobs/{job_id}/{feed}?{query} HTTP/1.1\r\nHost: localhost\r\n"
            f"Accept: text/event-stream\r\n{resumed}\r\n".encode()
        )
        reader.writer = writer  # type: ignore[attr-defined]  # lives as long as the reader
        return reader


class Follower:
    """Reads a stream. `numbers`: of the messages so far; `over`: the server has closed it."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.text = ""
        self.numbers: list[int] = []
        self.over = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        rest = ""
        while data := await reader.read(2**16):
            *complete, rest = (rest + data.decode()).split("\n")
            for found in complete:
                self.numbers += [int(number) for number in re.findall(r"^id: (\d+)", found)]
            self.text = (self.text + data.decode())[-2000:]
            if self.text.endswith(COMPLETE):
                return

    async def has(self, number: int) -> None:
        await until(lambda: self.numbers[-1:] == [number])


@asynccontextmanager
async def serving(store: Store, settings: Settings, **changed: Any) -> AsyncIterator[Server]:
    services = replace(services_over(store, FakeCluster(), settings), **changed)
    listener = bound(settings.model_copy(update={"port": 0}))
    # The kernel would keep megabytes for a client that does not read.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    task = asyncio.create_task(_http(services, settings, listener, None))
    try:
        yield Server(services, listener.getsockname()[1])
    finally:
        services.stopping.set()
        await task


@pytest.fixture
async def server(store: Store, settings: Settings) -> AsyncIterator[Server]:
    async with serving(store, settings) as started:
        yield started


async def write(store: Store, job_id: str, *, size: int = 1) -> int:
    """Store an event and a log line; returns the number of the event, the line's plus one."""
    async with job_transaction(store, job_id) as tx:
        number = tx.emit(UnknownEvent("written", {"text": "x" * size}))
        await series.store_logs(tx.session, tx.job, [line(number, f"of {number}")])
    return number


@contextmanager
def counted_reads(store: Store) -> Iterator[list[str]]:
    reads: list[str] = []

    def executed(_connection: Any, _cursor: Any, text: str, *_rest: Any) -> None:
        reads.extend([text] if text.startswith("SELECT") else [])

    engine = store._engine.sync_engine
    event.listen(engine, "before_cursor_execute", executed)
    yield reads
    event.remove(engine, "before_cursor_execute", executed)


@pytest.mark.slow
async def test_idle_followers_cost_one_poll_and_share_each_read(
    server: Server, store: Store, settings: Settings
) -> None:
    jobs = [await server.new_job() for _ in range(5)]
    followers = [
        (Follower(await server.open(job, feed)), feed)
        for job in jobs
        for feed in ("events", "logs")
        for _ in range(5)
    ]
    for job in jobs:
        await write(store, job)
    for follower, feed in followers:
        await follower.has(2 if feed == "events" else 1)
    counts: list[tuple[int, float]] = []
    while not counts or counts[-1][0] > counts[-1][1]:  # reads of the start may still follow
        assert len(counts) < 30, counts
        with counted_reads(store) as reads:
            began = time.monotonic()
            await asyncio.sleep(2)
            await until(lambda: bool(reads))
            polls = (time.monotonic() - began) / live_hub.POLL_S + 1
            counts.append((len(reads), 2 * polls))
    with counted_reads(store) as reads:
        began = time.monotonic()
        await write(store, jobs[0])
        for follower, feed in followers[:10]:
            await follower.has(3 if feed == "events" else 2)
        polls = (time.monotonic() - began) / live_hub.POLL_S + 1
    writing, events, logs = 3, 2, 4
    assert len(reads) <= writing + events + logs + 2 * polls, reads


async def test_followers_get_what_their_server_stores_without_waiting_for_a_poll(
    store: Store, settings: Settings
) -> None:
    async with serving(store, settings) as server:
        hub = server.services.live
        hub._poll_s = 3600
        job = await server.new_job()
        events = Follower(await server.open(job, "events"))
        logs = Follower(await server.open(job, "logs"))
        await until(lambda: hub._followed.keys() >= {(job, feed) for feed in JobFeed})
        for number in range(2, 6):
            await write(store, job)
            await events.has(number)
            await logs.has(number - 1)


async def test_a_round_ends_with_what_is_new_and_for_safety(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = services_over(store, FakeCluster(), settings)
    hub = services.live
    hub._poll_s = 3600
    job = (await services.jobs.submit({"name": "x"}))[0].id
    async with hub.following(job, JobFeed.EVENTS) as followed:
        read, rounds = store.read, [followed.round]

        @asynccontextmanager
        async def slow_read() -> AsyncIterator[Any]:
            async with read() as session:
                yield session
            await write(store, job)  # after the poll has read, before it is evaluated
            rounds.append(followed.round)

        await write(store, job)
        rounds.append(followed.round)
        monkeypatch.setattr(store, "read", slow_read)
        await hub._poll_once()
        monkeypatch.undo()
        await hub._poll_once()
        assert len(set(rounds)) == 3
        assert followed.round is rounds[-1], "of a poll older than a stored change, or of the same"
        followed.round.began -= live_followers.SAFETY_READ_S
        await hub._poll_once()
        assert rounds[-1].ended.done()


async def test_a_change_during_a_read_is_not_missed(store: Store, settings: Settings) -> None:
    services = services_over(store, FakeCluster(), settings)
    services.live._poll_s = 3600
    job = (await services.jobs.submit({"name": "x"}))[0].id
    reads = 0

    async def read(last: int) -> streams.StreamPart:
        nonlocal reads
        page = await services.jobs.history.events(job, last, 100)
        reads += 1
        if reads < 5:
            await write(store, job)
        return streams.event_part(page)

    received = b""
    async with (
        asyncio.timeout(DEADLINE_S),
        aclosing(streams.follow(services, job, JobFeed.EVENTS, await read(0), read)) as pieces,
    ):
        while b"id: 5\n" not in received:
            received += await anext(pieces)


@pytest.mark.seconds
async def test_followers_get_what_another_server_stores(
    settings: Settings, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the poll: the read that is done for safety is not done within the time of a test."""
    monkeypatch.setattr(live_hub, "SAFETY_READ_S", 3600.0)
    other = await Store.open(settings)
    job = await server.new_job()
    events = Follower(await server.open(job, "events"))
    logs = Follower(await server.open(job, "logs"))
    await events.has(1)
    for number in range(2, 6):
        await write(other, job)
        await events.has(number)
        await logs.has(number - 1)
    async with job_transaction(other, job) as tx:
        tx.end(State.FAILED, "code", "message")
    for follower in (events, logs):
        await asyncio.wait_for(follower.over, DEADLINE_S)
        assert "event: end" in follower.text
    await other.close()


@pytest.mark.slow
@on_sqlite
async def test_a_client_that_does_not_read_delays_nobody_and_takes_no_memory(
    server: Server, store: Store
) -> None:
    job = await server.new_job()
    stalled, gone = [await server.open(job, "events", buffer=4096) for _ in range(2)]
    reading = Follower(await server.open(job, "events"))
    await reading.has(1)
    tracemalloc.start()
    try:
        for _ in range(150):
            last = await write(store, job, size=20_000)
            await reading.has(last)
        assert tracemalloc.get_traced_memory()[0] < 2e6, "of 3 MB that the stalled client missed"
    finally:
        tracemalloc.stop()
    gone.writer.close()  # type: ignore[attr-defined]
    followed = server.services.live._followed
    await until(lambda: followed[job, JobFeed.EVENTS].followers == 2)
    late = Follower(stalled)
    await late.has(last)
    assert late.numbers == list(range(1, last + 1))


@on_sqlite
async def test_the_stream_of_a_removed_job_closes_without_an_end(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "SEARCH_S", 1e-6)  # each read searches a line
    monkeypatch.setattr(live_hub, "SAFETY_READ_S", 3600.0)
    async with serving(store, settings) as server:
        job = await server.new_job()
        async with job_transaction(store, job) as tx:
            for _ in range(600):
                tx.emit(UnknownEvent("written", {"text": "x" * 20_000}))
            lines = [line(number, f"of {number}") for number in range(1, 1001)]
            await series.store_logs(tx.session, tx.job, lines)
            tx.end(State.FAILED, "code", "message")
            tx.job.cleaned = True
        stalled = await server.open(job, "events", buffer=4096)
        searching = Follower(await server.open(job, "logs", "tail=2&grep=of.[89]$"))
        hub = server.services.live
        await until(lambda: bool(hub._followed) and ": keep-alive" in searching.text)
        await server.services.removal.remove(job, with_checkpoints=False)
        follower = Follower(stalled)
        for stream in (follower, searching):
            await asyncio.wait_for(stream.over, DEADLINE_S)
            assert stream.text.endswith(COMPLETE)
            assert "event: end" not in stream.text
        assert follower.numbers == list(range(1, 501))
        await until(lambda: hub._poll_task is None)
        answer = await server.open(job, "events", after=500)
        assert (await answer.readline()).split()[1] == b"404"


@pytest.mark.seconds
async def test_streams_resume_on_a_restarted_server_without_gaps_or_repeats(
    settings: Settings, store: Store
) -> None:
    numbers: dict[str, list[int]] = {"events": [0], "logs": [0]}
    job, stop = "", asyncio.Event()

    async def write_until_stopped() -> None:
        while not stop.is_set():
            await write(store, job)
            await asyncio.sleep(0.005)

    writing: asyncio.Task[None] | None = None
    for restart in range(3):
        servers = await Store.open(settings)
        async with serving(servers, settings) as server:
            job = job or await server.new_job()
            writing = writing or asyncio.create_task(write_until_stopped())
            followers = {
                feed: Follower(await server.open(job, feed, after=got[-1]))
                for feed, got in numbers.items()
            }
            for follower in followers.values():
                await until(lambda: len(follower.numbers) > 5)  # noqa: B023
            if restart == 2:
                stop.set()
                await writing
                async with job_transaction(store, job) as tx:
                    tx.end(State.FAILED, "code", "message")
            else:
                server.services.stopping.set()
            for feed, follower in followers.items():
                await asyncio.wait_for(follower.over, DEADLINE_S)
                numbers[feed] += follower.numbers
        await servers.close()
    async with store.read() as session:
        found = await session.get_one(JobRecord, job)
    assert numbers["events"] == list(range(found.event_seq + 1))
    assert numbers["logs"] == list(range(found.log_lines + 1))


@on_sqlite
async def test_a_long_search_is_kept_alive(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "SEARCH_S", 1e-6)  # each read searches a line
    async with serving(store, settings, keep_alive_s=0.02) as server:
        job = await server.new_job()
        async with job_transaction(store, job) as tx:
            lines = [line(number, f"of {number}") for number in range(1, 301)]
            await series.store_logs(tx.session, tx.job, lines)
        follower = Follower(await server.open(job, "logs", "grep=of.300"))
        await follower.has(300)
        before, _, _ = follower.text.partition("event: log")
        assert ": keep-alive" in before
