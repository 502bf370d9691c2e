"""Fault injection: invalid requests, the points where faults fire, and their real effects."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import TransientStorageError
from holdfast_workers.fault_injection.failing_storage import FailingStorage, with_injected_failures
from holdfast_workers.fault_injection.fault_points import FaultPoints
from holdfast_workers.fault_injection.kinds import (
    FaultKind,
    FaultParameter,
    Injection,
    injection_faults,
    program_faults,
)
from holdfast_workers.fault_injection.process_faults import InjectedError

WAIT_S = 60.0
WORLD_SIZE = 4
FIELDS = {field.name for field in fields(Injection)} - {"kind"}
SIGNALS = {kind: number for kind in FaultKind if (number := kind.spec.signal) is not None}


# --- invalid requests -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"kind": "earthquake"}, "kind"),
        ({}, "kind"),
        ({"kind": "kill", "rank": 4}, "rank"),
        ({"kind": "kill", "rank": True}, "rank"),
        ({"kind": "kill", "phase": "lunch"}, "phase"),
        ({"kind": "kill", "at_step": 0}, "at_step"),
        ({"kind": "kill", "weight": 3}, "weight"),
        ({"kind": "nan", "where": "moment"}, "where"),
    ],
)
def test_an_impossible_fault_is_named_at_its_path(document: dict[str, object], path: str) -> None:
    assert [fault.path for fault in injection_faults(document, WORLD_SIZE)] == [path]


@pytest.mark.parametrize("kind", FaultKind)
def test_a_kind_takes_its_own_parameters_only_and_within_their_limits(kind: FaultKind) -> None:
    parameters = {parameter.name: parameter for parameter in kind.spec.parameters}
    refused: dict[str, list[object]] = {name: [1] for name in FIELDS - parameters.keys()}
    refused |= {name: not_allowed(parameter) for name, parameter in parameters.items()}
    assert refused.keys() == FIELDS, "each parameter is a field of Injection"
    for name, values in refused.items():
        for value in values:
            found = injection_faults({"kind": kind, name: value}, WORLD_SIZE)
            assert [fault.path for fault in found] == [name], value


def not_allowed(parameter: FaultParameter) -> list[object]:
    least, most = parameter.limits or (0, 0)
    return [True, [], "", "x" * 201] + [least - 1, most + 1] * (parameter.limits is not None)


def test_every_fault_of_a_request_is_named() -> None:
    wrong = {"kind": "slow", "rank": 9, "factor": "much", "steps": 0, "bit": 1}
    assert {fault.path for fault in injection_faults(wrong, WORLD_SIZE)} == {
        "rank",
        "factor",
        "steps",
        "bit",
    }


def allowed(parameter: FaultParameter) -> st.SearchStrategy[object]:
    if parameter.words:
        return st.sampled_from(parameter.words)
    if parameter.limits is None:
        return st.text(min_size=1, max_size=200)
    least, most = parameter.limits
    if parameter.name == "rank":
        most = WORLD_SIZE - 1
    return st.integers(int(least), int(most)) if isinstance(least, int) else st.floats(least, most)


def requests(kind: FaultKind) -> st.SearchStrategy[dict[str, object]]:
    values = {parameter.name: allowed(parameter) for parameter in kind.spec.parameters}
    return st.fixed_dictionaries({"kind": st.just(kind.value)}, optional=values)


@given(st.sampled_from(FaultKind).flatmap(requests))
def test_a_valid_fault_survives_json(document: dict[str, object]) -> None:
    assert injection_faults(document, WORLD_SIZE) == []
    fault = Injection.of(json.loads(json.dumps(document)))
    assert fault.document() == document and Injection.of(fault.document()) == fault


# --- when a fault is due --------------------------------------------------------------------------


def reached(points: FaultPoints, at: str, step: int | None = None, micro_batch: int = 0) -> bool:
    """Whether a planned `raise` fired at this point."""
    try:
        points.reach(at, step, micro_batch)
    except InjectedError:
        return True
    return False


def test_an_order_fires_once_at_its_step_and_phase_and_is_reported_before() -> None:
    points, reports = FaultPoints(None), []
    points.arm(Injection(FaultKind.RAISE, at_step=3, phase="backward"), lambda: reports.append(1))
    steps = [(point, step) for step in (2, 3, 3) for point in ("forward", "backward")]
    assert [place for place in steps if reached(points, *place)] == [("backward", 3)]
    assert reports == [1]
    assert not points._active  # a point is one comparison again


def test_an_order_for_a_micro_batch_fires_only_there() -> None:
    points = FaultPoints(None)
    points.arm(Injection(FaultKind.RAISE, at_step=5, micro_batch=1), lambda: None)
    fired = [
        (step, index)
        for step in (4, 5)
        for index in range(3)
        if reached(points, "forward", step, index)
    ]
    assert fired == [(5, 1)]


def test_a_plan_entry_fires_once_at_its_step_and_rank(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"point": "agree", "rank": 1, "step": 2, "action": "raise"}]))
    points = FaultPoints(plan)
    points.rank = 1
    assert [reached(points, "agree", step) for step in (1, 2, 2)] == [False, True, False]
    assert (tmp_path / "plan.json.0.0").exists()


def test_a_slow_rank_takes_factor_times_as_long_for_the_given_steps() -> None:
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


# --- effects on a process -------------------------------------------------------------------------


def doing(fault: Injection) -> subprocess.Popen[str]:
    """A process that executes the fault in its main thread, while another thread counts."""
    program = (
        "import json, sys, threading, time\n"
        "from holdfast_workers.fault_injection.kinds import Injection\n"
        "from holdfast_workers.fault_injection.process_faults import carry_out\n"
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
        (Injection(FaultKind.EXIT, exit_code=7), 7),
        (Injection(FaultKind.RAISE), 1),
        (Injection(FaultKind.OOM), -signal.SIGKILL),
        (Injection(FaultKind.OOM, outcome="error"), 1),
    ],
    ids=str,
)
def test_a_process_ends_as_the_fault_requests(fault: Injection, ending: int) -> None:
    process = doing(fault)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == ending
    assert f"injected fault: {fault}" in output and "survived" not in output


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("kind", "others_live"),
    [("gil", False), ("loop", True), ("read", True), ("collective", True)],
)
def test_a_hang_blocks_its_thread_and_holds_the_gil_only_if_requested(
    kind: str, others_live: bool
) -> None:
    process = doing(Injection(FaultKind(kind), duration_s=2.0 if others_live else 0.5))
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    during = output.partition("injected fault")[2].partition("survived")[0]
    assert (during.count("alive") > 5) is others_live


@pytest.mark.parametrize("kind", SIGNALS)
def test_a_process_gets_the_signal_of_its_fault(kind: FaultKind) -> None:
    process = doing(Injection(kind))
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status) is (SIGNALS[kind] == signal.SIGSTOP)
        received = os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.WTERMSIG(status)
        assert received == SIGNALS[kind]
    finally:
        process.kill()
        process.wait(WAIT_S)
        assert process.stdout is not None
        process.stdout.close()


# --- the remote tier ------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "reads"), [("remote_down", False), ("disk_full", True)])
def test_a_storage_fails_as_requested_until_the_given_time(
    tmp_path: Path, kind: str, reads: bool
) -> None:
    request = tmp_path / "fault.json"
    real = open_storage(str(tmp_path / "remote"))
    real.put_new("there", b"before")
    assert with_injected_failures(real, request) is real
    request.write_text(json.dumps({"kind": kind, "until": time.time() + 100}))
    failing = with_injected_failures(real, request).below("deeper")
    with pytest.raises(TransientStorageError, match="injected"), failing.write("new"):
        pass
    with pytest.raises(TransientStorageError, match="injected"):
        failing.put_new("new", b"")
    if reads:
        assert with_injected_failures(real, request).read("there") == b"before"
    else:
        with pytest.raises(TransientStorageError, match="does not answer"):
            failing.objects()
    assert real.below("deeper").objects() == {}
    FailingStorage(real, FaultKind(kind), time.time() - 1).put_new("after", b"")
    request.write_text(json.dumps({"kind": kind, "until": time.time() - 1}))
    assert with_injected_failures(real, request) is real


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"kind": "nan"}, "kind"),
        ({"kind": "collective"}, "kind"),
        ({"kind": "kill", "at_step": 3}, "at_step"),
        ({"kind": "stop", "phase": "forward"}, "phase"),
        ({"kind": "kill"}, None),
        ({"kind": "stop", "rank": 1}, None),
        ({"kind": "node_loss"}, None),
    ],
)
def test_a_program_of_the_user_gets_only_faults_that_need_none_of_our_code(
    document: dict[str, str | int], path: str | None
) -> None:
    found = program_faults(Injection.of(document))
    assert [fault.path for fault in found] == ([path] if path else [])
