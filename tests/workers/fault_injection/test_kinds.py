"""Faults on request: what is refused, when one is due, and that a process really does it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.checkpoint.storage import StorageUnavailable, open_storage
from holdfast_workers.fault_injection.failing_storage import FailingStorage, failing_as_told
from holdfast_workers.fault_injection.fault_points import FaultPoints
from holdfast_workers.fault_injection.kinds import (
    KINDS,
    PHASES,
    FaultKind,
    InjectedError,
    Injection,
    Victim,
    faults_of,
)

WAIT_S = 20.0


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"kind": "earthquake"}, "kind"),
        ({}, "kind"),
        ({"kind": "kill", "rank": 4}, "rank"),
        ({"kind": "kill", "rank": True}, "rank"),
        ({"kind": "kill", "phase": "lunch"}, "phase"),
        ({"kind": "kill", "at_step": 0}, "at_step"),
        ({"kind": "kill", "duration_s": 3}, "duration_s"),
        ({"kind": "kill", "weight": 3}, "weight"),
        ({"kind": "slow", "factor": 0.5}, "factor"),
        ({"kind": "nan", "where": "moment"}, "where"),
        ({"kind": "bit_flip", "bit": 32}, "bit"),
        ({"kind": "remote_down", "rank": 1}, "rank"),
        ({"kind": "agent_death", "at_step": 3}, "at_step"),
        ({"kind": "supervisor_death", "phase": "forward"}, "phase"),
    ],
)
def test_an_impossible_fault_is_named_at_its_path(document: dict[str, object], path: str) -> None:
    assert [fault.path for fault in faults_of(document, world_size=4)] == [path]


def test_every_fault_of_a_request_is_named() -> None:
    wrong = {"kind": "slow", "rank": 9, "factor": "much", "steps": 0, "bit": 1}
    assert {fault.path for fault in faults_of(wrong, 4)} == {"rank", "factor", "steps", "bit"}


@given(
    kind=st.sampled_from(FaultKind),
    rank=st.integers(0, 3),
    step=st.integers(1, 10**9),
    phase=st.sampled_from(PHASES),
)
def test_a_possible_fault_survives_its_way_through_json(
    kind: FaultKind, rank: int, step: int, phase: str
) -> None:
    document: dict[str, object] = {"kind": kind.value}
    victim = KINDS[kind].victim
    if victim in (Victim.RANK, Victim.NODE):
        document["rank"] = rank
    if victim is Victim.RANK:
        document |= {"at_step": step, "phase": phase}
    assert faults_of(document, 4) == []
    fault = Injection.of(json.loads(json.dumps(document)))
    assert fault.document() == document and Injection.of(fault.document()) == fault


# --- when one is due ------------------------------------------------------------------------------


def reached(points: FaultPoints, at: str, step: int | None = None, micro_batch: int = 0) -> bool:
    """Whether a planned `raise` fired at this point."""
    try:
        points.reach(at, step, micro_batch)
    except InjectedError:
        return True
    return False


def test_an_order_fires_once_at_its_step_and_phase_and_is_told_before() -> None:
    points, told = FaultPoints(None), []
    points.arm(Injection(FaultKind.RAISE, at_step=3, phase="backward"), lambda: told.append(1))
    steps = [(point, step) for step in (2, 3, 3) for point in ("forward", "backward")]
    assert [one for one in steps if reached(points, *one)] == [("backward", 3)]
    assert told == [1]
    assert not points._active  # a point is one comparison again


def test_an_order_for_a_micro_batch_meets_that_one() -> None:
    points = FaultPoints(None)
    points.arm(Injection(FaultKind.RAISE, at_step=5, micro_batch=1), lambda: None)
    seen = [
        (step, index)
        for step in (4, 5)
        for index in range(3)
        if reached(points, "forward", step, index)
    ]
    assert seen == [(5, 1)]


def test_a_plan_may_name_every_kind(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"point": "agree", "rank": 1, "step": 2, "action": "raise"}]))
    points = FaultPoints(plan)
    points.rank = 1
    assert [reached(points, "agree", step) for step in (1, 2, 2)] == [False, True, False]
    assert (tmp_path / "plan.json.0.0").exists()


def test_a_slow_rank_takes_so_many_times_as_long_for_as_many_steps() -> None:
    points = FaultPoints(None)
    points.arm(Injection(FaultKind.SLOW, factor=3.0, steps=2), lambda: None)

    def work(step: int) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.thread_time()
        points.reach("forward", step)
        while time.thread_time() < cpu + 0.03:
            pass
        points.reach("backward", step)
        return time.perf_counter() - wall, time.thread_time() - cpu

    ratios = [wall / cpu for wall, cpu in map(work, (1, 2, 3))]
    assert min(ratios[:2]) > 2.5
    assert not points._active


# --- that a process does it -----------------------------------------------------------------------


def doing(fault: Injection) -> subprocess.Popen[str]:
    """A process that carries the fault out in its main thread, while another thread counts."""
    program = (
        "import json, sys, threading, time\n"
        "from holdfast_workers.fault_injection.kinds import Injection, carry_out\n"
        "def count():\n"
        "    while True:\n"
        "        print('alive', flush=True); time.sleep(0.02)\n"
        "threading.Thread(target=count, daemon=True).start()\n"
        "carry_out(Injection.of(json.loads(sys.argv[1])), 'here')\n"
        "print('survived', flush=True)\n"
    )
    arguments = [sys.executable, "-c", program, json.dumps(fault.document())]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.parametrize(
    ("fault", "ending"),
    [
        (Injection(FaultKind.KILL), -signal.SIGKILL),
        (Injection(FaultKind.SEGFAULT), -signal.SIGSEGV),
        (Injection(FaultKind.ABORT), -signal.SIGABRT),
        (Injection(FaultKind.EXIT, exit_code=7), 7),
        (Injection(FaultKind.RAISE), 1),
        (Injection(FaultKind.OOM), -signal.SIGKILL),
        (Injection(FaultKind.OOM, outcome="error"), 1),
    ],
    ids=str,
)
def test_a_process_ends_as_it_was_told(fault: Injection, ending: int) -> None:
    process = doing(fault)
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == ending
    assert f"injected fault: {fault}" in said and "survived" not in said


@pytest.mark.parametrize(
    ("kind", "others_live"),
    [("gil", False), ("loop", True), ("read", True), ("collective", True)],
)
def test_a_hang_holds_its_thread_and_the_lock_only_if_it_should(
    kind: str, others_live: bool
) -> None:
    process = doing(Injection(FaultKind(kind), duration_s=0.5))
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    during = said.partition("injected fault")[2].partition("survived")[0]
    assert (during.count("alive") > 5) is others_live


def test_a_stopped_process_stands_still() -> None:
    process = doing(Injection(FaultKind.STOP))
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
    finally:
        process.kill()
        process.wait(WAIT_S)
        assert process.stdout is not None
        process.stdout.close()


# --- the remote tier ------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "reads"), [("remote_down", False), ("disk_full", True)])
def test_a_storage_fails_as_told_and_until_then(tmp_path: Path, kind: str, reads: bool) -> None:
    told = tmp_path / "fault.json"
    real = open_storage(str(tmp_path / "remote"))
    real.put_new("there", b"before")
    assert failing_as_told(real, told) is real
    told.write_text(json.dumps({"kind": kind, "until": time.time() + 100}))
    failing = failing_as_told(real, told).below("deeper")
    with pytest.raises(StorageUnavailable, match="injected"), failing.write("new"):
        pass
    with pytest.raises(StorageUnavailable, match="injected"):
        failing.put_new("new", b"")
    if reads:
        assert failing_as_told(real, told).read("there") == b"before"
    else:
        with pytest.raises(StorageUnavailable, match="does not answer"):
            failing.objects()
    assert real.below("deeper").objects() == {}
    FailingStorage(real, FaultKind(kind), time.time() - 1).put_new("after", b"")
    told.write_text(json.dumps({"kind": kind, "until": time.time() - 1}))
    assert failing_as_told(real, told) is real
