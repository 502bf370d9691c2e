"""Each line of a node's log is a JSON object that names its job, attempt and rank."""

from __future__ import annotations

import io
import json
import math
from typing import Any

from holdfast_workers.agent.json_log import JsonLog
from holdfast_workers.protocol.messages import Signal, SignalKind


def logged_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def signal(kind: SignalKind, **detail: Any) -> Signal:
    return Signal(kind, "n0", "a", 1, 5.0, 3, rank=2, worker="n0.a.1", pid=42, detail=detail)


def test_lines_of_output_and_signals_name_their_job_attempt_and_rank() -> None:
    stream = io.StringIO()
    log = JsonLog(stream, job="j", agent="n0", node="abc")
    log.log_output(3, 2, "n0.a.1", 'a "quoted"\nline')
    log.log_output(0, None, "store", "no rank")
    log.log_signal(signal(SignalKind.WORKER_EXITED, signal=9))
    log.log_signal(signal(SignalKind.GUARD_TRIPPED, loss=math.nan))
    log.log_event("fenced", attempt=4)
    lines = logged_lines(stream)
    assert all(line["job"] == "j" and line["agent"] == "n0" for line in lines)
    assert all(line["node"] == "abc" and line["at"] > 0 for line in lines)
    assert (lines[0]["attempt"], lines[0]["rank"], lines[0]["worker"]) == (3, 2, "n0.a.1")
    assert lines[0]["message"] == 'a "quoted"\nline'
    assert "rank" not in lines[1]
    assert (lines[2]["level"], lines[2]["event"]) == ("warning", "worker_exited")
    assert lines[2]["detail"] == {"signal": 9}
    assert lines[3]["event"] == "guard_tripped"
    assert (lines[4]["level"], lines[4]["attempt"]) == ("info", 4)


def test_a_log_that_cannot_be_written_raises_nothing() -> None:
    stream = io.StringIO()
    log = JsonLog(stream, job="j", agent="n0", node="abc")
    stream.close()
    log.log_output(1, 0, "n0.a.1", "text")
    JsonLog(None, job="j", agent="n0", node="abc").log_output(1, 0, "n0.a.1", "text")
