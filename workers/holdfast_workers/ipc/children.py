"""The child processes of a node agent: the zygote and the processes forked from it.

`ChildProcesses` requests forks from the zygote and restarts it after its death; `Child` is one
forked process with its pidfd, control socket and log pipe. Every blocking call has a deadline. This
module makes no decisions.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn, Protocol

import structlog

from holdfast_workers import build
from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc import control_channel, environment, linux_processes
from holdfast_workers.ipc.linux_processes import ProcessEnd
from holdfast_workers.protocol.answers import AgentFailure
from holdfast_workers.protocol.processes import (
    ZYGOTE_ANSWERS,
    AskStorePort,
    FetchOrder,
    Forked,
    Job,
    ProcessReady,
    StorageZygoteConfig,
    WorkerJob,
    WorkerOrder,
    ZygoteConfig,
)
from holdfast_workers.protocol.programs import SOCKET_VARIABLE

_log = structlog.get_logger()


MOST_ROUNDS, ROUND_S = 50, 0.005


class ZygoteFailed(WorkersError):
    """The zygote did not start, or could not fork. `failure`: as its agent reports it."""

    def __init__(self, message: str, failure: AgentFailure | None = None) -> None:
        super().__init__(message)
        self.failure = failure or AgentFailure(message)


class ThreadsStarted(WorkersError):
    """The zygote or template has threads, so it was not forked. `started_by`: their modules."""

    def __init__(self, started_by: tuple[str, ...]) -> None:
        super().__init__(f"it has threads, started by {', '.join(started_by)}")
        self.started_by = started_by


def _end_for_another_build(found: str) -> NoReturn:
    """End this process: what it starts would run other code than itself. Ray starts the agent
    again, with that code."""
    _log.error("another_build", runs=build.LOADED, found=found)
    os._exit(1)


@dataclass
class Child:
    """One process forked by the zygote, with the agent's ends of its control socket and log."""

    job: Job
    name: str
    pid: int
    pidfd: int
    end: socket.socket
    log_fd: int
    killed_because: str = ""
    """The agent's reason for killing this process; empty: it did not."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _closed: bool = False

    def send(
        self, message: WorkerOrder | AskStorePort | FetchOrder, *, or_drop: bool = False
    ) -> bool:
        """Send a control message; never waits. False if the process has ended (the I/O loop reports
        its exit), or its socket buffer is full of unread messages: such a process is killed. With
        `or_drop`, only the message is lost."""
        try:
            control_channel.send(self.end, message, wait=False)
        except control_channel.ControlClosed:
            return False
        except BlockingIOError:
            if not or_drop:
                self.kill("it did not read its control messages")
            return False
        return True

    def kill(self, why: str = "") -> None:
        """Kill the process; its exit is reported with the reason."""
        self.killed_because = why or self.killed_because
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. A process that has ended, even just now, is left alone."""
        with self._lock:
            if not self._closed:  # another child may have the number of a closed descriptor
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.pidfd, number)

    def end_session(self) -> None:
        """Kill the processes that the child has started itself: it leads a session of its own.
        Call it only after the pidfd has become readable, and before `reap`."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the pid still belongs to it
        if isinstance(self.job, WorkerJob) and self.job.launches:
            self._kill_program()

    def reap(self) -> ProcessEnd:
        """Collect the exit status, after `end_session`."""
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return ProcessEnd()  # reaped elsewhere
        return linux_processes.process_end(status) if pid else ProcessEnd()

    def _kill_program(self) -> None:
        """Kill what a launcher has left that was killed itself: its session, and what left the
        session and became a child of this process."""

        def left() -> set[int]:
            found = linux_processes.session_members(self.pid)
            return {*found, *linux_processes.children_with(SOCKET_VARIABLE)} - {self.pid}

        linux_processes.kill_all(left, MOST_ROUNDS, ROUND_S)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.end.close()
            os.close(self.log_fd)
            os.close(self.pidfd)


def fork_from(end: socket.socket, name: str, job: Job) -> Child:
    """Request a fork from the process at the other side of `end` (a zygote or a template).

    Raises ThreadsStarted, ControlClosed, UnreadableDocument or OSError (including TimeoutError)."""
    ours, theirs = control_channel.pair()
    log_reader, log_writer = os.pipe()
    try:
        control_channel.send(end, job, (theirs.fileno(), log_writer))
        answer = control_channel.receive(end, Forked)
        if answer.threads:
            raise ThreadsStarted(answer.threads)
        pid = answer.pid
        pidfd = os.pidfd_open(pid)
    except BaseException:
        ours.close()
        os.close(log_reader)
        raise
    finally:
        theirs.close()
        os.close(log_writer)
    os.set_blocking(log_reader, False)
    return Child(job, name, pid, pidfd, ours, log_reader)


NVML_CHECK = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Makes `torch.cuda.is_available()` ask NVML. Otherwise it asks the driver, whose context does not
survive a fork: one such call in a user's module would take the devices from every worker."""

