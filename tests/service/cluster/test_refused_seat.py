"""A node that cannot run an agent answers in its place, and names itself and what it lacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast_service.cluster import agent_actor, code_by_value
from holdfast_service.cluster.code_by_value import own_versions
from holdfast_service.cluster.refused_seat import answer_of, requirement_of
from holdfast_workers import build
from holdfast_workers.protocol import commands
from holdfast_workers.protocol.answers import AgentReport, RequestRefused
from holdfast_workers.protocol.commands import Request
from holdfast_workers.protocol.findings import Level

MISSING = "ModuleNotFoundError: No module named 'holdfast_service'"
REFUSAL = {
    "error": MISSING,
    "versions": own_versions(),
    "node_id": "f" * 56,
    "host": "10.0.0.7",
    "pid": 12,
    "incarnation": "12-1.5",
    "lacks_software": True,
}


def answer(command: Any, **changes: Any) -> AgentReport:
    return answer_of("n1", Request(command, 4), {**REFUSAL, **changes}, sends_code=False)


def test_hello_gets_a_report_without_capacity_whose_finding_keeps_ranks_away() -> None:
    report = answer(commands.Hello())
    assert (report.agent, report.host, report.ready, report.capacity) == (
        "n1",
        "10.0.0.7",
        False,
        0,
    )
    assert (report.epoch, report.attempt, report.data_port) == (4, 0, 0)
    assert report.build == build.LOADED, "an upgrade is not what is wrong"
    (finding,) = report.health.findings
    assert (finding.probe, finding.level, finding.lost) == ("software", Level.UNFIT, True)
    assert "10.0.0.7 (node ffffffffffff): Holdfast is not installed" in finding.what
    assert "--send-own-code" in finding.what


def test_a_fence_is_answered_for_its_attempt_because_nothing_runs_there() -> None:
    assert answer(commands.Fence("n1", 3)).attempt == 3


@pytest.mark.parametrize("command", [commands.WarmUp("n1", 3), commands.Poll()])
def test_work_is_refused_with_the_reason(command: Any) -> None:
    with pytest.raises(RequestRefused, match=r"10\.0\.0\.7 .* not installed"):
        answer(command)


def test_another_version_counts_before_what_may_follow_from_it() -> None:
    other = {**own_versions(), "python": "3.99"}
    (finding,) = answer(commands.Hello(), versions=other).health.findings
    assert (finding.kind, "Python 3.99" in finding.what) == ("python", True)


def test_an_error_that_is_no_import_is_shown_as_it_is() -> None:
    (finding,) = answer(commands.Hello(), error="OSError: libtorch.so").health.findings
    assert (finding.kind, "OSError: libtorch.so" in finding.what) == ("agent", True)


def test_an_agent_that_fails_with_its_software_there_is_no_fault_of_the_node() -> None:
    report = answer(commands.Hello(), error="OSError: disk", lacks_software=False)
    assert report.health.findings == ()
    assert report.failure is not None
    assert "10.0.0.7 (node ffffffffffff): its agent cannot start (OSError: disk)" in (
        report.failure.message
    )


@pytest.mark.parametrize(
    ("fault", "lacks_software"),
    [(OSError("disk"), False), (RuntimeError("no"), False), (ImportError("no"), True)],
)
def test_only_what_cannot_be_imported_counts_as_missing_software(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, lacks_software: bool
) -> None:
    def fails(document: bytes) -> None:
        raise fault

    refusals = []
    monkeypatch.setattr(agent_actor, "AgentActor", fails)
    monkeypatch.setattr(
        code_by_value.StartedAgent, "_refuse", lambda _, *refusal: refusals.append(refusal)
    )
    code_by_value.StartedAgent(b"", own_versions())
    code_by_value.StartedAgent(b"", {**own_versions(), "python": "3.99"})
    error = f"{type(fault).__name__}: {fault}"
    assert refusals == [(own_versions(), error, lacks_software), (own_versions(), "", True)]


@pytest.mark.slow
def test_a_module_is_known_by_the_package_that_has_it() -> None:
    assert requirement_of("structlog").startswith("structlog==")
    assert requirement_of("no_such_module") == ""


def test_what_is_installed_is_not_looked_up_for_every_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_up = []

    def packages() -> dict[str, list[str]]:
        looked_up.append(True)
        return {}

    monkeypatch.setattr("importlib.metadata.packages_distributions", packages)
    lacking = "ModuleNotFoundError: No module named 'some_module_of_this_test'"
    first, second = (answer(commands.Hello(), error=lacking) for _ in range(2))
    assert first == second and len(looked_up) == 1


def test_the_class_of_an_agent_is_read_without_holdfast() -> None:
    """Ray reads it by value: its module imports nothing that a node may lack."""
    source = Path(code_by_value.__file__).read_text()
    program = (
        "import pickle, sys\n"
        "made = pickle.load(sys.stdin.buffer)\n"
        "assert not any(name.startswith('holdfast') for name in sys.modules), 'imported'\n"
        "print(made.__name__)"
    )
    import ray  # late: it takes a second

    ray.cloudpickle.register_pickle_by_value(code_by_value)
    ran = subprocess.run(
        [sys.executable, "-c", program],
        input=ray.cloudpickle.dumps(code_by_value.StartedAgent),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode() + source
    assert ran.stdout == b"StartedAgent\n"
