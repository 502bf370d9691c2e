"""Linux process facts that hold the process tree of a node together.

A node agent makes itself a child subreaper; the zygote forks twice, so that a worker's parent
becomes the agent; the worker then asks for SIGKILL at its parent's death. So no worker can go on
training after its agent died, also not one that is stopped, and the agent sees every exit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PTRACER = 0x59616D61


def become_subreaper() -> None:
    """Orphans among this process's descendants become its children."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, timeout_s: float) -> bool:
    """Wait until `parent` is our parent, then ask for SIGKILL at its death.

    False if it did not become our parent within `timeout_s`: it is dead, and so should we be.
    """
    deadline = time.monotonic() + timeout_s
    while os.getppid() != parent:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def allow_tracing(tracer: int) -> None:
    """Let `tracer` and its descendants read this process from outside, where the kernel (Yama)
    else lets only an ancestor do so."""
    with contextlib.suppress(OSError):  # a kernel without Yama asks for no permission
        _prctl(PR_SET_PTRACER, tracer)


def name_process(name: str) -> None:
    """Give this process a name of its own (15 bytes) in the process table."""
    Path("/proc/self/comm").write_text(name[:15])


def name_thread(name: str) -> None:
    """The same for the thread that calls."""
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name[:15])


def thread_count() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def is_alive(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    return run_state(pid) not in ("", "Z", "X")


def sleeps(pid: int, but: str = "") -> bool:
    """True if every thread of the process waits for something (not for a processor, nor a disk),
    those aside that have the name `but`."""
    try:
        threads = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False
    states = {run_state(pid, thread, but) for thread in threads} - {""}
    return states == {"S"}


def run_state(pid: int, thread: int | None = None, but: str = "") -> str:
    """The state of a thread, by default the main one, as proc(5) has it; empty if it is gone, or
    has the name `but`."""
    try:
        stat = Path(f"/proc/{pid}/task/{thread or pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    name, _, rest = stat.partition("(")[2].rpartition(")")
    return "" if but and name == but else rest.split()[0]


def sleeps_in(pid: int) -> str:
    """The kernel's function in which the main thread sleeps; empty if it does not, or is secret."""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
    return "" if name == "0" else name


def exit_detail(status: int) -> dict[str, int | str]:
    """A wait status in words: `{"signal": 9, "name": "SIGKILL"}` or `{"exit_code": 1}`."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        return {"signal": number, "name": name}
    return {"exit_code": os.waitstatus_to_exitcode(status)}


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
