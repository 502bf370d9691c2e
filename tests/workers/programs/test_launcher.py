"""A launcher obeys its agent whatever the program does, and also while the agent does not read."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
from tests.support.nodes.agent_config import agent_config, join_order
from tests.support.waiting import eventually

from holdfast_workers.ipc import control_channel, linux_processes
from holdfast_workers.programs.launcher import Launcher
from holdfast_workers.progress import beacon
from holdfast_workers.progress.beacon import Beacon
from holdfast_workers.protocol.lease import clock_s
from holdfast_workers.protocol.messages import ErrorKind, ErrorReport, StepRow
from holdfast_workers.protocol.processes import (
    ArmFault,
    AttemptsLeft,
    FaultFired,
    JoinAttempt,
    LeaseUpdate,
    LeaveAttempts,
    ProgramStarted,
    StepReport,
    StopAfterStep,
    WorkerJob,
    WorkerMessage,
    WorkerSignal,
)
from holdfast_workers.protocol.signals import WorkerDone, WorkerFailed
from holdfast_workers.spec import ProgramSpec, TrainingSpec

WAIT_S = 60.0


class Agent:
    """The agent's side of one launcher."""

    def __init__(self, folder: Path, program: ProgramSpec, **line: str) -> None:
        """`line`: `command` or `script`."""
        self._folder = folder
        spec = TrainingSpec.model_validate({**line, "program": program})
        beacon.create(folder / "beacon")
        self.store = socket.create_server(("127.0.0.1", 0))
        self.store.settimeout(WAIT_S)
        self.store_port: int = self.store.getsockname()[1]
        self.end, theirs = control_channel.pair()
        self.end.settimeout(WAIT_S)
        self.log, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self.end.close()
            self.store.close()
            os.close(self.log)
            os.setsid()
            os.dup2(writer, 1)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  (of a descriptor)
            os._exit(_run(theirs, folder, spec))
        theirs.close()
        os.close(writer)

    def send(self, *orders: JoinAttempt | LeaveAttempts | LeaseUpdate | StopAfterStep) -> None:
        for order in orders:
            control_channel.send(self.end, order)

    def receive(self) -> WorkerMessage:
        return control_channel.receive(self.end, *WorkerJob.answers)

    def receive_all(self, for_s: float) -> list[WorkerMessage]:
        """The messages that come within this time."""
        found: list[WorkerMessage] = []
        deadline = time.monotonic() + for_s
        while (left_s := deadline - time.monotonic()) > 0:
            self.end.settimeout(left_s)
            try:
                found.append(self.receive())
            except TimeoutError:
                break
        self.end.settimeout(WAIT_S)
        return found

    def join(self, *faults: ArmFault, attempt: int = 1) -> JoinAttempt:
        # A program without memory checkpoints has no folder of segments.
        mesh, segment = {"dp_shard": 1, "tp": 1}, self._folder / "none" / "own-0.seg"
        order = join_order(
            segment, mesh=mesh, store_port=self.store_port, leased=True, attempt=attempt
        )
        return JoinAttempt(order, faults)

    def started(self) -> int:
        """The process of the program, once it is started."""
        while not isinstance(message := self.receive(), ProgramStarted):
            pass
        return message.pid

    def row(self) -> StepRow:
        """The next step that the launcher reports."""
        while not isinstance(message := self.receive(), StepReport):
            pass
        return message.row

    def printed(self, text: str) -> str:
        """Read the output until it contains this text; returns what was read."""
        read = ""
        while text not in read:
            assert select.select([self.log], [], [], WAIT_S)[0], read
            piece = os.read(self.log, 1 << 16).decode()
            assert piece, read
            read += piece
        return read

    def stepped(self) -> tuple[int, float]:
        """The next step that the launcher reports, and its loss."""
        while not isinstance(message := self.receive(), StepReport):
            pass
        return message.row.step, message.row.loss

    def ended(self) -> WorkerDone | WorkerFailed:
        """How the program ended, as the launcher reports it."""
        while True:
            detail = getattr(self.receive(), "detail", None)
            if isinstance(detail, WorkerDone | WorkerFailed):
                return detail

    def failed(self) -> ErrorReport:
        """The error that the launcher reports."""
        while True:
            message = self.receive()
            if isinstance(message, WorkerSignal) and isinstance(message.detail, WorkerFailed):
                return message.detail.error

    def close(self) -> None:
        self.end.close()
        self.store.close()
        os.close(self.log)
        deadline = time.monotonic() + WAIT_S
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            assert time.monotonic() < deadline, "the launcher outlives its agent"
            time.sleep(0.01)


