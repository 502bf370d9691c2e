"""Reads the steps that the ranks of either side write, and measures recoveries from SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.conditions import report
from benchmarks.figures import AppliedStep, MeasuredFault, last_step, recovered_at

START_S = 180.0
RECOVER_S = 180.0
POLL_S = 0.02


class SideFailed(Exception):
    """A side did not start, or did not recover in time."""


@dataclass(frozen=True)
class StepFiles:
    """A folder with a file for each process of a rank: a header, then a line per applied step."""

    folder: Path
    why_ended: Callable[[], str]
    """Why the side can make no more steps; "": it runs."""

    def measure(self, kills: int, ranks: int, steps_between: int) -> list[MeasuredFault]:
        """Kill one rank after another, each when the run has made steps since the last kill."""
        faults: list[MeasuredFault] = []
        killed: list[float] = []
        reached = 0
        for number in range(kills):
            rank, goal = number % ranks, reached + steps_between
            self._wait(
                lambda goal=goal: self._all_reached(goal, ranks, killed),  # type: ignore[misc]
                START_S,
                f"reach step {goal}",
            )
            pid = self._pid(rank)
            killed.append(time.time())
            os.kill(pid, signal.SIGKILL)
            fault = self._recovery(rank, killed)
            report(f"  rank {rank} killed at step {fault.last_step}: {fault.recovery_s:.3f} s")
            faults.append(fault)
            reached = max(step.step for step in self._steps(killed))
        return faults

    def _recovery(self, rank: int, killed: list[float]) -> MeasuredFault:
        at = killed[-1]
        self._wait(
            lambda: recovered_at(self._steps(killed), at) is not None, RECOVER_S, "make a new step"
        )
        steps = self._steps(killed)
        recovered = recovered_at(steps, at)
        assert recovered is not None
        new = [header for header, *_ in self._lines() if header["born"] > at]
        return MeasuredFault(
            rank=rank,
            last_step=last_step(steps, at),
            restored_step=max(int(header["restored"]) for header in new),
            recovery_s=recovered - at,
            phases_s={
                name: round(max(header[name] for header in new) - at, 3)
                for name in ("born", "built")
            },
        )

    def _steps(self, killed: list[float]) -> list[AppliedStep]:
        """A process belongs to the world that formed after the last kill before its birth."""
        return [
            AppliedStep(1 + sum(at < header["born"] for at in killed), line["step"], line["at"])
            for header, *steps in self._lines()
            for line in steps
        ]

    def _all_reached(self, goal: int, ranks: int, killed: list[float]) -> bool:
        since = killed[-1] if killed else 0.0
        newest = [lines for lines in self._lines() if lines[0]["born"] > since]
        reached = [lines for lines in newest if lines[-1].get("step", 0) >= goal]
        return len({lines[0]["rank"] for lines in reached}) == ranks

    def _pid(self, rank: int) -> int:
        """The newest process of a rank."""
        headers = [header for header, *_ in self._lines() if header["rank"] == rank]
        return int(max(headers, key=lambda header: header["born"])["pid"])

    def _lines(self) -> Iterator[list[dict[str, Any]]]:
        for path in sorted(self.folder.glob("*.jsonl")):
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1].splitlines()  # the last line may be incomplete
            if whole:
                yield [json.loads(line) for line in whole]

    def _wait(self, condition: Callable[[], bool], timeout_s: float, goal: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            why = self.why_ended()
            if why or time.monotonic() > deadline:
                raise SideFailed(f"the side did not {goal} in {timeout_s:g} s: {why or 'it runs'}")
            time.sleep(POLL_S)
