"""Each line of a node's log is a JSON object that names its job, attempt and rank."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterator

import pytest
import structlog

from holdfast_workers import log_setup
from holdfast_workers.agent.node_log import log_signal, node_log
from holdfast_workers.protocol.findings import GuardAction, GuardKind, TripReport
from holdfast_workers.protocol.signals import (
    GuardTripReported,
    Signal,
    SignalDetail,
    WorkerExited,
)

TRIP = TripReport(GuardKind.LOSS_SPIKE, 7, 6, GuardAction.SKIP, "high", loss=math.nan)


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    """Log events are lines of JSON, as in a process of an agent whose node's logs are collected."""
    log_setup.configure(json_fields={"job": "j", "agent": "n0", "node": "abc"})
    yield
    structlog.reset_defaults()


def signal(detail: SignalDetail) -> Signal:
    return Signal(detail, "n0", "a", 1, 5.0, 3, rank=2, worker="n0.a.1", pid=42)


def test_lines_of_output_and_signals_name_their_job_attempt_and_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = node_log(collected=True)
    log.info("output", attempt=3, rank=2, worker="n0.a.1", message='a "quoted"\nline')
    log.info("output", attempt=0, rank=None, worker="store", message="no rank")
    log_signal(log, signal(WorkerExited(signal=9)))
    log_signal(log, signal(GuardTripReported(TRIP)))
    log.info("fenced", attempt=4)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert all(line["job"] == "j" and line["agent"] == "n0" for line in lines)
    assert all(line["node"] == "abc" and line["at"] > 0 for line in lines)
    assert (lines[0]["attempt"], lines[0]["rank"], lines[0]["worker"]) == (3, 2, "n0.a.1")
    assert lines[0]["message"] == 'a "quoted"\nline'
    assert "rank" not in lines[1]
    assert (lines[2]["level"], lines[2]["event"]) == ("warning", "worker_exited")
    assert lines[2]["detail"] == {"signal": 9, "step": 0}
    assert lines[3]["event"] == "guard_tripped"
    assert (lines[4]["level"], lines[4]["attempt"]) == ("info", 4)


def test_a_log_that_cannot_be_written_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    node_log(collected=True).info("output", attempt=1, rank=0, worker="n0.a.1", message="text")


def test_a_node_whose_logs_are_not_collected_writes_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = node_log(collected=False)
    log.error("agent_failed", message="text")
    log_signal(log, signal(WorkerExited(signal=9)))
    assert capsys.readouterr().err == ""
