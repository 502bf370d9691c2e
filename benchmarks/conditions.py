"""The frame of every benchmark: its options, conditions, progress and result."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import psutil
import yaml
from cyclopts import App, Parameter

from holdfast_workers.ipc.children import COPY_TUNING
from holdfast_workers.spec import ParallelSpec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "stdlib-lm.yaml"
POLL_S = 0.05

Found = TypeVar("Found")
Result = TypeVar("Result", bound="DataclassInstance")


class BenchmarkFailed(Exception):
    """A side did not start, or did not reach the awaited state in time."""


def run(measure: Callable[..., Result]) -> Result:
    """Run the program that has `measure`, whose parameters are its options: print the conditions,
    then the result, with `--json` as JSON. Raises ValueError if a figure is not finite."""
    program = sys.modules["__main__"]
    name = program.__spec__.name if program.__spec__ else program.__name__
    each = Parameter(consume_multiple=True, negative=())
    app = App(
        f"python -m {name}", program.__doc__, default_parameter=each, result_action="return_value"
    )
    app.default(measure)

    @app.meta.default
    def measure_and_print(
        *options: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
        json_line: Annotated[bool, Parameter("--json")] = False,
    ) -> Result:
        # Other load on the machine makes figures worse: the conditions have its average.
        report("conditions: " + ", ".join(f"{name} {value}" for name, value in machine().items()))
        result: Result = app(options)
        text = json.dumps(asdict(result), allow_nan=False)
        print(text if json_line else yaml.safe_dump(json.loads(text), sort_keys=False), flush=True)
        return result

    found: Result = app.meta()
    return found


def report(text: str) -> None:
    """Print progress or conditions to stdout, where the JSON line comes last."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


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
    """Return the present versions, cores and load."""
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


def describe_mesh(mesh: Mapping[str, Any]) -> str:
    """Write a mesh as "dp_shard 2 × tp 2", without its axes of size 1."""
    return " × ".join(f"{axis} {size}" for axis, size in mesh.items() if size != 1)


@contextmanager
def beside_load(share: float, per_core: int = 1) -> Iterator[None]:
    """Run a load of normal priority, `per_core` processes for each processor that each want `share`
    of its time, in bursts; report the share that they got. Raises ValueError."""
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"a load takes a share from 0 to 1, not {share}")
    cores = len(os.sched_getaffinity(0))
    command = [sys.executable, "-c", _LOAD, str(share)]
    began = time.monotonic()
    count = per_core * cores if share else 0
    loops = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(count)]
    try:
        yield
        used = sum(sum(psutil.Process(loop.pid).cpu_times()[:2]) for loop in loops)
        if loops:
            got = used / (time.monotonic() - began) / cores
            report(f"the load took {got:.2f} of all processors")
    finally:
        for loop in loops:
            loop.kill()
            loop.communicate()


_LOAD = """
import select, sys, time
share, began = float(sys.argv[1]), time.monotonic()
while not select.select([sys.stdin], [], [], 0.02 * (1 - share))[0]:  # until the parent exits
    burst = time.monotonic() + 0.1
    while time.thread_time() < share * (time.monotonic() - began) and time.monotonic() < burst:
        pass  # what it lacks, it makes up
"""


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
