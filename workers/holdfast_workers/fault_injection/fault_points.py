"""Fault points: the only places where an injected fault may kill, stop or fail a process.

A plan or an order makes a fault due at a point. The plan is for tests (`HOLDFAST_CHAOS`, the path
of a JSON file): a list of `{"point": "backward", "rank": 1, "step": 5, "action": "kill",
"times": 1}`, with the other parameters of an `Injection` of the kind `action`; an omitted `rank` or
`step` means any. Each firing creates a marker file beside the plan, with O_EXCL, so that a fault
fires `times` times in the whole run, across processes and restarts. An order comes over the control
link while the process runs (`arm`) and fires once; it is reported just before it fires.

Product code announces its points with `reach`; without a plan or an order, that is one comparison.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast_workers.fault_injection.kinds import FaultKind, Injection
from holdfast_workers.fault_injection.process_faults import carry_out

if TYPE_CHECKING:
    from holdfast_workers.training.recipe import Recipe

PLAN_VARIABLE = "HOLDFAST_CHAOS"

OnFire = Callable[[], None]
"""A function that is called just before a fault fires, because a killed process can no longer
report."""


class FaultPoints:
    """The faults of one process. `rank` and `recipe` are set once the process has them."""

    def __init__(self, plan: Path | None) -> None:
        self.rank: int | None = None
        self.recipe: Recipe | None = None
        self._plan = plan
        self._lock = threading.Lock()
        self._armed: list[tuple[Injection, OnFire]] = []
        self._slow: _Slowness | None = None
        self._active = plan is not None

    @classmethod
    def from_environment(cls) -> FaultPoints:
        path = os.environ.get(PLAN_VARIABLE)
        return cls(Path(path) if path else None)

    def arm(self, fault: Injection, on_fire: OnFire) -> None:
        """Fire the fault when it is due: now, in this thread, or at the next matching point."""
        if fault.at_once and fault.kind.spec.any_thread:
            on_fire()
            carry_out(fault, "any point")
            return
        with self._lock:
            self._armed.append((fault, on_fire))
            self._active = True

    def reach(self, point: str, step: int | None = None, micro_batch: int | None = None) -> None:
        """Fire the faults that are due at `point`."""
        if self._active:
            self._reach(point, step, micro_batch)

    def _reach(self, point: str, step: int | None, micro_batch: int | None) -> None:
        if self._slow is not None and self._slow.is_over(point, step):
            self._slow = None
        for fault in self._due(point, step, micro_batch):
            self._fire(fault, point, step)
        with self._lock:
            self._active = bool(self._plan or self._armed or self._slow)

    def _due(self, point: str, step: int | None, micro_batch: int | None) -> list[Injection]:
        due = []
        if self._plan is not None:
            for index, entry in enumerate(self._read(self._plan)):
                if self._is_planned(entry, point, step, micro_batch) and self._claim(index, entry):
                    due.append(_planned(entry))
        with self._lock:
            ready = [armed for armed in self._armed if _fits(armed[0], point, step, micro_batch)]
            self._armed = [armed for armed in self._armed if armed not in ready]
        for fault, on_fire in ready:
            on_fire()
            due.append(fault)
        return due

    def _fire(self, fault: Injection, point: str, step: int | None) -> None:
        if fault.kind is FaultKind.SLOW:
            self._slow = _Slowness(fault.value("factor"), fault.value("steps"), step)
        elif fault.kind.spec.in_tensors:
            from holdfast_workers.fault_injection import (
                tensor_faults,  # late: it imports torch, and few faults need it
            )

            assert self.recipe is not None
            tensor_faults.tamper(self.recipe, fault, point)
        else:
            carry_out(fault, point)

    def _read(self, plan: Path) -> list[dict[str, Any]]:
        try:
            entries: list[dict[str, Any]] = json.loads(plan.read_text())
        except FileNotFoundError:
            return []
        return entries

    def _is_planned(
        self, entry: dict[str, Any], point: str, step: int | None, micro_batch: int | None
    ) -> bool:
        return (
            entry["point"] == point
            and entry.get("rank") in (None, self.rank)
            and entry.get("step") in (None, step)
            and entry.get("micro_batch") in (None, micro_batch)
        )

    def _claim(self, index: int, entry: dict[str, Any]) -> bool:
        assert self._plan is not None
        for firing in range(entry.get("times", 1)):
            marker = self._plan.with_name(f"{self._plan.name}.{index}.{firing}")
            try:
                fd = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            except FileExistsError:
                continue
            os.write(fd, f"{os.getpid()} {time.time():.6f}".encode())
            os.close(fd)
            return True
        return False


class _Slowness:
    """Makes a rank compute `factor` times as long by a sleep after each stretch of work.

    The work is measured in processor time of the thread, so waiting for peers does not count. Only
    the thread that first passes a point is slowed down.
    """

    def __init__(self, factor: float, steps: int, step: int | None) -> None:
        self._thread = threading.get_ident()
        self._factor = factor
        self._until = (step or 0) + steps
        self._worked = time.thread_time()

    def is_over(self, point: str, step: int | None) -> bool:
        if threading.get_ident() != self._thread:
            return False
        now = time.thread_time()
        time.sleep((self._factor - 1.0) * (now - self._worked))
        self._worked = time.thread_time()
        return point == "forward" and step is not None and step >= self._until


def _fits(fault: Injection, point: str, step: int | None, micro_batch: int | None) -> bool:
    return (
        fault.point == point
        and fault.at_step in (None, step)
        and fault.micro_batch in (None, micro_batch)
    )


def _planned(entry: dict[str, Any]) -> Injection:
    parameters = {
        name: value
        for name, value in entry.items()
        if name not in ("point", "rank", "step", "action", "times")
    }
    return Injection.of({"kind": entry["action"], **parameters})
