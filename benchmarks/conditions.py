"""The conditions of a benchmark run (machine, load, environment) and its progress output."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import yaml

from holdfast_workers.ipc.children import COPY_TUNING
from holdfast_workers.spec import ModelSpec, ParallelSpec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "stdlib-lm.yaml"
POLL_S = 0.05

Found = TypeVar("Found")


class BenchmarkFailed(Exception):
    """A side did not start, or did not reach the awaited state in time."""


def report(text: str) -> None:
    """Print progress or conditions to stdout, where the JSON line comes last."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def print_json(result: DataclassInstance) -> None:
    """Print a benchmark's result as its last line; raises ValueError if a figure is not finite."""
    print(json.dumps(asdict(result), allow_nan=False), flush=True)


def awaited(
    find: Callable[[], Found | None],
    within_s: float,
    failure: Callable[[], str],
    poll_s: float = POLL_S,
) -> Found:
    """What `find` returns as soon as that is neither None nor False; BenchmarkFailed is raised with
    `failure` if it is late."""
    deadline = time.monotonic() + within_s
    while not (found := find()):
        if time.monotonic() > deadline:
            raise BenchmarkFailed(f"not within {within_s:g} s: {failure()}")
        time.sleep(poll_s)
    return found


def load_job(path: Path) -> dict[str, Any]:
    """Load a job document; raises ValueError if the file does not hold a mapping."""
    job = yaml.safe_load(path.read_text())
    if not isinstance(job, dict):
        raise ValueError(f"{path} is not a job: a mapping was expected")
    return job


def machine() -> dict[str, Any]:
    """Current versions, cores and load."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "ray")},
        "holdfast": version("holdfast-train"),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.machine()}",
    }


def world_size(job: Mapping[str, Any]) -> int:
    """The number of ranks of a job with a fixed mesh, or of its training part; raises ValueError if
    an axis is `auto`. The section `parallel` has other fields than axes, which may be null."""
    return ParallelSpec.model_validate(job["parallel"]).world_size


def describe_model(job: Mapping[str, Any]) -> str:
    model, train, parallel = ModelSpec.model_validate(job["model"]), job["train"], job["parallel"]
    return (
        f"{model.family} dim {model.dim}, {model.layers} layers, sequence {model.positions}, "
        f"batch {train['global_batch']}, " + describe_mesh(parallel)
    )


def describe_mesh(mesh: Mapping[str, Any]) -> str:
    """E.g. "dp_shard 2 × tp 2"; an axis of size 1 is left out."""
    return " × ".join(f"{axis} {size}" for axis, size in mesh.items() if size != 1)


@contextmanager
def kept_awake(enabled: bool) -> Iterator[None]:
    """Keep every processor awake with a loop at idle priority (`SCHED_IDLE`) on each.

    A virtual machine that sleeps gives its processors back to its host and waits for them when it
    wakes. With thousands of short sleeps a second, that wait can exceed the work itself.
    """
    with _on_each_core(_IDLE_LOOP if enabled else None):
        yield


@contextmanager
def beside_load(share: float) -> Iterator[None]:
    """Run a load of normal priority, a process for each processor, that computes `share` of the
    time of all processors, in bursts; report the share that it got. Raises ValueError."""
    if not 0.0 <= share < 1.0:
        raise ValueError(f"a load takes a share from 0 to below 1, not {share}")
    began = time.monotonic()
    with _on_each_core(_LOAD if share else None, str(share)) as loops:
        yield
        used = sum(sum(psutil.Process(loop.pid).cpu_times()[:2]) for loop in loops)
    if share:
        got = used / (time.monotonic() - began) / len(os.sched_getaffinity(0))
        report(f"the load took {got:.2f} of all processors")


@contextmanager
def _on_each_core(
    program: str | None, *arguments: str
) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    loops = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(core), *arguments], stdin=subprocess.PIPE
        )
        for core in sorted(os.sched_getaffinity(0))
        if program
    ]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.communicate()


_IDLE_LOOP = """
import os, select, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
while not select.select([sys.stdin], [], [], 0)[0]:  # until the parent process exits
    for _ in range(100_000):
        pass
"""
_LOAD = """
import select, sys, time
share, began = float(sys.argv[2]), time.monotonic()
while not select.select([sys.stdin], [], [], 0.02)[0]:
    while time.thread_time() < share * (time.monotonic() - began):  # what it lacks, it makes up
        pass
"""


def parser(name: str, description: str | None, *, idle: bool = True) -> argparse.ArgumentParser:
    """The options that all benchmarks have. `idle`: also those of the wait for an idle machine."""
    options = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    options.add_argument("--json", action="store_true", help="a JSON object as the last line")
    if idle:
        options.add_argument("--quiet", type=float, default=1.0, help="start below this load")
        options.add_argument("--patience-s", type=float, default=60.0, help="longest wait for that")
    return options


def report_conditions() -> None:
    report("conditions: " + ", ".join(f"{name} {value}" for name, value in machine().items()))


def wait_for_idle_machine(options: argparse.Namespace) -> None:
    """Wait until the one-minute load average is low enough, or as long as the options allow."""
    deadline = time.monotonic() + options.patience_s
    while os.getloadavg()[0] >= options.quiet:
        if time.monotonic() >= deadline:
            report(f"the machine is not idle: load {os.getloadavg()[0]:.2f}; measuring anyway")
            return
        time.sleep(5)


def environment() -> dict[str, str]:
    """Environment of every process on both sides: this interpreter's, with one thread each."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    binaries = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return {
        **COPY_TUNING,  # Holdfast's ranks have it, so the other side gets it too
        **os.environ,
        "PYTHONPATH": paths,
        "PATH": binaries,
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def torchrun(ranks: int, *program: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run `-m program...` in `ranks` processes over loopback, as the embedded cluster does."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
            *("-m", *program),
        ],
        cwd=ROOT,
        env={**environment(), "GLOO_SOCKET_IFNAME": "lo"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
