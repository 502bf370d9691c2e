"""The product's zygote and node agent with one rank on the device, without Ray and supervisor."""

from __future__ import annotations

import os
import queue
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TypeVar

from benchmarks.gpu_parts.figures import ForkFigures, KillFigures, Setting
from benchmarks.gpu_parts.training import training_spec
from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.node_agent import NodeAgent
from holdfast_workers.agent.reforming import Reform
from holdfast_workers.ipc import control_channel, linux_processes
from holdfast_workers.ipc.children import Child, ChildProcesses
from holdfast_workers.protocol.answers import AgentReport, Done, Refusal
from holdfast_workers.protocol.commands import (
    Command,
    Describe,
    Fence,
    Form,
    Query,
    Request,
)
from holdfast_workers.protocol.findings import messages_of
from holdfast_workers.protocol.messages import FormOrder, Place, Restore, Seat, Tier, WorkerState
from holdfast_workers.protocol.processes import PreflightJob, PreflightResult
from holdfast_workers.protocol.run_plan import RunPlan
from holdfast_workers.protocol.signals import FirstStep, Signal, WorkerExited, WorkerJoined
from holdfast_workers.spec import RankResources

VISIBLE = "CUDA_VISIBLE_DEVICES"
FORKS = 3
FAULTS = 3
STEPS_BEFORE = 4
"""Steps of an attempt before its rank is killed."""
WAIT_S = 60.0
POLL_S = 0.005
ENDLESS = 1_000_000
MODEL = {"dim": 512, "layers": 8, "heads": 8, "sequence_length": 256}
SMALL_MODEL = {"dim": 64, "layers": 2, "heads": 4, "sequence_length": 64}
Expected = TypeVar("Expected")


class PromiseBroken(Exception):
    """What a part promises was not seen; says what was."""


def fork(setting: Setting) -> ForkFigures:
    """Raises PromiseBroken if a process cannot use the device, or its arithmetic is wrong."""
    linux_processes.become_subreaper()
    config = _agent_config(setting, "fork")
    processes = ChildProcesses(
        config.zygote_config, config.plan.zygote_start_timeout_s, config.fork_timeout_s
    )
    began = time.monotonic()
    processes.start()
    started_s = time.monotonic() - began
    try:
        checks = [_check(processes, setting) for _ in range(FORKS)]
        loaded, files = _driver_loaded(processes.pid or 0), _device_files(processes.pid or 0)
    finally:
        processes.stop()
    return ForkFigures(
        zygote_start_s=round(started_s, 3),
        fork_s=round(median(forked for forked, _, _ in checks), 4),
        checked_s=round(median(checked for _, checked, _ in checks), 3),
        zygote_loaded_driver=loaded,
        zygote_device_files=files,
        memory_gb_per_s=checks[-1][2],
    )


def kill(setting: Setting) -> KillFigures:
    """Raises PromiseBroken if a recovery does not end, or goes on from another step than that in
    memory."""
    agent = SingleAgent(_agent_config(setting, "kill"))
    try:
        agent.start()
        recoveries = [agent.kill_and_recover(attempt) for attempt in range(2, 2 + FAULTS)]
        state = max(held.nbytes for held in agent.report().held)
    finally:
        agent.release()
    detected, formed, stepped, lost = zip(*recoveries, strict=True)
    return KillFigures(
        faults=FAULTS,
        detected_s=round(median(detected), 4),
        formed_s=round(median(formed), 4),
        first_step_s=round(median(stepped), 4),
        steps_lost=sum(lost),
        state_bytes=state,
    )


