"""Inspects a rank from outside: the state of its training thread, and its stack.

The inspection needs no cooperation and does not disturb the rank. py-spy reads the memory of the
process without stopping it, so a rank that is stopped or holds the interpreter lock can be read
like any other; /proc adds the kernel function in which it sleeps. C and C++ frames are left out:
reading their symbols takes a second of processor time per rank, and is impossible for a stopped
process. All ranks are sampled at once; a rank that is not sampled in time reports that as its
problem.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast_workers.ipc import linux_processes
from holdfast_workers.protocol.messages import Beat, Inspection

MAX_FRAMES = 64
"""The number of innermost frames of a stack that are kept."""


def sample(beats: Sequence[Beat], timeout_s: float) -> tuple[Inspection, ...]:
    """Sample the rank of every beat, in little more than `timeout_s`."""
    if not beats:
        return ()
    with ThreadPoolExecutor(len(beats), "inspection") as threads:
        return tuple(threads.map(lambda beat: _sample_rank(beat, timeout_s), beats))


def _sample_rank(beat: Beat, timeout_s: float) -> Inspection:
    stack, problem = _stack(beat.pid, timeout_s)
    if stack and (inner := linux_processes.kernel_wait_function(beat.pid)):
        stack = (f"{inner} (kernel)", *stack)
    return Inspection(beat, linux_processes.run_state(beat.pid), stack, problem)


@dataclass(frozen=True)
class ThreadStack:
    """The stack of one thread, innermost frame first."""

    thread_id: int
    """Its number in the kernel; that of the main thread is its process's."""
    name: str
    frames: tuple[str, ...]
    files: tuple[str, ...]
    """The whole paths of the frames' files."""


def _stack(pid: int, timeout_s: float) -> tuple[tuple[str, ...], str]:
    """The stack of the main thread, innermost first; or an empty stack and the problem."""
    stacks, problem = stacks_of(pid, timeout_s)
    main = next((stack.frames for stack in stacks if stack.thread_id == pid), None)
    if main is None and not problem:
        return (), "the output of py-spy has no stack of the main thread"
    return main or (), problem


def stacks_of(pid: int, timeout_s: float) -> tuple[tuple[ThreadStack, ...], str]:
    """The stacks of all threads of a Python process; or none, and the problem."""
    command = dump_command(pid)
    if command is None:
        return (), "py-spy is not installed beside this Python"
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return (), f"py-spy returned no stack within {timeout_s} s"
    except OSError as error:
        return (), f"py-spy could not be started: {error}"
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return (), f"py-spy: {' '.join(line.strip() for line in lines[:4])}"
    return read_dump(done.stdout)


def dump_command(pid: int) -> list[str] | None:
    """The command that prints the stacks of a process; None if there is none."""
    program = _py_spy()
    return [program, "dump", "--pid", str(pid), "--json", "--nonblocking"] if program else None


def read_dump(dump: bytes) -> tuple[tuple[ThreadStack, ...], str]:
    """The stacks in what that command has printed; or none, and the problem."""
    try:
        return tuple(_thread(thread) for thread in json.loads(dump)), ""
    except (ValueError, KeyError, TypeError) as error:
        return (), f"the output of py-spy cannot be read: {error!r}"


def _thread(found: dict[str, Any]) -> ThreadStack:
    frames = found["frames"][:MAX_FRAMES]
    return ThreadStack(
        found["os_thread_id"],
        found.get("thread_name") or str(found["os_thread_id"]),
        tuple(_described(frame) for frame in frames),
        tuple(frame["filename"] for frame in frames),
    )


def _described(frame: dict[str, Any]) -> str:
    file = frame.get("short_filename") or frame["filename"]
    return f"{frame['name']} ({file}:{frame['line']})"


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")