def _run(end: socket.socket, folder: Path, spec: TrainingSpec) -> int:
    config = agent_config(folder, training=spec, mesh={"dp_shard": 1, "tp": 1}).zygote_config
    return Launcher(end, config, Beacon(folder / "beacon")).run()


@contextmanager
def launched(
    folder: Path, command: str, *, grace_s: float = 1.0, metrics: str | None = None
) -> Iterator[Agent]:
    with launching(folder, ProgramSpec(grace_s=grace_s, metrics=metrics), command=command) as agent:
        yield agent


@contextmanager
def launching(folder: Path, program: ProgramSpec, **line: str) -> Iterator[Agent]:
    agent = Agent(folder, program, **line)
    try:
        yield agent
    finally:
        agent.close()


def lease(for_s: float, number: int = 1) -> LeaseUpdate:
    return LeaseUpdate(1, clock_s() + for_s, number)


def pids(output: str) -> list[int]:
    """Those that were printed on lines of their own."""
    return [int(line) for line in output.splitlines() if line.isdigit()]


def wait_state(pid: int, states: Container[str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while (state := linux_processes.run_state(pid)) not in states:
        assert time.monotonic() < deadline, f"its state is {state!r}"
        time.sleep(0.01)


@pytest.mark.seconds
@pytest.mark.parametrize("output", ["0", "400000"])
def test_the_end_of_a_lease_stops_the_program_also_if_its_output_is_not_read(
    tmp_path: Path, output: str
) -> None:
    command = f"bash -c 'head -c {output} /dev/zero; while true; do :; done'"
    with launched(tmp_path, command) as agent:
        agent.send(agent.join(), lease(3600.0))
        pid = agent.started()
        agent.send(lease(1.0, 2))
        wait_state(pid, "T")
        agent.send(lease(3600.0, 3))
        wait_state(pid, "RS")


def test_all_output_arrives_however_late_it_is_read(tmp_path: Path) -> None:
    with launched(tmp_path, "head -c 400000 /dev/zero") as agent:
        agent.send(agent.join(), lease(3600.0))
        agent.started()
        time.sleep(0.3)
        received = 0
        while received < 400_000:
            received += os.read(agent.log, 1 << 16).count(b"\0")


def test_a_stop_before_the_first_lease_ends_the_attempt_and_starts_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, "sleep 1000") as agent:
        agent.send(agent.join(), StopAfterStep(1), lease(30.0))
        kinds = [
            type(message.detail) if isinstance(message, WorkerSignal) else type(message)
            for message in (agent.receive(), *agent.receive_all(0.5))
        ]
        assert kinds == [WorkerDone]


def test_a_program_that_has_failed_is_not_done_when_it_is_asked_to_stop(tmp_path: Path) -> None:
    with launched(tmp_path, "no-such-program") as agent:
        agent.send(agent.join(), lease(30.0))
        agent.started()
        while not isinstance(getattr(message := agent.receive(), "detail", None), WorkerFailed):
            assert not isinstance(message, AttemptsLeft)
        agent.send(StopAfterStep(1), LeaveAttempts(2))
        assert isinstance(agent.receive(), AttemptsLeft)


def test_a_fence_ends_a_program_that_ignores_sigterm_and_is_stopped(tmp_path: Path) -> None:
    command = "bash -c 'trap \"\" TERM; echo set; while true; do :; done'"
    with launched(tmp_path, command) as agent:
        agent.send(agent.join(), lease(600.0))
        pid = agent.started()
        agent.printed("\nset\n")
        os.kill(pid, signal.SIGSTOP)
        agent.send(LeaveAttempts(2))
        while not isinstance(agent.receive(), AttemptsLeft):
            pass
        assert not linux_processes.is_alive(pid)


def test_a_program_is_not_started_without_a_rendezvous_store(tmp_path: Path) -> None:
    with launched(tmp_path, "sleep 1000") as agent:
        agent.store.close()
        agent.send(agent.join(), lease(3600.0))
        error = agent.failed()
        assert error.kind is ErrorKind.COMMUNICATION
        assert f"no rendezvous store listens on 127.0.0.1:{agent.store_port}" in error.message
        assert linux_processes.descendants(agent.pid) == []
        agent.send(LeaveAttempts(2))
        assert isinstance(agent.receive(), AttemptsLeft)


def test_the_end_of_the_store_is_noticed_while_ranks_may_wait_for_it(tmp_path: Path) -> None:
    with launched(tmp_path, "sleep 1000") as agent:
        agent.send(agent.join(), lease(3600.0))
        link, _ = agent.store.accept()
        pid = agent.started()
        link.close()
        error = agent.failed()
        assert error.kind is ErrorKind.COMMUNICATION and "ended before the first step" in str(error)
        agent.send(LeaveAttempts(2))
        while not isinstance(agent.receive(), AttemptsLeft):
            pass
        assert not linux_processes.is_alive(pid)


def test_ranks_that_have_stepped_need_no_store(tmp_path: Path) -> None:
    command = "bash -c 'echo loss 1; until test -e ends; do sleep 0.01; done'"
    with launched(tmp_path, f"env -C {tmp_path} {command}", metrics="loss (?P<loss>.)") as agent:
        agent.send(agent.join(), lease(3600.0))
        link, _ = agent.store.accept()
        while not isinstance(agent.receive(), StepReport):
            pass
        link.close()
        (tmp_path / "ends").touch()
        ending = agent.receive()
        assert isinstance(ending, WorkerSignal) and ending.detail == WorkerDone(1)


ATTACHES = """
import holdfast

job = holdfast.attach()
print("loss 1", flush=True)
print("loss 2", flush=True)
input()
job.step(7, loss=7.5)
print("loss 3", flush=True)
input()
"""


@contextmanager
def attaching(folder: Path, program: str) -> Iterator[tuple[Agent, TextIO]]:
    """A started program, whose lines show losses, and what it reads: each line ends an `input`."""
    (folder / "attaches.py").write_text(program)
    os.mkfifo(folder / "go")
    command = f"bash -c '{sys.executable} attaches.py <>go'"
    with launched(folder, f"env -C {folder} {command}", metrics="loss (?P<loss>.)") as agent:
        agent.send(agent.join(), lease(3600.0))
        with (folder / "go").open("w") as go:
            yield agent, go


def assert_it_reports_its_steps_itself(agent: Agent, go: TextIO) -> None:
    """Its last line shows none."""
    agent.printed("loss 3")
    print(file=go, flush=True)
    go.close()
    while not isinstance(message := agent.receive(), WorkerSignal):
        assert not isinstance(message, StepReport), "the program reports its steps itself"


def test_lines_show_the_steps_of_an_attached_program_until_it_reports_one(tmp_path: Path) -> None:
    with attaching(tmp_path, ATTACHES) as (agent, go):
        assert [agent.stepped() for _ in range(2)] == [(1, 1.0), (2, 2.0)]
        print(file=go, flush=True)
        assert agent.stepped() == (7, 7.5)
        assert_it_reports_its_steps_itself(agent, go)


STEPS_AT_ONCE = """
import holdfast
from pathlib import Path

job = holdfast.attach()
print("loss 1", flush=True)
input()
print("loss 2", flush=True)
job.step(7, loss=7.5)
print("loss 3", flush=True)
Path("printed").touch()
input()
"""


def test_a_report_comes_before_the_lines_that_are_read_after_it(tmp_path: Path) -> None:
    with attaching(tmp_path, STEPS_AT_ONCE) as (agent, go):
        assert agent.stepped() == (1, 1.0)
        os.kill(agent.pid, signal.SIGSTOP)  # output and report come at once then
        print(file=go, flush=True)
        eventually((tmp_path / "printed").exists)
        os.kill(agent.pid, signal.SIGCONT)
        assert agent.stepped() == (7, 7.5)
        assert_it_reports_its_steps_itself(agent, go)


def test_time_without_a_lease_is_not_time_of_a_step(tmp_path: Path) -> None:
    loop = "for n in 1 2; do until test -e go-$n; do sleep 0.01; done; echo loss $n; done"
    command = f"bash -c '{loop}'"
    with launched(tmp_path, f"env -C {tmp_path} {command}", metrics="loss (?P<loss>.)") as agent:
        agent.send(agent.join(), lease(3600.0, 1))
        pid = agent.started()
        (tmp_path / "go-1").touch()
        first = agent.row()
        agent.send(lease(0.0, 2))
        wait_state(pid, "T")
        held_at = time.monotonic()
        time.sleep(0.5)
        held_s = time.monotonic() - held_at
        agent.send(lease(3600.0, 3))
        (tmp_path / "go-2").touch()
        second = agent.row()
    assert second.step_time_s <= second.at - first.at - held_s


def test_all_steps_of_a_program_that_is_killed_arrive_however_late_they_are_read(
    tmp_path: Path,
) -> None:
    command = f"bash -c 'seq -f \"loss %g\" {STEPS}; kill -9 $$'"
    with launched(tmp_path, command, metrics="loss (?P<loss>.)") as agent:
        agent.send(agent.join(), lease(3600.0))
        agent.printed(f"loss {STEPS}\n")
        time.sleep(0.3)
        steps = []
        with contextlib.suppress(control_channel.ControlClosed):
            while message := agent.receive():
                steps += [message.row.step] if isinstance(message, StepReport) else []
    assert steps == [*range(1, STEPS + 1)]


STEPS = 3000
"""More than the socket to the agent takes."""


SAVES = """
import pathlib, signal, time

def save(*_):
    time.sleep(0.5)
    pathlib.Path("saved").write_text("whole")
    raise SystemExit(9)

signal.signal(signal.SIGTERM, save)
print("trains", flush=True)
time.sleep(600)
"""
WRAPPERS = {
    "dies": ("python saves.py; echo unreachable", "SIGTERM"),
    "dies before another session": ("setsid --wait python saves.py; echo unreachable", "SIGTERM"),
    "forwards": ("trap 'kill -TERM $!; exit 3' TERM; python saves.py & wait", "exit code 3"),
    "forwards and waits": (
        "trap 'kill -TERM $!' TERM; python saves.py & wait; wait; exit 4",
        "exit code 4",
    ),
    "is replaced": ("exec python saves.py; exit 5", "exit code 9"),
}
"""What a script does at SIGTERM, and how it then ends."""


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_a_wrapper_runs_has_the_grace_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapper: str
) -> None:
    script, ending = WRAPPERS[wrapper]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "saves.py").write_text(SAVES)
    (tmp_path / "start.sh").write_text(script)
    with launched(tmp_path, "bash start.sh", grace_s=WAIT_S) as agent:
        agent.send(agent.join(), lease(3600.0))
        agent.printed("trains")
        agent.send(StopAfterStep(1))
        agent.printed(f"asked to end, and ended by {ending}")
        assert (tmp_path / "saved").read_text() == "whole"
        assert linux_processes.descendants(agent.pid) == []


