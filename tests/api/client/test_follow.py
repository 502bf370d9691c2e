"""A follower of a stream skips keep-alives and resumes after the last complete message."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from holdfast import AsyncClient
from holdfast_service.views.history import LogLineView

BROKEN = ": keep-alive\n\nid: 1\ndata: {}\n\n: keep-alive\n\nid: 2\ndata: {{"
COMPLETE = "id: 2\nevent: log\ndata: {}\n\nevent: end\ndata: {{}}\n\nid: 3\ndata: {{}}\n\n"


def log_line(text: str) -> LogLineView:
    return LogLineView(
        line=1, at=1.0, rank=0, attempt=1, agent="a", worker="w", stream="out", text=text
    )


def answers(asked_after: list[str]) -> Callable[[httpx.Request], httpx.Response]:
    """A server whose first connection breaks in the second message."""

    def answer(request: httpx.Request) -> httpx.Response:
        asked_after.append(request.headers["last-event-id"])
        number, text = (1, BROKEN) if len(asked_after) == 1 else (2, COMPLETE)
        stream = text.format(log_line(f"line {number}").model_dump_json())
        return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, text=stream)

    return answer


async def test_a_follower_resumes_after_the_last_complete_message() -> None:
    asked_after: list[str] = []
    async with AsyncClient("http://server") as client:
        server = httpx.MockTransport(answers(asked_after))
        client._transport._http = httpx.AsyncClient(base_url="http://server", transport=server)
        assert [line.text async for line in client.follow_logs("job")] == ["line 1", "line 2"]
    assert asked_after == ["0", "1"]
