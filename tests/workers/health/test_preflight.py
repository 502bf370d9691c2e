"""The check of a node before its first use: it passes a correct node and fails a faulty one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.nodes.agent_config import agent_config
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_workers.agent import node_health
from holdfast_workers.agent.node_health import NodeHealth
from holdfast_workers.agent.signal_sender import SignalSender
from holdfast_workers.health import preflight
from holdfast_workers.ipc import control_channel
from holdfast_workers.ipc.children import ZygoteFailed
from holdfast_workers.protocol.findings import HealthReport, Level
from holdfast_workers.protocol.node_needs import NodeNeeds
from holdfast_workers.protocol.processes import PreflightJob, PreflightResult
from holdfast_workers.protocol.signals import NodeUnwell, Signal


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_this_machine_computes_the_known_product_and_its_memory_is_measured() -> None:
    found, copied = preflight.check("cpu", 0.0)
    assert found == [] and copied > 0.1
    product = preflight.expected()
    assert preflight.digest_of(product) == preflight.KNOWN_DIGEST
    by_hand = sum(
        ((3 * 7 + k * 13) % 31 - 15) * ((k * 11 + 5 * 5) % 29 - 14) for k in range(preflight.INNER)
    )
    assert int(product[3, 5]) == by_hand
    assert len(set(product.flatten().tolist())) > 300, (
        "a product of equal elements would hide errors"
    )


def test_a_single_wrong_element_makes_a_node_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.Tensor.__matmul__
    calls = 0

    def sometimes_wrong(left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        product = right(left, other)
        if calls == 5:  # the second product in float32
            product[7, 9] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", sometimes_wrong)
    (found,), _ = preflight.check("cpu", 0.0)
    assert (found.kind, found.level) == ("arithmetic", Level.UNFIT)
    assert "1 numbers of a product" in found.what


def test_a_wrong_product_of_whole_numbers_is_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "KNOWN_DIGEST", "other")
    (found,), _ = preflight.check("cpu", 0.0)
    assert "whole numbers" in found.what


def test_memory_slower_than_the_minimum_makes_a_node_unfit() -> None:
    (found,), copied = preflight.check("cpu", 1e6)
    assert (found.kind, found.level) == ("memory_speed", Level.UNFIT)
    assert f"{copied:.1f} GB/s" in found.what


def test_a_check_sends_its_result_to_the_agent() -> None:
    ours, theirs = control_channel.pair()
    job = PreflightJob(devices=False, memory_floor_gb_per_s=1e6)
    assert preflight.run(theirs, job) == 0
    checked = control_channel.receive(ours, PreflightResult)
    assert [finding.kind for finding in checked.findings] == ["memory_speed"]
    assert set(checked.measured) == {"cpu"}
    ours.close()
    assert preflight.run(theirs, job) == 0, "the agent no longer waits for the result"


class FakeZygote:
    """Forks no process: `answer` returns the result of the check, or raises its failure."""

    def __init__(self, answer: Callable[[], PreflightResult]) -> None:
        self.answer = answer
        self.jobs: list[PreflightJob] = []

    def fork(self, name: str, job: PreflightJob) -> str:
        self.jobs.append(job)
        return name

    def await_answer(self, child: str, timeout_s: float) -> PreflightResult:
        assert timeout_s == 30.0
        return self.answer()


def fails(error: Exception) -> Callable[[], PreflightResult]:
    def answer() -> PreflightResult:
        raise error

    return answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (fails(TimeoutError()), "was not completed within 30 s"),
        (fails(ChildProcessError("preflight-1 failed: SIGSEGV")), "failed: preflight-1"),
        (fails(ZygoteFailed("it is gone")), "failed: it is gone"),
    ],
)
def test_an_unfinished_check_makes_a_node_unfit_until_a_later_check_succeeds(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    answer: Callable[[], PreflightResult],
    message: str,
) -> None:
    config = agent_config(tmp_path)
    monkeypatch.setattr(node_health, "PAUSE_S", 0.2)
    sent: list[Signal] = []
    zygote: Any = FakeZygote(answer)
    health = NodeHealth(config, zygote, SignalSender("n0", "i", sent.append), lambda: 3, lambda: 0)
    health.check(zygote)
    (finding,) = health.report().findings
    assert (finding.kind, finding.level) == ("unfinished", Level.UNFIT)
    assert message in finding.what
    zygote.answer = lambda: PreflightResult((), {"cpu": 9.0})
    again = health._again
    assert again is not None
    again.join(DEADLINE_S)
    report = health.report()
    assert (report.findings, report.measured, report.number) == ((), {"cpu": 9.0}, 2)
    first, second = (signal.detail for signal in sent)
    assert first == NodeUnwell(HealthReport(1, (finding,)))
    assert second == NodeUnwell(report)
    assert zygote.jobs[0] == PreflightJob(devices=False, memory_floor_gb_per_s=0.0)


def test_a_room_that_cannot_be_measured_for_a_while_is_looked_up_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(node_health, "PAUSE_S", 0.05)
    folder = tmp_path / "job" / "n0"
    folder.mkdir(parents=True)
    config = agent_config(tmp_path, memory_root=str(folder), needs=NodeNeeds(shm_bytes=2**60))
    zygote: Any = FakeZygote(lambda: PreflightResult((), {}))
    signals = SignalSender("n0", "i", lambda _: None)
    health = NodeHealth(config, zygote, signals, lambda: 3, lambda: 0)
    health.check(zygote)
    assert [finding.kind for finding in health.report().findings] == ["shm"]
    folder.parent.rename(tmp_path / "away")
    failed = health._again
    assert failed is not None
    failed.join(DEADLINE_S)
    eventually(lambda: health._again is not failed)
    (tmp_path / "away").rename(folder.parent)
    health._config = agent_config(tmp_path, memory_root=str(folder))
    eventually(lambda: health.report().findings == ())
    health.stop()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device_computes_the_known_product() -> None:
    for device in preflight.devices(with_accelerators=True):
        found, copied = preflight.check(device, 0.0)
        assert found == [] and copied > 1.0