def test_what_a_wrapper_leaves_behind_is_killed_after_the_grace(tmp_path: Path) -> None:
    command = "bash -c \"bash -c 'trap : TERM; echo stays; while :; do sleep 0.01; done'; true\""
    with launched(tmp_path, command, grace_s=0.2) as agent:
        agent.send(agent.join(), lease(3600.0))
        agent.printed("\nstays\n")
        agent.send(StopAfterStep(1))
        agent.printed("ended by SIGTERM")
        assert linux_processes.descendants(agent.pid) == []


def test_a_fault_that_comes_with_the_order_fires_once_the_program_runs(tmp_path: Path) -> None:
    with launched(tmp_path, "sleep 1000") as agent:
        agent.send(agent.join(ArmFault(7, {"kind": "stop", "rank": 0})), lease(3600.0))
        pid = agent.started()
        wait_state(pid, "T")
        while not isinstance(fired := agent.receive(), FaultFired):
            pass
        assert fired == FaultFired(7)
        assert not [m for m in agent.receive_all(0.5) if isinstance(m, FaultFired)]


def test_the_end_of_the_agent_ends_all_that_the_program_has_started(tmp_path: Path) -> None:
    command = "bash -c 'setsid sleep 1001 & echo $!; echo .; sleep 1002'"
    with launched(tmp_path, command) as agent:
        agent.send(agent.join(), lease(3600.0))
        pid = agent.started()
        (helper,) = pids(agent.printed("\n.\n"))
    assert not linux_processes.is_alive(pid)
    assert not linux_processes.is_alive(helper)


