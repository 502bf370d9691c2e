"""The steps that the ranks of any side write to files, recoveries measured from them, and the
processes of the stock sides, which leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.conditions import ROOT, BenchmarkFailed, Found, awaited, environment, report
from benchmarks.figures import AppliedStep, Recovery, recovery
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

    def measure(self, victims: Iterable[int], ranks: int, steps_between: int) -> list[Recovery]:
        """Kill one rank after another, each when the run has made steps since the last kill."""
        found: list[Recovery] = []
        killed: list[float] = []
        reached = 0
        for rank in victims:
            self._await_step(reached + steps_between, ranks, killed)
            headers = [header for header, *_ in self.lines() if header["rank"] == rank]
            newest = max(headers, key=lambda header: header["born"])
            killed.append(time.time())
            os.kill(newest["pid"], signal.SIGKILL)
            recovered = self.wait(lambda: self._recovery(killed), RECOVER_S, "make a new step")
            report(f"  rank {rank} killed: {recovered}")
            found.append(recovered)
            reached = max(step.step for step in self._steps(killed))
        return found

    def lines(self) -> Iterator[list[dict[str, Any]]]:
        """Return the lines of each process."""
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

    def _recovery(self, killed: list[float]) -> Recovery | None:
        new = [header for header, *_ in self.lines() if header["born"] > killed[-1]]
        phases_s = phases_since(killed[-1], new)
        return recovery(self._steps(killed), killed[-1], phases_s=phases_s)

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


def phases_since(at: float, headers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds from `at` until the last of these ranks reached each phase.

    `process_started` is negative if all ranks got processes that existed before.
    """
    return {
        name: round(max(header[name] for header in headers) - at, 3)
        for name in PHASES
        if headers and name in headers[0]
    }


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder with the folder `steps`; its name marks the processes of a stock side."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "steps").mkdir()
        yield Path(folder)


@contextlib.contextmanager
def started(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], mark: str = ""
) -> Iterator[StepFiles]:
    """Run a stock side whose ranks write to `folder`; at the end all processes with the mark, by
    default the folder's name, are killed."""
    mark = mark or folder.name
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
        processes.sweep(mark, [])
        process.wait()
