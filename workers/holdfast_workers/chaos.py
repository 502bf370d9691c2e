"""Fault points: places where a test may make a process die, stop or fail, and nothing else may.

Off unless the environment names a plan (`HOLDFAST_CHAOS`, a path to a JSON file): a list of
`{"point": "backward", "rank": 1, "step": 5, "action": "kill", "times": 1}`. `rank` and `step` may
be left out (any). Each firing leaves a marker file beside the plan, made with O_EXCL, so that a
fault fires `times` times in the whole run, across processes and restarts. Product code names its
points by `reach`; without a plan that is one comparison with None.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

PLAN_VARIABLE = "HOLDFAST_CHAOS"


class ChaosError(Exception):
    """What a planned `raise` raises."""


class FaultPoints:
    """The plan of one process. `rank` is set once the process has one."""

    def __init__(self, plan: Path | None) -> None:
        self.rank: int | None = None
        self._plan = plan

    @classmethod
    def from_environment(cls) -> FaultPoints:
        path = os.environ.get(PLAN_VARIABLE)
        return cls(Path(path) if path else None)

    def reach(self, point: str, step: int | None = None) -> None:
        """Fire the faults planned for `point`, if any."""
        if self._plan is None:
            return
        for index, fault in enumerate(self._read()):
            if self._matches(fault, point, step) and self._claim(index, fault):
                _fire(fault["action"], point)

    def _read(self) -> list[dict[str, Any]]:
        assert self._plan is not None
        try:
            plan: list[dict[str, Any]] = json.loads(self._plan.read_text())
        except FileNotFoundError:
            return []
        return plan

    def _matches(self, fault: dict[str, Any], point: str, step: int | None) -> bool:
        return (
            fault["point"] == point
            and fault.get("rank") in (None, self.rank)
            and fault.get("step") in (None, step)
        )

    def _claim(self, index: int, fault: dict[str, Any]) -> bool:
        assert self._plan is not None
        for turn in range(fault.get("times", 1)):
            marker = self._plan.with_name(f"{self._plan.name}.{index}.{turn}")
            try:
                fd = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            except FileExistsError:
                continue
            os.write(fd, f"{os.getpid()} {time.time():.6f}".encode())
            os.close(fd)
            return True
        return False


def _fire(action: str, point: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "raise":
        raise ChaosError(f"planned failure at {point}")
    else:
        raise ValueError(f"unknown chaos action {action!r}")
