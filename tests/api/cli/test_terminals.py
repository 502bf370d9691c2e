"""No command lets text of users give orders to the terminal."""

from __future__ import annotations

import os
import re
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.api.cli.printing.test_terminal_text import COLOUR, OBEYED
from tests.support.service.fake_cluster import line
from tests.support.service.live_server import SPEC, LiveServer, live_server
from tests.support.waiting import DEADLINE_S, eventually

from holdfast import Client
from holdfast.cli.main import run
from holdfast.cli.printing import output
from holdfast.cli.submission.job_follower import JobFollower
from holdfast.cli.submission.rank_output import RankOutput

HOSTILE = "evil\x1b[2J\x1b]0;t\x07\x1b]52;c;eA==\x07\x9b31m\x08\r\x7f\u202e\u2066[red]:bomb:"
ROW = f"{HOSTILE}\n12:00:00     9  job.succeeded"
COMMANDS = (
    *(("ls",), ("ls", "-o", "wide"), ("ls", "-o", "json"), ("ls", "-o", "yaml"), ("top", "--once")),
    *(("describe", "JOB"), ("describe", "JOB", "-o", "yaml"), ("top", "JOB", "--once")),
    *(("events", "JOB"), ("events", "JOB", "-f"), ("logs", "JOB"), ("logs", "JOB", "-f")),
    *(("logs", "JOB", "-o", "json"), ("logs", "JOB", "-o", "yaml"), ("label", "JOB")),
    *(("wait", "JOB"), ("incidents", "JOB"), ("checkpoints", "JOB"), ("resume", "JOB")),
    *(("nodes",), ("nodes", "-o", "wide"), ("node", "describe", "NODE"), ("cancel", HOSTILE)),
    ("verify", "JOB", "--no-wait"),
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, str, str]]:
    """A server, a job and a node, with hostile text wherever users may write some."""
    with (
        live_server(tmp_path_factory.mktemp("hostile")) as server,
        Client(server.address) as client,
    ):
        job = client.submit({**SPEC, "labels": {"owner": HOSTILE, "note": ROW[:64]}})
        supervisor = server.supervisor(job.id)
        supervisor.logs += [line(1, HOSTILE), line(2, f"\x1b[1;35mpurple\x1b]0;t\x07 {HOSTILE}")]
        supervisor.train(3)
        eventually(lambda: client.get(job.id).progress.step == 3)
        supervisor.end("FAILED", "user_error", message=ROW, traceback=f"Traceback\n  {HOSTILE}")
        client.wait(job.id, DEADLINE_S)
        node = client.nodes()[0].id
        client.cordon(node, ROW)
        yield server, job.id, node


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """A real terminal as stdout and stderr; the function closes it and returns all that it got."""
    master, slave = os.openpty()
    tty.setraw(slave)
    seen = bytearray()

    def read() -> None:
        while True:
            try:
                block = os.read(master, 2**16)
            except OSError:  # the other end is closed
                return
            seen.extend(block)

    reading = threading.Thread(target=read)
    reading.start()
    stream = os.fdopen(slave, "w", encoding="utf-8")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr("sys.stderr", stream)

    def text() -> str:
        stream.close()
        reading.join(DEADLINE_S)
        return seen.decode()

    try:
        yield text
    finally:
        monkeypatch.undo()
        text()
        os.close(master)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_terminal_gets_text_and_colours_only(
    hostile: tuple[LiveServer, str, str], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, job, node = hostile
    arguments = [{"JOB": job, "NODE": node}.get(word, word) for word in words]
    with terminal(monkeypatch) as text:
        run([*arguments, "--address", server.address])
        shown = text()
    assert shown
    assert not OBEYED.search(COLOUR.sub("", shown)), ascii(shown)


def test_a_pipe_gets_no_more_than_a_terminal(
    hostile: tuple[LiveServer, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    server, job, node = hostile
    for words in COMMANDS:
        arguments = [{"JOB": job, "NODE": node}.get(word, word) for word in words]
        run([*arguments, "--address", server.address])
        printed = capsys.readouterr()
        for shown in (printed.out, printed.err):
            assert not OBEYED.search(COLOUR.sub("", shown)), (words, ascii(shown))
            if "logs" not in words:
                assert not COLOUR.search(shown), (words, ascii(shown))


def test_a_followed_run_shows_the_colours_of_its_ranks_alone(
    hostile: tuple[LiveServer, str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server, job_id, _ = hostile
    copy = tmp_path / "output.log"
    with terminal(monkeypatch) as text, Client(server.address) as client, copy.open("w") as file:
        ranks = RankOutput(client, several=True, copy=file)
        JobFollower(client, output.stderr(), is_of_program=True).follow(job_id, ranks)
        shown = text()
    assert "\x1b[1;35mpurple" in shown
    # A live line moves the cursor itself: what it does is the same for a job without such text.
    assert not re.search("\x1b\\]|\x1b\\[2J|\x9b|\u202e|\u2066|\x08|\x7f", shown), ascii(shown)
    assert not OBEYED.search(COLOUR.sub("", copy.read_text())), ascii(copy.read_text())


def test_users_cannot_write_rows_of_others(
    hostile: tuple[LiveServer, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    server, job, _ = hostile
    for words in (("nodes",), ("label", job), ("events", job), ("describe", job)):
        run([*words, "--address", server.address])
        shown = capsys.readouterr().out
        assert "[red]:bomb:" in shown, words
        assert not re.search("^12:00:00", shown, re.MULTILINE), (words, shown)
