"""Measures one SIGKILL under Ray Train on a fresh cluster; leaves no process behind.

Two settings are measured. `default` follows Ray Train's guide. `best` has every option found in
Ray 2.60 that makes a restart faster without changing its result. Warm processes are not among them:
Ray starts only as many idle processes as there are cores, and Ray Train's workers inherit a runtime
environment from its controller that matches none of these, so each restart starts new processes and
imports everything again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.conditions import ROOT, environment, world_size
from benchmarks.figures import AppliedStep, MeasuredFault, last_step, recovered_at
from holdfast_service.embedded_cluster import processes
from holdfast_workers.node_cache.cached_file import cache_folder

START_S = 180.0
RECOVER_S = 180.0
POLL_S = 0.05
CPUS = 8
"""CPUs advertised by the raylet: more than needed, so that no rank waits for a CPU."""


@dataclass(frozen=True)
class RayTrainSetting:
    """One configuration of Ray Train. `why` is printed with the figures."""

    name: str
    why: str
    upload: bool
    in_memory: bool
    environment: Mapping[str, str] = field(default_factory=dict)


DEFAULT = RayTrainSetting(
    name="default",
    why="default settings; state by report() of a temporary folder to storage on disk",
    upload=True,
    in_memory=False,
)
_QUICK = {  # read by Ray Train's controller and workers, and by its torch backend
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # 2 s by default: its poll of the workers
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "1",  # 30 by default
    "RAY_worker_niceness": "0",  # 15 by default
}
BEST = RayTrainSetting(
    name="best",
    why="workers polled every 0.1 s instead of 2, watchers and metrics off, normal priority; "
    "state written directly to its final folder in /dev/shm",
    upload=False,
    in_memory=True,
    environment=_QUICK,
)
SETTINGS = (DEFAULT, BEST)


class RayTrainFailed(Exception):
    """Ray Train did not start, or did not recover in time."""


def measure(
    spec: dict[str, Any], setting: RayTrainSetting, rank: int, after_step: int
) -> MeasuredFault:
    """Start, kill `rank` after `after_step` applied steps, wait for the first step beyond."""
    with _run(spec, setting) as run:
        run.wait(lambda: run.step() >= after_step, START_S, f"reach step {after_step}")
        victim = run.pids()[rank]
        killed_at = time.time()
        os.kill(victim, signal.SIGKILL)
        run.wait(
            lambda: recovered_at(run.commits(killed_at), killed_at) is not None,
            RECOVER_S,
            "recover",
        )
        commits = run.commits(killed_at)
        recovered = recovered_at(commits, killed_at)
        assert recovered is not None
        return MeasuredFault(
            rank=rank,
            last_step=last_step(commits, killed_at),
            restored_step=int(run.latest("restored", killed_at)),
            recovery_s=recovered - killed_at,
            phases_s=run.phases(killed_at),
        )


@dataclass
class _RayTrainRun:
    process: subprocess.Popen[bytes]
    folder: Path
    log: Path

    def lines(self) -> Iterator[list[dict[str, Any]]]:
        """Lines of each rank process: a header about the process, then one per applied step."""
        for path in sorted(self.folder.glob("*.jsonl")):
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1].splitlines()  # the last line may be incomplete
            if whole:
                yield [json.loads(line) for line in whole]

    def step(self) -> int:
        return max((line["step"] for lines in self.lines() for line in lines[1:]), default=0)

    def pids(self) -> dict[int, int]:
        return {header["rank"]: header["pid"] for header, *_ in self.lines()}

    def commits(self, killed_at: float) -> list[AppliedStep]:
        return [
            AppliedStep(1 if header["born"] <= killed_at else 2, line["step"], line["at"])
            for header, *steps in self.lines()
            for line in steps
        ]

    def latest(self, name: str, killed_at: float) -> float:
        """The greatest value of a header field over the ranks of the new world."""
        return max(float(header[name]) for header, *_ in self.lines() if header["born"] > killed_at)

    def phases(self, killed_at: float) -> dict[str, float]:
        """Seconds from the kill until the last rank of the new world reached each phase.

        `process_started` is negative if all ranks got processes that existed before the kill.
        """
        names = ("process_started", "born", "built")
        return {name: round(self.latest(name, killed_at) - killed_at, 3) for name in names}

    def wait(self, condition: Callable[[], bool], timeout_s: float, goal: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                log_tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
                raise RayTrainFailed(f"Ray Train did not {goal} in {timeout_s:g} s:\n{log_tail}")
            time.sleep(POLL_S)


@contextlib.contextmanager
def _run(spec: dict[str, Any], setting: RayTrainSetting) -> Iterator[_RayTrainRun]:
    mark = secrets.token_hex(4)
    folder = Path(tempfile.mkdtemp(prefix=f"bench-{mark}-"))
    storage = Path(f"/dev/shm/bench-{mark}") if setting.in_memory else folder / "storage"
    ray_temp = (
        Path(tempfile.gettempdir()) / f"ray-{mark}"
    )  # short, because socket paths are limited
    (folder / "commits").mkdir()
    storage.mkdir(mode=0o700)
    log = folder / "ray_train.log"
    process = _start(spec, setting, mark, folder, storage, ray_temp, log)
    try:
        yield _RayTrainRun(process, folder / "commits", log)
    finally:
        processes.sweep(mark, [str(storage), str(ray_temp)])
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def program_config(
    spec: dict[str, Any], setting: RayTrainSetting, folder: Path, storage: Path, ray_temp: Path
) -> dict[str, Any]:
    """The configuration of `benchmarks.ray_train_program`, a rank for each worker."""
    return {
        "loop": {
            "spec": spec,
            "folder": str(folder / "commits"),
            "cache_dir": str(cache_folder(os.environ)),
            "every_steps": 1,
            "upload": setting.upload,
        },
        "ray_temp_dir": str(ray_temp),
        "storage": str(storage),
        "ranks": world_size(spec),
        "cpus": CPUS,
    }


def _start(
    spec: dict[str, Any],
    setting: RayTrainSetting,
    mark: str,
    folder: Path,
    storage: Path,
    ray_temp: Path,
    log: Path,
) -> subprocess.Popen[bytes]:
    path = folder / "config.json"
    path.write_text(json.dumps(program_config(spec, setting, folder, storage, ray_temp)))
    marked = {processes.CLUSTER_MARK: mark, "TMPDIR": str(folder)}
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ray_train_program", str(path)],
            cwd=ROOT,
            env={**environment(), **setting.environment, **marked},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
