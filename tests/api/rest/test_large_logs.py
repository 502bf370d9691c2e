"""A log of any length is read quickly: its end, its middle, a time, a search."""

from __future__ import annotations

import json
import sqlite3
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.support.service.live_server import SPEC, LiveServer, live_server
from tests.support.waiting import DEADLINE_S

from holdfast import Client
from holdfast_service.job_model.times import rfc3339
from holdfast_service.store.series import MAX_CHUNK_LINES, LogSlice

LINE = "step {n} loss 2.3456 grad_norm 0.789 lr 3.0e-04 tokens_per_second 123456 data epoch 0 shard"
FIRST_AT = 1_700_000_000.0
LINES_PER_S = 1000
FEW_CHUNKS = 16
"""The chunks that may be read for a page, of hundreds or thousands."""
CHUNKS_AT_ONCE = 64
DOWNLOADED = 200 << 20
"""The download is cut off after this many bytes."""
MAX_MEMORY_BYTES = 60 << 20
"""The memory limit of a download, client and server together, for a log of any length."""


@pytest.fixture(
    scope="module",
    params=[16 << 20, pytest.param(1 << 30, marks=[pytest.mark.soak, pytest.mark.timeout(900)])],
    ids=["16MB", "1GB"],
)
def long_log(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LiveServer, str, int]]:
    """A server, a job, and the number of its lines."""
    with live_server(tmp_path_factory.mktemp("logs")) as server, Client(server.address) as client:
        job_id = client.submit({**SPEC, "parallel": {"dp_shard": 2, "tp": 2}}).id
        server.run_job(job_id)
        client.wait(job_id, 60)
        yield server, job_id, write(server.settings.data_dir / "holdfast.db", job_id, request.param)