class SingleAgent:
    """A node agent in this process, commanded directly, with a world of one rank."""

    def __init__(self, config: AgentConfig) -> None:
        self._signals: queue.SimpleQueue[Signal] = queue.SimpleQueue()
        self._agent = NodeAgent(config, self._signals.put)

    def start(self) -> None:
        """Start it, and train from the seed in attempt 1."""
        self._agent.start()
        self._await_report(lambda report: report.ready)
        self._form(1)
        self._train(1, STEPS_BEFORE)

    def report(self) -> AgentReport:
        return self._ask(Describe(), AgentReport)

    def kill_and_recover(self, attempt: int) -> tuple[float, float, float, int]:
        """Kill the rank of the last attempt and form `attempt` from memory: seconds until the death
        was noticed, the worker held its state, and its first step; and the number of lost steps."""
        (worker,) = (each for each in self.report().workers if each.rank is not None)
        while not self._signals.empty():
            self._signals.get()
        killed_at = time.time()
        os.kill(worker.pid, signal.SIGKILL)
        exited = self._await_signal(WorkerExited, attempt - 1)
        held = self._form(attempt)
        joined = self._await_signal(WorkerJoined, attempt)
        first = self._await_signal(FirstStep, attempt)
        if not isinstance(first.detail, FirstStep) or first.detail.step != held + 1:
            raise PromiseBroken(f"restored step {held}, and the first new one is {first}")
        self._train(attempt, held + STEPS_BEFORE)
        times = (exited.at - killed_at, joined.at - killed_at, first.detail.at - killed_at)
        return *times, max(held, worker.step) - held

    def release(self) -> None:
        self._agent.release()

    def _form(self, attempt: int) -> int:
        """Fence, and form a world of one new worker from the newest state in memory, if there is
        one; returns its step."""
        report = self._ask(Fence("n0", attempt), AgentReport)
        restore = Restore(Tier.INIT, 0)
        if states := [each for each in report.held if each.rank == 0]:
            held = max(states, key=lambda each: each.step)
            restore = Restore(
                Tier.OWN_RAM,
                held.step,
                held.attempt,
                held.digest,
                agent="n0",
                place=Place.OWN,
                host=report.host,
                data_port=report.data_port,
            )
        mesh, seat = {"dp_shard": 1, "tp": 1}, Seat(0, None, restore)
        order = FormOrder(attempt, mesh, 1, "127.0.0.1", report.store_port, (seat,))
        self._ask(Form("n0", order), Done)
        return restore.step

    def _train(self, attempt: int, step: int) -> None:
        """Wait until the attempt's rank has made `step`."""
        self._await_report(
            lambda found: any(
                each.attempt == attempt and each.step >= step and each.state is WorkerState.TRAINING
                for each in found.workers
            )
        )

    def _await_report(self, condition: Callable[[AgentReport], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition(report := self.report()):
            failed = [each.failure.error for each in report.workers if each.failure is not None]
            if failed or report.failure or time.monotonic() >= deadline:
                raise PromiseBroken(f"{failed or report.failure or 'not in time'}: {report}")
            time.sleep(POLL_S)

    def _await_signal(self, kind: type[object], attempt: int) -> Signal:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                found = self._signals.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise PromiseBroken(f"no {kind.__name__} of attempt {attempt}") from None
            if isinstance(found.detail, kind) and found.attempt == attempt:
                return found

    def _ask(self, command: Command | Query, answer: type[Expected]) -> Expected:
        found = self._agent.answer(Request(command, 1))
        if isinstance(found, Refusal) or not isinstance(found, answer):
            raise PromiseBroken(f"{command.kind} was answered by {found}")
        return found


def _agent_config(setting: Setting, part: str) -> AgentConfig:
    if setting.on_device:
        os.environ.setdefault(VISIBLE, "0")
    model = SMALL_MODEL if setting.small else MODEL
    memory = {"memory": {"every_steps": 1, "copies": 0}, "remote": {"every_steps": 0}}
    spec = training_spec(setting, model, 4, ENDLESS, checkpoint=memory)
    return AgentConfig(
        plan=RunPlan(
            job_id="gpu",
            spec=spec,
            remote_root=str(setting.folder / "remote"),
            resources=RankResources(gpus_per_worker=1 if setting.on_device else 0),
        ),
        agent="n0",
        node_id="node",
        host="127.0.0.1",
        secret=os.urandom(32),
        memory_root=str(setting.memory / part),
        cache_dir=str(setting.folder / "corpus"),
        spares=0,
        reform=Reform.FORK,
        env={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )


def _check(processes: ChildProcesses, setting: Setting) -> tuple[float, float, dict[str, float]]:
    """Seconds of the fork, and of the whole check; and the speeds that the check measured."""
    began = time.monotonic()
    child = processes.fork("check", PreflightJob(setting.on_device, 0.0))
    forked_s = time.monotonic() - began
    try:
        child.end.settimeout(WAIT_S)
        result = control_channel.receive(child.end, PreflightResult)
    finally:
        _end(child)
    wrong = [finding.what for finding in result.findings]
    if messages_of(result.findings) or setting.device not in result.measured:
        raise PromiseBroken(f"{wrong or 'no device'}: {result.measured}")
    return forked_s, time.monotonic() - began, dict(result.measured)


def _end(child: Child) -> None:
    child.kill()
    select.select([child.pidfd], [], [], WAIT_S)
    child.reap()
    child.close()


def _driver_loaded(pid: int) -> bool:
    """Whether a process has loaded the library without which there is no context."""
    return "libcuda.so" in Path(f"/proc/{pid}/maps").read_text()


def _device_files(pid: int) -> int:
    """Device files that a process holds open."""
    links = (str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir())
    return sum(link.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")) for link in links)