KILL_WAIT_S = 10.0
"""How long a killed zygote may take to end. One that waits for a dead mount ends with the wait."""
COPY_TUNING = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000"}
"""Makes glibc copy 1 MiB and more with non-temporal stores, which bypass the cache. That is its
default only where a processor's share of the cache is small; with a large share, a copy first reads
the memory that it overwrites: 50 instead of 31 ms for 256 MiB of a memory checkpoint."""


class ZygoteProcess(Protocol):
    """The part of `subprocess.Popen` that is used here."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def start_zygote(fd: int, env: dict[str, str]) -> ZygoteProcess:
    """Start a zygote with control socket `fd` and exactly the environment `env`. Raises OSError."""
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast_workers.child_programs.zygote", str(fd), str(os.getpid())],
        pass_fds=[fd],
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # outside the low-priority session of the watchers
    )


class ChildProcesses:
    """Starts and restarts the zygote, and forks processes from it."""

    def __init__(
        self,
        config: StorageZygoteConfig,
        start_timeout_s: float,
        fork_timeout_s: float,
        start: Callable[[int, dict[str, str]], ZygoteProcess] = start_zygote,
        variables: Callable[[Mapping[str, str]], dict[str, str]] = environment.for_users_code,
        on_threads: Callable[[tuple[str, ...]], None] = lambda _: None,
    ):
        """`variables`: the part of this process's environment that the zygote gets.
        `on_threads(modules)`: these modules of the recipe start threads, so no zygote imports the
        recipe any more; called once, and must not block."""
        self._config = config
        self._variables = variables
        self._on_threads = on_threads
        self._start_timeout_s = start_timeout_s
        self._fork_timeout_s = fork_timeout_s
        self._start_process = start
        self._lock = threading.Lock()
        self._process: ZygoteProcess | None = None
        self._end: socket.socket | None = None
        self._stopped = False
        self._ready_at = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def age_s(self) -> float:
        """Seconds since the last zygote became ready."""
        return time.monotonic() - self._ready_at

    def start(self) -> None:
        """Start a zygote and wait until it has imported everything. Raises ZygoteFailed."""
        with self._lock:
            self._start()

    def ensure(self) -> bool:
        """Start a new zygote if the last one died. Returns True if it had died."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return False
            self._start()
            return True

    def fork(self, name: str, job: Job) -> Child:
        """Fork a process for `job`, replacing a dead zygote first. Raises ZygoteFailed."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                return self._fork(name, job)
            except ThreadsStarted as threads:
                self._leave_out_recipe(threads)
            except (WorkersError, OSError):
                self._start()
            try:
                return self._fork(name, job)
            except (WorkersError, OSError) as error:
                raise ZygoteFailed(f"the zygote could not fork a {job.process}: {error}") from error

    def stop(self) -> None:
        """End the zygote, also one that is starting. No fork is possible afterwards."""
        self._stopped = True
        if (process := self._process) is not None:
            process.kill()  # whoever waits for it has the lock
        with self._lock:
            self._discard()

    def _fork(self, name: str, job: Job) -> Child:
        assert self._end is not None
        return fork_from(self._end, name, job)

    def _leave_out_recipe(self, threads: ThreadsStarted) -> None:
        """Start a zygote that does not import the recipe."""
        if not (isinstance(self._config, ZygoteConfig) and self._config.imports_recipe):
            raise ZygoteFailed(f"the zygote cannot be forked: {threads}") from threads
        self._config = replace(self._config, imports_recipe=False)
        self._on_threads(threads.started_by)
        self._start()

    def _start(self) -> None:
        self._discard()
        if self._stopped:
            raise ZygoteFailed("the zygote was stopped because the agent is shutting down")
        if build.is_replaced():
            if not isinstance(self._config, ZygoteConfig):  # no rank needs it at once
                raise ZygoteFailed("Holdfast was upgraded on this node: see `holdfast upgrade`")
            _end_for_another_build("the one on disk")
        self._end = ours = self._spawn()
        ours.settimeout(self._start_timeout_s)
        try:
            control_channel.send(ours, self._config)
            answer = control_channel.receive(ours, *ZYGOTE_ANSWERS)
        except (WorkersError, TimeoutError) as error:
            self._discard()
            raise ZygoteFailed(f"the zygote did not start: {error}") from error
        if isinstance(answer, AgentFailure):
            self._discard()
            raise ZygoteFailed(f"{answer.type}: {answer.message}", answer)
        if isinstance(answer, ProcessReady) and answer.build not in ("", build.LOADED):
            _end_for_another_build(answer.build)
        ours.settimeout(self._fork_timeout_s)
        self._ready_at = time.monotonic()

    def _spawn(self) -> socket.socket:
        """Start the process, and return the agent's end of its control socket."""
        ours, theirs = control_channel.pair()
        variables = self._variables(os.environ)
        env = {**NVML_CHECK, **COPY_TUNING, **variables, **self._config.env}
        try:
            self._process = self._start_process(theirs.fileno(), env)
        except OSError as error:
            ours.close()
            raise ZygoteFailed(f"the zygote's process could not be started: {error}") from error
        finally:
            theirs.close()
        return ours

    def _discard(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired, TimeoutError):
                self._process.wait(KILL_WAIT_S)
            self._process = None
