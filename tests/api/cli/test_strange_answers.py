"""Unexpected input: answers of other servers, invalid addresses, unusual lines, program bugs."""

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
from holdfast.client.asynchronous.jobs import AsyncClient
from holdfast.errors import ServerError
from holdfast_service.views.history import LogLineView

STRANGE = "one\u2028two\u2029three\x85four\x0bfive\x1cend"


@pytest.fixture
def other_server() -> Iterator[str]:
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


def test_a_followed_log_line_may_contain_unicode_line_separators(other_server: str) -> None:
    with Client(other_server, retry_s=0) as client:
        assert [line.text for line in client.follow_logs("job")] == [STRANGE]

    async def follow() -> list[str]:
        async with AsyncClient(other_server, retry_s=0) as client:
            return [line.text async for line in client.follow_logs("job")]

    assert asyncio.run(follow()) == [STRANGE]


def test_an_answer_of_another_server_is_reported(
    other_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["describe", "tiny", "--address", other_server]) == ExitCode.SERVER
    assert "is it a Holdfast server" in capsys.readouterr().err
    with Client(other_server, retry_s=0) as client, pytest.raises(ServerError, match="text/html"):
        next(iter(client.follow("job")))


def test_shell_metacharacters_are_never_completion_candidates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [("$(reboot)", "a job"), ("good.name-1", "two\nlines"), ("a b", "")]
    monkeypatch.setattr(completion, "candidates", lambda _words: iter(found))
    completion.complete("logs", "")
    assert capsys.readouterr().out == "good.name-1\ttwo lines\n"


@pytest.mark.parametrize("address", ["http://[::1", "127.0.0.1:port"])
def test_an_invalid_address_is_a_usage_error(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ls", "--address", address]) == ExitCode.USAGE
    assert "write http://HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "code", "message"),
    [
        ("--database-url", "mysql://u:secret@h/d", ExitCode.SERVER, "postgresql://"),
        ("--database-url", "secret", ExitCode.SERVER, "postgresql://"),
        ("--port", "99999", ExitCode.USAGE, "port: "),
    ],
)
def test_serve_rejects_invalid_options_at_once(
    option: str,
    value: str,
    code: ExitCode,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["serve", "--data-dir", str(tmp_path / "data"), option, value]) == code
    printed = capsys.readouterr().err
    assert message in printed
    assert "secret" not in printed
    assert list(tmp_path.iterdir()) == []


def test_a_bug_of_the_program_has_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def faulty() -> None:
        raise LookupError("upside down")

    monkeypatch.setattr(jobs, "ls", faulty)
    assert run(["ls"]) == ExitCode.UNFORESEEN
    printed = capsys.readouterr().err
    assert "LookupError: upside down" in printed
    assert "Traceback" not in printed
    monkeypatch.setenv("HOLDFAST_TRACEBACK", "1")
    run(["ls"])
    assert "in faulty" in capsys.readouterr().err