def write(database: Path, job_id: str, size: int) -> int:
    """Lines of `size` bytes of text, as the reconciler would have stored them."""
    chunks = -(-size // (len(LINE) * MAX_CHUNK_LINES))
    total = chunks * MAX_CHUNK_LINES
    with closing(sqlite3.connect(database, timeout=DEADLINE_S)) as connection:
        with connection:
            connection.execute("DELETE FROM log_chunks WHERE job_id = ?", (job_id,))
        for part in batched(range(1, total, MAX_CHUNK_LINES), CHUNKS_AT_ONCE):
            rows = [(job_id, at, at + MAX_CHUNK_LINES - 1, chunk(at, total)) for at in part]
            with connection:  # briefly: the server writes, too
                connection.executemany(
                    "INSERT INTO log_chunks (job_id, first, last, lines) VALUES (?, ?, ?, ?)", rows
                )
        with connection:
            connection.execute("UPDATE jobs SET log_lines = ? WHERE id = ?", (total, job_id))
    return total


def batched(of: range, size: int) -> Iterator[range]:
    return (of[at : at + size] for at in range(0, len(of), size))


def chunk(first: int, total: int) -> str:
    lines: list[list[Any]] = [
        [
            FIRST_AT + n / LINES_PER_S,
            n % 4,
            1,
            "n0",
            "n0.a.1",
            "output",
            LINE.replace("{n}", str(n)),
        ]
        for n in range(first, first + MAX_CHUNK_LINES)
    ]
    if first == 1 + (total // MAX_CHUNK_LINES // 4) * MAX_CHUNK_LINES:
        lines[7][-1] = "ERROR a needle in the first half"
    return json.dumps(lines, separators=(",", ":"))


@pytest.mark.slow
def test_few_chunks_are_read_for_any_page_of_a_long_log(
    long_log: tuple[LiveServer, str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, job_id, total = long_log
    decoded, lines_of = [0], LogSlice.lines

    def counted(part: LogSlice) -> list[tuple[int, list[Any]]]:
        decoded[0] += 1
        return lines_of(part)

    monkeypatch.setattr(LogSlice, "lines", counted)
    with httpx.Client(base_url=server.address, timeout=60, trust_env=False) as http:

        def read(**params: Any) -> dict[str, Any]:
            decoded[0] = 0
            answer = http.get(f"/api/v1/jobs/{job_id}/logs", params=params)
            assert answer.status_code == 200, answer.text
            assert decoded[0] <= FEW_CHUNKS
            found: dict[str, Any] = answer.json()
            return found

        def numbers(found: dict[str, Any]) -> list[int]:
            return [line["line"] for line in found["items"]]

        end = read(tail=200)
        assert decoded[0] > 0, "chunks are not counted"
        assert numbers(end) == list(range(total - 199, total + 1))
        back = read(before=total - 199, limit=200)
        assert numbers(back) == list(range(total - 399, total - 199))
        middle = read(after=total // 2, limit=200)
        assert numbers(middle)[0] == total // 2 + 1
        moment = rfc3339(FIRST_AT + (total // 3) / LINES_PER_S)
        monkeypatch.setattr(LogSlice, "lines", lines_of)  # a minute of lines is searched
        since = read(since=moment, limit=5)
        while not since["items"]:  # the search starts a minute early, because clocks differ
            since = read(since=moment, limit=5, after=since["last_line"])
        assert numbers(since)[0] == total // 3
        monkeypatch.setattr(LogSlice, "lines", counted)
        near = read(grep=f"step {total - 1000} ", tail=1)
        assert numbers(near) == [total - 1000]
        monkeypatch.setattr(LogSlice, "lines", lines_of)
        assert read(grep="nowhere at all", tail=10)["items"] == []


@pytest.mark.seconds
def test_a_search_of_a_whole_long_log_finds_the_needle_and_blocks_no_one(
    long_log: tuple[LiveServer, str, int],
) -> None:
    server, job_id, total = long_log
    at, steps, found = 0, 0, []
    started = time.perf_counter()
    with httpx.Client(base_url=server.address, timeout=60, trust_env=False) as http:
        while True:
            params: dict[str, str | int] = {"grep": "a needle in", "after": at, "level": "error"}
            page = http.get(f"/api/v1/jobs/{job_id}/logs", params=params).json()
            assert page["last_line"] > at
            found += [line["text"] for line in page["items"]]
            at, steps = page["last_line"], steps + 1
            assert http.get(f"/api/v1/jobs/{job_id}").status_code == 200
            if page["next_cursor"] is None:
                break
    took, text = time.perf_counter() - started, total * len(LINE)
    print(f"{text / 2**20:.0f} MiB searched in {took:.1f} s, {steps} steps")
    assert found == ["ERROR a needle in the first half"]


@pytest.mark.seconds
def test_a_download_of_a_long_log_takes_little_memory_and_blocks_no_one(
    long_log: tuple[LiveServer, str, int],
) -> None:
    server, job_id, total = long_log
    process = psutil.Process()
    before = most = process.memory_info().rss
    read, lines = 0, 0
    answered: list[float] = []
    first = b""
    started = time.perf_counter()
    with (
        httpx.Client(base_url=server.address, timeout=60, trust_env=False) as http,
        httpx.Client(base_url=server.address, timeout=60, trust_env=False) as other,
        http.stream("GET", f"/api/v1/jobs/{job_id}/logs/download") as answer,
    ):
        assert answer.status_code == 200
        for part in answer.iter_raw(1 << 20):
            first = first or part[:200]
            read += len(part)
            lines += part.count(b"\n")
            most = max(most, process.memory_info().rss)
            if not read >> 20 & 7:
                alive = time.perf_counter()
                assert other.get(f"/api/v1/jobs/{job_id}").status_code == 200
                answered.append(time.perf_counter() - alive)
            if read > DOWNLOADED:
                break
    took = time.perf_counter() - started
    grown = (most - before) / 2**20
    others = statistics.median(answered)
    print(f"{read / 2**20 / took:.1f} MiB/s, {grown:.0f} MiB of memory, {others:.3f} s for others")
    assert LINE.replace("{n}", "1").encode() in first
    assert lines == total or read > DOWNLOADED
    assert most - before < MAX_MEMORY_BYTES
