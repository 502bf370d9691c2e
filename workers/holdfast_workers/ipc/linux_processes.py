"""Linux calls that keep the process tree of a node together, and facts about processes from /proc.

A node agent makes itself a child subreaper; the zygote forks twice, so that the agent becomes the
parent of a worker; the worker then requests SIGKILL at its parent's death. Hence no worker, not
even a stopped one, trains on after its agent has died, and the agent sees every exit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from holdfast_workers.ipc import readiness
from holdfast_workers.protocol.process_identity import ProcessIdentity


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended: by an exit code or by a signal. Neither: unknown."""

    exit_code: int | None = None
    signal: int | None = None
    name: str = ""
    """Name of the signal, e.g. "SIGKILL"."""

    def __str__(self) -> str:
        if self.exit_code is not None:
            return f"exit code {self.exit_code}"
        return self.name or "an unknown cause"


PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PTRACER = 0x59616D61


def become_subreaper() -> None:
    """Make this process the parent of its orphaned descendants."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, timeout_s: float) -> bool:
    """Wait until `parent` is the parent of this process, then request SIGKILL at its death.

    False if that did not happen within `timeout_s`: `parent` is dead, and the caller must exit.
    """
    deadline = time.monotonic() + timeout_s
    while os.getppid() != parent:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def session_members(session: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for pid in _pids():
        fields = stat_fields(pid)
        if fields and int(fields[3]) == session and fields[0] not in ("Z", "X"):
            found.append(pid)
    return found


def children(pid: int) -> list[int]:
    """The processes of which this one is the parent."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has
                found += map(int, (thread / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, directly or not, as far as their parents live."""
    found: list[int] = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def kill_all(find: Callable[[], Collection[int]], rounds: int, round_s: float) -> list[int]:
    """SIGKILL what `find` returns until it returns none, in so many rounds at most: a process may
    start another meanwhile. All that were killed, in order."""
    killed: dict[int, None] = {}
    for _ in range(rounds):
        left = find()
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed[pid] = None
        time.sleep(round_s)
    return list(killed)


def children_with(variable: str) -> list[int]:
    """The children of this process that were executed with this environment variable."""
    return [pid for pid in children(os.getpid()) if _has_entry(pid, f"{variable}=")]


def marked(entry: str) -> list[int]:
    """The living processes of this machine that were executed with this entry of the environment,
    `NAME=value`, as far as this process may look."""
    return [pid for pid in _pids() if _has_entry(pid, f"{entry}\0") and is_alive(pid)]


def stat_fields(pid: int) -> list[str]:
    """The fields of proc(5)'s stat from the state on; empty: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _has_entry(pid: int, start: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return environment.startswith(start.encode()) or f"\0{start}".encode() in environment


def allow_tracing(tracer: int) -> None:
    """Allow `tracer` and its descendants to read this process from outside. Without it, a kernel
    with Yama allows only ancestors."""
    with contextlib.suppress(OSError):  # a kernel without Yama needs no permission
        _prctl(PR_SET_PTRACER, tracer)


def name_process(name: str) -> None:
    """Set the name of this process in the process table (15 bytes at most)."""
    Path("/proc/self/comm").write_text(name[:15])


def name_thread(name: str) -> None:
    """Set the name of the calling thread (15 bytes at most)."""
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name[:15])


def thread_ids() -> set[int]:
    """The threads of this process; the main thread has the process's own id."""
    return {int(thread.name) for thread in Path("/proc/self/task").iterdir()}


def thread_name(thread: int) -> str:
    """The kernel's name of a thread of this process; "" if it has ended."""
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    return run_state(pid) not in ("", "Z", "X")


def identify(pid: int, node_id: str = "") -> ProcessIdentity:
    """The identity of a living process of this kernel; `node_id`: Ray's id of this node."""
    started = start_time(pid)
    if started is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return ProcessIdentity(_kernel(), pid, started, node_id)


def has_ended(process: ProcessIdentity) -> bool | None:
    """Whether the process has ended, as this kernel knows; None if another kernel runs it.

    True only after its last thread has ended, so none of its code runs any more.
    """
    if process.kernel != _kernel():
        return None
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if start_time(process.pid) != process.started:
            return True  # the process id was given to another process
        return readiness.is_readable(pidfd)
    finally:
        os.close(pidfd)


def start_time(pid: int) -> int | None:
    """When the process was started, in clock ticks since the boot; None if there is none. Together
    with the pid, it identifies a process."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def ended_children() -> set[int]:
    """The children of this process that have ended and were not reaped."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
    if found is None:
        return set()
    known = {found.si_pid, *children(os.getpid())}
    return {pid for pid in known if run_state(pid) == "Z"}


def is_asleep(pid: int, ignored_thread: str = "") -> bool:
    """True if every thread of the process is in interruptible sleep (neither runnable nor waiting
    for a disk). Threads with the name `ignored_thread` do not count."""
    try:
        threads = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False
    states = {run_state(pid, thread, ignored_thread) for thread in threads} - {""}
    return states == {"S"}


def run_state(pid: int, thread: int | None = None, ignored_thread: str = "") -> str:
    """The state letter of a thread (default: the main thread) as in proc(5); "" if the thread has
    ended or has the name `ignored_thread`."""
    try:
        stat = Path(f"/proc/{pid}/task/{thread or pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    name, _, rest = stat.partition("(")[2].rpartition(")")
    return "" if ignored_thread and name == ignored_thread else rest.split()[0]


def kernel_wait_function(pid: int) -> str:
    """The kernel function in which the main thread sleeps; "" if it runs or the kernel hides it."""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
    return "" if name == "0" else name


def process_end(status: int) -> ProcessEnd:
    """A wait status, decoded."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return ProcessEnd(signal=number, name=signal.Signals(number).name)
        except ValueError:
            return ProcessEnd(signal=number, name=f"signal {number}")
    return ProcessEnd(exit_code=os.waitstatus_to_exitcode(status))


def _kernel() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
