"""The log events of a process: one line each, with a level, on the current standard error."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterator

import pytest
import structlog

from holdfast_service.job_model.log_levels import LogLevel, level_of
from holdfast_workers import log_setup


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def logged(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Log a warning with fields and an exception, to a standard error that is set only now."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    log = structlog.get_logger()
    log.warning("a disk is slow", disk="sda", latency=math.inf)
    try:
        raise ValueError("no such shape")
    except ValueError:
        log.exception("a call failed")
    return stream


@pytest.mark.parametrize("timestamps", [False, True])
def test_text_lines_have_a_level_that_the_service_reads_and_the_traceback(
    timestamps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_setup.configure(timestamps=timestamps)
    warning, error, *trace = logged(monkeypatch).getvalue().splitlines()
    assert (level_of(warning), level_of(error)) == (LogLevel.WARNING, LogLevel.ERROR)
    assert warning.endswith("WARNING a disk is slow disk=sda latency=inf")
    assert warning.startswith("WARNING") is not timestamps
    assert error.endswith("ERROR   a call failed")
    assert trace[0].startswith("Traceback") and trace[-1] == "ValueError: no such shape"


def test_text_of_users_gives_no_orders_to_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    log_setup.configure()
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    structlog.get_logger().warning("a name", name="a\x1b[2J\x9b\u202eb", other="ü\n\tx")
    assert stream.getvalue() == "WARNING a name name=a\\x1b[2J\\x9b\\u202eb other=ü\n\tx\n"


def test_json_lines_have_the_fields_of_their_agent_and_the_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log_setup.configure(json_fields={"job": "j", "agent": "n0", "node": "abc"})
    warning, error = map(json.loads, logged(monkeypatch).getvalue().splitlines())
    assert (warning["level"], warning["event"]) == ("warning", "a disk is slow")
    assert (warning["disk"], warning["latency"]) == ("sda", "inf")
    assert (error["level"], error["event"]) == ("error", "a call failed")
    assert error["exception"].endswith("ValueError: no such shape")
    for line in (warning, error):
        assert (line["job"], line["agent"], line["node"]) == ("j", "n0", "abc")
        assert line["at"] > 0


def test_a_line_that_cannot_be_written_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    log_setup.configure()
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    structlog.get_logger().warning("a line without a reader")
