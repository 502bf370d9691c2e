"""The steps that the ranks of any side write to files, recoveries measured from them, and the
processes of the stock sides, which leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.conditions import (
    ROOT,
    BenchmarkFailed,
    Found,
    awaited,
    environment,
    report,
)
from benchmarks.figures import AppliedStep, MeasuredFault, last_step, recovered_at
from holdfast_service.embedded_cluster import processes

START_S = 180.0
RECOVER_S = 180.0
POLL_S = 0.02
PHASES = ("process_started", "born", "built")
"""Times in the header of a rank's file; it has some of them."""
LOG_LINES = 30


@dataclass(frozen=True)
class StepFiles:
    """A folder with a file for each process of a rank: a header, then a line per applied step."""

    folder: Path
    why_ended: Callable[[], str]
    """Why the side can make no more steps; "": it runs."""

    def measure(
        self, victims: Iterable[int], ranks: int, steps_between: int
    ) -> list[MeasuredFault]:
        """Kill one rank after another, each when the run has made steps since the last kill."""
        faults: list[MeasuredFault] = []
        killed: list[float] = []
        reached = 0
        for rank in victims:
            self._await_step(reached + steps_between, ranks, killed)
            pid = self._pid(rank)
            killed.append(time.time())
            os.kill(pid, signal.SIGKILL)
            fault = self._recovery(rank, killed)
            report(f"  rank {rank} killed at step {fault.last_step}: {fault.recovery_s:.3f} s")
            faults.append(fault)
            reached = max(step.step for step in self._steps(killed))
        return faults

    def lines(self) -> Iterator[list[dict[str, Any]]]:
        """Of each process."""
        for path in sorted(self.folder.glob("*.jsonl")):
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1].splitlines()  # the last line may be incomplete
            if whole:
                yield [json.loads(line) for line in whole]

    def wait(self, find: Callable[[], Found | None], within_s: float, goal: str) -> Found:
        """What `find` returns once it does; raises BenchmarkFailed if the side ends before."""

        def found() -> Found | None:
            if why := self.why_ended():
                raise BenchmarkFailed(f"the side did not {goal}: {why}")
            return find()

        return awaited(found, within_s, lambda: f"the side did not {goal}", POLL_S)

    def _recovery(self, rank: int, killed: list[float]) -> MeasuredFault:
        at = killed[-1]
        recovered = self.wait(
            lambda: recovered_at(self._steps(killed), at), RECOVER_S, "make a new step"
        )
        new = [header for header, *_ in self.lines() if header["born"] > at]
        return MeasuredFault(
            rank=rank,
            last_step=last_step(self._steps(killed), at),
            restored_step=max(int(header["restored"]) for header in new),
            recovery_s=recovered - at,
            phases_s=phases_since(at, new),
        )

    def _steps(self, killed: list[float]) -> list[AppliedStep]:
        """A process belongs to the world that formed after the last kill before its birth."""
        return [
            AppliedStep(1 + sum(at < header["born"] for at in killed), line["step"], line["at"])
            for header, *steps in self.lines()
            for line in steps
        ]

    def _await_step(self, goal: int, ranks: int, killed: list[float]) -> None:
        since = killed[-1] if killed else 0.0

        def have_all_reached() -> bool:
            newest = [lines for lines in self.lines() if lines[0]["born"] > since]
            reached = [lines for lines in newest if lines[-1].get("step", 0) >= goal]
            return len({lines[0]["rank"] for lines in reached}) == ranks

        self.wait(have_all_reached, START_S, f"reach step {goal}")

    def _pid(self, rank: int) -> int:
        """The newest process of a rank."""
        headers = [header for header, *_ in self.lines() if header["rank"] == rank]
        return int(max(headers, key=lambda header: header["born"])["pid"])


def phases_since(at: float, headers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds from `at` until the last of these ranks reached each phase.

    `process_started` is negative if all ranks got processes that existed before.
    """
    return {
        name: round(max(header[name] for header in headers) - at, 3)
        for name in PHASES
        if name in headers[0]
    }


@contextlib.contextmanager
def scratch() -> Iterator[tuple[str, Path]]:
    """A mark for processes, and a folder with the folder `steps`, which is removed at the end."""
    mark = secrets.token_hex(4)
    folder = Path(tempfile.mkdtemp(prefix=f"bench-{mark}-"))
    (folder / "steps").mkdir()
    try:
        yield mark, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def started(
    command: Sequence[str], mark: str, folder: Path, variables: Mapping[str, str]
) -> Iterator[StepFiles]:
    """Run a stock side whose ranks write to `folder`; at the end all processes with the mark are
    killed, and folders in memory and of Ray that it names are removed."""
    log = folder / "side.log"
    marked = {processes.CLUSTER_MARK: mark, "TMPDIR": str(folder)}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment(), **marked, **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def why_ended() -> str:
        if process.poll() is None:
            return ""
        tail = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return f"it ended with {process.returncode}:\n" + "\n".join(tail)

    try:
        yield StepFiles(folder / "steps", why_ended)
    finally:
        processes.sweep(mark, [str(memory_folder(mark)), str(ray_folder(mark))])
        process.wait()


def memory_folder(mark: str) -> Path:
    return Path(f"/dev/shm/bench-{mark}")


def ray_folder(mark: str) -> Path:
    """Short, because the paths of sockets are limited."""
    return Path(tempfile.gettempdir()) / f"ray-{mark}"