def test_what_a_program_has_started_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    command = "bash -c 'setsid sleep 1001 & echo $!; sleep 1002 & echo $!; echo .; wait'"
    with launched(tmp_path, command) as agent:
        agent.send(agent.join(), lease(3600.0))
        pid = agent.started()
        helpers = pids(agent.printed("\n.\n"))
        os.kill(agent.pid, signal.SIGKILL)
        for each in (pid, *helpers):
            wait_state(each, ("", "Z"))


def test_the_exception_of_a_forked_script_is_recorded_not_read_from_its_output(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "class Odd(Exception):\n    def __str__(self):\n        raise ValueError\nraise Odd()"
    )
    with launching(tmp_path, ProgramSpec(), script=str(script)) as agent:
        agent.send(agent.join(), lease(600.0))
        error = agent.failed()
        assert (error.type, error.kind) == ("Odd", ErrorKind.USER)
        assert "cannot be shown: ValueError" in error.message
        assert "raise Odd()" in error.traceback
        assert not list(tmp_path.glob("**/error-*"))


IGNORES = "import signal; signal.signal(signal.SIGTERM, lambda *_: None)\n"
RAISES = "raise ValueError('bad end')"
PRINTS_LATER = "threading._register_atexit(print, 'bye', flush=True)\n"


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("fork", "end", "type_", "message"),
    [
        (True, "pass", "", ""),
        (True, RAISES, "ValueError", "bad end"),
        (True, f"{IGNORES}sys.exit(2)", "exit_code_2", "exit code 2: last words"),
        (True, f"{IGNORES}os.fork() or (time.sleep(0.3), sys.exit(3))", "", ""),
        (False, "pass", "ThreadsRemain", "its exit code is not known: make them daemon threads"),
        (False, "sys.exit(2)", "ThreadsRemain", "last line of its output: last words"),
        (False, PRINTS_LATER + RAISES, "ThreadsRemain", "last line of its output: bye"),
    ],
)
def test_a_thread_that_outlives_its_program_makes_no_hang_and_hides_no_failure(
    tmp_path: Path, fork: bool, end: str, type_: str, message: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, queue, sys, threading, time\n"
        "threading.Thread(target=lambda: queue.Queue().get(), name='uploads').start()\n"
        "print('last words')\n" + end
    )
    program = ProgramSpec(fork=fork, silence_s=1.0, grace_s=0.5)
    with launching(tmp_path, program, script=str(script)) as agent:
        agent.send(agent.join(), lease(600.0))
        ended = agent.ended()
        assert "thread uploads at " in agent.printed("process is ended now")
        if not type_:
            assert isinstance(ended, WorkerDone)
        else:
            assert isinstance(ended, WorkerFailed)
            assert (ended.error.type, ended.error.kind) == (type_, ErrorKind.USER)
            assert message in ended.error.message
        assert not list(tmp_path.glob("**/error-*"))


@pytest.mark.parametrize("size", [0, 100_000])
def test_the_last_line_of_an_attempt_ends_with_it_and_nothing_is_lost(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the agent reads nothing meanwhile and the pipe is full: the launcher goes on."""
    monkeypatch.setattr("holdfast_workers.programs.launcher.LAST_OUTPUT_S", 0.1)
    with launched(tmp_path, f"bash -c 'head -c {size} /dev/zero; printf last'") as agent:
        agent.send(agent.join(), lease(3600.0))
        while not isinstance(getattr(agent.receive(), "detail", None), WorkerDone):
            pass
        agent.send(agent.join(attempt=2), LeaseUpdate(2, clock_s() + 3600.0, 1))
        agent.started()
        lines = agent.printed("attempt 2: rank 0 of 1 starts bash -c ").splitlines()
        assert [line[:18] for line in (lines[0], lines[-1])] == [
            "INFO    attempt 1:",
            "INFO    attempt 2:",
        ]
        assert lines[1:-1] == ["\0" * size + "last"]
