"""The lines that each rank prints to its log."""

from __future__ import annotations

import io
import math
import time
from dataclasses import replace

import pytest
from tests.support.service.fake_cluster import row

from holdfast_service.job_model.log_levels import LogLevel, level_of
from holdfast_workers.protocol.findings import EarlyStop
from holdfast_workers.protocol.messages import ErrorKind, Tier
from holdfast_workers.training.rank_log import RankLog, format_step

MESH = {"dp_shard": 2, "tp": 2, "cp": 1}
ROW = replace(row(2, 7, loss=2.5), grad_norm=0.75, tokens=2048, step_time_s=0.2, loader_wait_s=0.0)

Capsys = pytest.CaptureFixture[str]


def log(rank: int = 0, steps: int = 100) -> RankLog:
    return RankLog(rank, 2, MESH, steps)


def test_a_step_is_one_line_of_the_known_values() -> None:
    assert (
        format_step(ROW)
        == "step      7  loss 2.5000  grad norm 0.750  lr 3.00e-04  200 ms  10,240 tokens/s"
    )
    bare = replace(ROW, loss=math.nan, grad_norm=math.nan, tokens=0, own={"reward": 0.25})
    assert format_step(bare) == "step      7  lr 3.00e-04  reward 0.25  200 ms"


@pytest.mark.parametrize("tier", Tier)
def test_the_first_line_names_the_source_of_the_state(tier: Tier, capsys: Capsys) -> None:
    log(rank=3).log_joined(117, tier, {"build": 0.5, "restore": 0.01})
    line = capsys.readouterr().out
    began = "starts (" if tier is Tier.INIT else "resumes after step 117 from "
    assert line.startswith(f"INFO    attempt 2: rank 3 of dp_shard 2 x tp 2 {began}")
    assert line.endswith("(build 0.50 s, restore 0.01 s)\n")
    assert level_of(line) is LogLevel.INFO


def test_steps_are_logged_at_intervals_and_the_last_step_always(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rank_zero = log(steps=50)
    for step in range(1, 51):
        rank_zero.log_step(replace(ROW, step=step))
        now += 0.5
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[2]) for line in lines] == [1, 21, 41, 50]
    assert {level_of(line) for line in lines} == {LogLevel.INFO}


def test_only_rank_zero_logs_steps(capsys: Capsys) -> None:
    log(rank=1).log_step(ROW)
    assert capsys.readouterr().out == ""


TRACE = "Traceback (most recent call last):\nValueError: no such shape\nmore of it\n"


@pytest.mark.parametrize("kind", ErrorKind)
def test_only_exceptions_of_the_program_are_logged_with_a_trace(
    kind: ErrorKind, capsys: Capsys
) -> None:
    log().log_failed(7, kind, "ValueError", "no such shape\nmore of it", TRACE)
    first, *rest = capsys.readouterr().out.splitlines()
    assert "attempt 2: failed after step 7" in first
    assert "no such shape" in first
    assert "more of it" not in first
    lost = kind is ErrorKind.COMMUNICATION
    assert level_of(first) is (LogLevel.WARNING if lost else LogLevel.ERROR)
    assert bool(rest) == (kind in (ErrorKind.USER, ErrorKind.INTERNAL))
    if rest:
        assert rest[0] == "Traceback (most recent call last):"
        assert rest[-1] == "more of it"


def test_a_lost_connection_is_logged_without_gloos_advice(capsys: Capsys) -> None:
    gloo = "[/src/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4259. This is typically so"
    log().log_failed(7, ErrorKind.COMMUNICATION, "RuntimeError", gloo, "")
    assert capsys.readouterr().out == (
        "WARNING attempt 2: failed after step 7: lost the connection to a peer "
        "(Connection closed by peer [10.0.0.2]:4259)\n"
    )


def test_a_fence_and_the_end_are_logged(capsys: Capsys) -> None:
    log().log_fenced(7)
    log().log_done(100, None)
    log().log_done(40, EarlyStop("eval_loss", 2, 2.3125, 20))
    assert capsys.readouterr().out.splitlines() == [
        "INFO    attempt 2: ended after step 7; waiting for the next attempt",
        "INFO    attempt 2: finished after step 100",
        "INFO    attempt 2: finished after step 40, early: eval_loss has not improved on 2.312 of "
        "step 20 in 2 evaluations",
    ]


def test_a_program_with_a_closed_output_continues_training(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stdout", closed)
    log().log_step(ROW)
