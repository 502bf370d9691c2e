"""What can be seen of a rank from outside: the state of its training thread, and its stack.

Nothing here needs the rank's help, and nothing disturbs it: py-spy reads the memory of the process
without stopping it, so that one which is stopped, or holds the interpreter's lock, is read like any
other; /proc adds where in the kernel it sleeps. Frames of C and C++ are left out: reading their
symbols takes a second of processor time for each rank, and a stopped process cannot be read so at
all. All ranks are sampled at once, and one that cannot be sampled in time says so.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from holdfast_workers.ipc import linux_processes
from holdfast_workers.protocol.messages import Beat, Inspection

DEEPEST = 64
"""Frames of a stack that are kept, from the innermost on."""


def sample(beats: Sequence[Beat], timeout_s: float) -> tuple[Inspection, ...]:
    """Every rank named by a beat, within `timeout_s` and a little."""
    if not beats:
        return ()
    with ThreadPoolExecutor(len(beats), "inspection") as threads:
        return tuple(threads.map(lambda beat: _sample_one(beat, timeout_s), beats))


def _sample_one(beat: Beat, timeout_s: float) -> Inspection:
    stack, problem = _stack(beat.pid, timeout_s)
    if stack and (inner := linux_processes.sleeps_in(beat.pid)):
        stack = (f"{inner} (kernel)", *stack)
    return Inspection(beat, linux_processes.run_state(beat.pid), stack, problem)


def _stack(pid: int, timeout_s: float) -> tuple[tuple[str, ...], str]:
    """The stack of the main thread, innermost first; or none, and why."""
    program = _py_spy()
    if program is None:
        return (), "py-spy is not installed beside this Python"
    command = [program, "dump", "--pid", str(pid), "--json", "--nonblocking"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return (), f"py-spy gave no stack within {timeout_s} s"
    except OSError as error:
        return (), f"py-spy could not be started: {error}"
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return (), f"py-spy: {' '.join(line.strip() for line in lines[:4])}"
    try:
        threads = json.loads(done.stdout)
        frames = next(one["frames"] for one in threads if one["os_thread_id"] == pid)
    except (ValueError, KeyError, StopIteration) as error:
        return (), f"py-spy's answer has no stack of the main thread: {error!r}"
    return tuple(_described(frame) for frame in frames[:DEEPEST]), ""


def _described(frame: dict[str, Any]) -> str:
    file = frame.get("short_filename") or frame["filename"]
    return f"{frame['name']} ({file}:{frame['line']})"


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")
