"""What a rank writes to its log unasked."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest

from holdfast_service.job_model.log_filters import LogLevel, level_of
from holdfast_workers.protocol.messages import ErrorKind, StepRow, Tier
from holdfast_workers.training import rank_log
from holdfast_workers.training.rank_log import RankLog, in_words

MESH = {"dp_shard": 2, "tp": 2, "cp": 1}
ROW = StepRow(
    attempt=2,
    step=7,
    at=0.0,
    loss=2.5,
    grad_norm=0.75,
    lr=3e-4,
    tokens=2048,
    step_time_s=0.2,
    loader_wait_s=0.0,
    samples="",
)

Capsys = pytest.CaptureFixture[str]


def log(rank: int = 0, steps: int = 100) -> RankLog:
    return RankLog(rank, 2, MESH, steps)


def test_a_step_is_one_line_of_what_is_known() -> None:
    assert (
        in_words(ROW)
        == "step      7  loss 2.5000  grad norm 0.750  lr 3.00e-04  200 ms  10,240 tokens/s"
    )
    bare = replace(ROW, loss=math.nan, grad_norm=math.nan, tokens=0, own={"reward": 0.25})
    assert in_words(bare) == "step      7  lr 3.00e-04  reward 0.25  200 ms"


@pytest.mark.parametrize("tier", Tier)
def test_it_says_from_where_it_goes_on(tier: Tier, capsys: Capsys) -> None:
    log(rank=3).joined(117, tier, {"build": 0.5, "restore": 0.01})
    said = capsys.readouterr().out
    began = "begins (" if tier is Tier.INIT else "goes on after step 117 from "
    assert said.startswith(f"INFO    attempt 2: rank 3 of dp_shard 2 x tp 2 {began}")
    assert said.endswith("(build 0.50 s, restore 0.01 s)\n")
    assert level_of(said) is LogLevel.INFO


def test_steps_are_told_now_and_then_and_the_last_one_always(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(rank_log.time, "monotonic", lambda: now)
    told = log(steps=50)
    for step in range(1, 51):
        told.stepped(replace(ROW, step=step))
        now += 0.5
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[2]) for line in lines] == [1, 21, 41, 50]
    assert {level_of(line) for line in lines} == {LogLevel.INFO}


def test_one_rank_tells_the_steps_for_all(capsys: Capsys) -> None:
    log(rank=1).stepped(ROW)
    assert capsys.readouterr().out == ""


TRACE = "Traceback (most recent call last):\nValueError: no such shape\nmore of it\n"


@pytest.mark.parametrize("kind", ErrorKind)
def test_only_what_the_program_raised_is_told_with_its_trace(
    kind: ErrorKind, capsys: Capsys
) -> None:
    log().failed(7, kind, "ValueError", "no such shape\nmore of it", TRACE)
    first, *rest = capsys.readouterr().out.splitlines()
    assert "attempt 2: left after step 7" in first
    assert "no such shape" in first
    assert "more of it" not in first
    lost = kind is ErrorKind.COMMUNICATION
    assert level_of(first) is (LogLevel.WARNING if lost else LogLevel.ERROR)
    assert bool(rest) == (kind in (ErrorKind.USER, ErrorKind.INTERNAL))
    if rest:
        assert rest[0] == "Traceback (most recent call last):"
        assert rest[-1] == "more of it"


def test_a_lost_connection_is_told_without_the_advice_that_comes_with_it(capsys: Capsys) -> None:
    gloo = "[/src/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4259. This is typically so"
    log().failed(7, ErrorKind.COMMUNICATION, "RuntimeError", gloo, "")
    assert capsys.readouterr().out == (
        "WARNING attempt 2: left after step 7: a peer does not answer "
        "(Connection closed by peer [10.0.0.2]:4259)\n"
    )


def test_a_fence_and_the_end_are_told(capsys: Capsys) -> None:
    log().fenced(7)
    log().done(100)
    assert capsys.readouterr().out.splitlines() == [
        "INFO    attempt 2: fenced after step 7; waits for the next attempt",
        "INFO    attempt 2: done after step 100",
    ]


def test_a_program_that_has_closed_its_output_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stdout", closed)
    log().stepped(ROW)
