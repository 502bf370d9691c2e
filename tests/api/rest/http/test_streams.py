"""Streams are numbered, resume where they broke, and end when the job has ended."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from httpx_sse import EventSource, ServerSentEvent
from tests.api.rest.test_jobs import submitted
from tests.support.service.fake_cluster import line
from tests.support.service.live_server import SPEC, LiveServer, live_server
from tests.support.waiting import DEADLINE_S, eventually

from holdfast import Client
from holdfast.client.calls import LogQuery
from holdfast_service.readers import logs

STREAM = {"Accept": "text/event-stream"}


def released(http: httpx.Client, job_id: str) -> bool:
    return bool(http.get(f"/api/v1/jobs/{job_id}").json()["released"])


def read(response: httpx.Response) -> Iterator[ServerSentEvent]:
    """The messages of a stream, without its keep-alives."""
    assert response.status_code == 200
    return (event for event in EventSource(response).iter_sse() if event.data)


def test_events_are_numbered_without_gaps_and_the_stream_ends(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = submitted(http)
    runner = threading.Thread(target=lambda: server.run_job(job_id))
    runner.start()
    with http.stream("GET", f"/api/v1/jobs/{job_id}/events", headers=STREAM) as response:
        messages = list(read(response))
    runner.join()
    assert messages[-1].event == "end"
    events = messages[:-1]
    assert [int(message.id) for message in events] == list(range(1, len(events) + 1))
    assert json.loads(events[0].data)["kind"] == events[0].event == "job.submitted"
    assert any("SUCCEEDED" in event.data for event in events[-2:]), "perhaps before job.released"
    page = http.get(f"/api/v1/jobs/{job_id}/events").json()
    numbers = [event["seq"] for event in page["items"]]
    assert numbers[: len(events)] == [int(message.id) for message in events]


def test_a_stream_resumes_after_the_last_event_id(http: httpx.Client, server: LiveServer) -> None:
    job_id = submitted(http)
    server.run_job(job_id)
    eventually(lambda: released(http, job_id))  # no event follows
    path = f"/api/v1/jobs/{job_id}/events"
    last = http.get(path).json()["last_seq"]
    headers = {**STREAM, "Last-Event-ID": str(last - 2)}
    with http.stream("GET", f"{path}?after=0", headers=headers) as response:
        assert [int(message.id) for message in read(response)][:2] == [last - 1, last]
    nothing = http.get(path, headers={**STREAM, "Last-Event-ID": str(last)})
    assert nothing.status_code == 204, "a browser must not reconnect forever"


@pytest.mark.seconds
def test_a_quiet_stream_is_kept_alive_and_ends_with_the_server(tmp_path: Path) -> None:
    with live_server(tmp_path, keep_alive_s=0.1) as server:
        with httpx.Client(base_url=server.address, timeout=DEADLINE_S) as http:
            job_id = submitted(http)
            server.supervisor(job_id)
            with http.stream("GET", f"/api/v1/jobs/{job_id}/events", headers=STREAM) as response:
                lines = response.iter_lines()
                kept = [text for text in (next(lines) for _ in range(40)) if text.startswith(":")]
                assert kept
                server.stop()
                rest = list(lines)
        assert not any(text.startswith("event: end") for text in rest), "to be resumed"


def test_logs_follow_until_the_job_ends(http: httpx.Client, server: LiveServer) -> None:
    job_id = submitted(http)
    supervisor = server.run_job(job_id, end=False)
    supervisor.logs += [line(1, "first"), line(2, "of rank 1", rank=1), line(3, "second")]
    path = f"/api/v1/jobs/{job_id}/logs"
    eventually(lambda: len(http.get(path).json()["items"]) == 3)
    texts: list[str] = []
    with http.stream("GET", path, params={"rank": 0, "tail": 1}, headers=STREAM) as response:
        for message in read(response):
            if message.event == "end":
                break
            texts.append(json.loads(message.data)["text"])
            if len(texts) == 1:
                supervisor.logs.append(line(4, "last words"))
                supervisor.end()
    assert texts == ["second", "last words"]


@pytest.mark.slow
def test_a_tail_search_continues_until_it_has_enough_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "SEARCH_S", 1e-6)  # each request searches a line
    with live_server(tmp_path) as server, Client(server.address) as client:
        job_id = client.submit(SPEC).id
        supervisor = server.run_job(job_id, end=False)
        for number in range(1, 7):
            word = "hit" if number in (1, 3) else "other"
            supervisor.logs.append(line(number, f"{word} {number}"))
            eventually(lambda least=number: client.logs(job_id, tail=1).last_line >= least)  # type: ignore[misc]
        hits = LogQuery(grep="hit")
        for tail, texts in ((0, []), (1, ["hit 3"]), (9, ["hit 1", "hit 3"])):
            assert [found.text for found in client.all_logs(job_id, hits, tail=tail)] == texts
        supervisor.end()
        followed = client.follow_logs(job_id, grep="hit", tail=9)
        assert [found.text for found in followed] == ["hit 1", "hit 3"]
