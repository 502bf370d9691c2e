"""What is not as it should be: answers of others, addresses, lines, the program itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from holdfast import Client
from holdfast.cli import completion, jobs
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast.client import sse
from holdfast.client.async_client import AsyncClient
from holdfast.errors import ServerError
from holdfast_service.views.jobs import LogLineView

STRANGE = "one\u2028two\u2029three\x85four\x0bfive\x1cend"


@pytest.fixture
def stranger() -> Iterator[str]:
    """The address of a server that answers logs with one strange line, anything else with HTML."""
    line = LogLineView(
        line=1, at=1.0, rank=0, attempt=1, agent="a", worker="w", stream="out", text=STRANGE
    )
    stream = f"id: 1\nevent: log\ndata: {line.model_dump_json()}\n\nevent: end\ndata: {{}}\n\n"

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            logs = self.path.split("?")[0].endswith("/logs")
            body = (stream if logs else "<html>It works!</html>").encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream" if logs else "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def test_lines_end_where_a_line_feed_is_and_nowhere_else() -> None:
    whole = [f"data: {STRANGE}", "", "x", "", "last"]
    text = f"data: {STRANGE}\n\nx\r\n\nlast"
    for cut in range(len(text) + 1):
        lines = sse.LineSplitter()
        taken = [*lines.take(text[:cut]), *lines.take(text[cut:])]
        assert [*taken, *lines.rest()] == whole, cut


def test_a_followed_log_may_hold_what_unicode_calls_the_end_of_a_line(stranger: str) -> None:
    with Client(stranger, retry_s=0) as client:
        assert [line.text for line in client.follow_logs("job")] == [STRANGE]

    async def follow() -> list[str]:
        async with AsyncClient(stranger, retry_s=0) as client:
            return [line.text async for line in client.follow_logs("job")]

    assert asyncio.run(follow()) == [STRANGE]


def test_what_is_no_holdfast_server_is_named_so(
    stranger: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["describe", "tiny", "--address", stranger]) == ExitCode.SERVER
    assert "is it a Holdfast server" in capsys.readouterr().err
    with Client(stranger, retry_s=0) as client, pytest.raises(ServerError, match="text/html"):
        next(iter(client.follow("job")))


def test_what_a_shell_could_take_for_a_command_is_no_candidate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [("$(reboot)", "a job"), ("good.name-1", "two\nlines"), ("a b", "")]
    monkeypatch.setattr(completion, "candidates", lambda _words: iter(found))
    completion.complete("logs", "")
    assert capsys.readouterr().out == "good.name-1\ttwo lines\n"


@pytest.mark.parametrize("address", ["http://[::1", "127.0.0.1:port"])
def test_an_address_that_is_none_is_wrong_usage(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ls", "--address", address]) == ExitCode.USAGE
    assert "write http://HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "code", "said"),
    [
        ("--database-url", "mysql://u:secret@h/d", ExitCode.SERVER, "postgresql://"),
        ("--database-url", "secret", ExitCode.SERVER, "postgresql://"),
        ("--port", "99999", ExitCode.USAGE, "port: "),
    ],
)
def test_a_server_says_at_once_what_it_cannot_serve_with(
    option: str,
    value: str,
    code: ExitCode,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["serve", "--data-dir", str(tmp_path / "data"), option, value]) == code
    told = capsys.readouterr().err
    assert said in told
    assert "secret" not in told
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_the_program_is_not_the_end_of_a_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def faulty() -> None:
        raise LookupError("upside down")

    monkeypatch.setattr(jobs, "ls", faulty)
    assert run(["ls"]) == ExitCode.UNFORESEEN
    told = capsys.readouterr().err
    assert "LookupError: upside down" in told
    assert "Traceback" not in told
    monkeypatch.setenv("HOLDFAST_TRACEBACK", "1")
    run(["ls"])
    assert "in faulty" in capsys.readouterr().err
