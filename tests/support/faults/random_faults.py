"""A storm: a seeded sequence of random faults in a running job, and checks of its outcome.

Faults are injected as the job advances, so that all of them fit into it. About every third fault is
followed by another at once, which hits the recovery from the first. A lost node returns as a new
node.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
from tests.support.nodes.supervised import SupervisedRun

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.fault_injection.kinds import FaultKind

KINDS: dict[FaultKind, int] = {
    FaultKind.KILL: 8,
    FaultKind.SEGFAULT: 2,
    FaultKind.ABORT: 2,
    FaultKind.EXIT: 2,
    FaultKind.OOM: 1,
    FaultKind.STOP: 2,
    FaultKind.GIL: 2,
    FaultKind.LOOP: 1,
    FaultKind.READ: 1,
    FaultKind.COLLECTIVE: 1,
    FaultKind.AGENT_DEATH: 3,
    FaultKind.NODE_LOSS: 2,
    FaultKind.SUPERVISOR_DEATH: 3,
    FaultKind.REMOTE_DOWN: 1,
    FaultKind.RESET: 3,
}
"""Relative frequency of each fault."""

WITH_PARTITIONS = {**KINDS, FaultKind.PARTITION: 3}

DURING_RECOVERY = (
    FaultKind.KILL,
    FaultKind.SEGFAULT,
    FaultKind.ABORT,
    FaultKind.EXIT,
    FaultKind.AGENT_DEATH,
    FaultKind.SUPERVISOR_DEATH,
)
"""Faults that may be injected during a recovery. A hang while a world forms ends only with the
deadline of that stage, which is longer than a test should take."""

FOLLOW_UP_SHARE = 0.35
ADVANCE_S = 120.0
NODE_AWAY_S = 0.5
REPAIR_S = 5.0
"""Approximate time until a node that was cut off holds replicas again."""


@dataclass
class Storm:
    """Injects `faults` faults over the run, determined by `seed`; the last well before its end."""

    run: SupervisedRun
    seed: int
    faults: int
    kinds: dict[FaultKind, int] = field(default_factory=lambda: dict(KINDS))
    injected: list[tuple[float, FaultKind]] = field(default_factory=list)
    processes: set[psutil.Process] = field(default_factory=set)
    """All processes seen to run for the job, in any incarnation of its agents."""
    _repaired_at: float = 0.0

    def inject_all(self) -> None:
        generator = random.Random(self.seed)
        steps = self.run.training.train.last_step
        while len(self.injected) < self.faults:
            due = 2 + (steps - 10) * len(self.injected) // self.faults
            self.run.wait(lambda due=due: self._step() >= due, ADVANCE_S)  # type: ignore[misc]
            burst = len(self.injected)
            self._inject(generator, list(self.kinds))
            while len(self.injected) < self.faults and generator.random() < FOLLOW_UP_SHARE:
                time.sleep(generator.uniform(0.0, 0.3))  # at a random time of the recovery
                so_far = {kind for _, kind in self.injected[burst:]}
                self._inject(generator, [kind for kind in self.kinds if may_follow(kind, so_far)])
            self._let_nodes_return()

    def assert_all_injected(self) -> None:
        """Check the number and the variety of the faults: a storm with few kinds proves less."""
        assert len(self.injected) == self.faults
        assert len({kind for _, kind in self.injected}) >= min(len(self.kinds), self.faults // 4)

    def summary(self) -> str:
        """Seconds from the first signal to the first new step, by the kind of the first fault."""
        closed = [
            entry
            for entry in self.run.of(EventKind.INCIDENT_CLOSED)
            if entry["cause"] != "remote_unavailable"
        ]
        by_kind: dict[str, list[float]] = {}
        for incident in closed:
            before = [k for at, k in self.injected if at <= incident["opened_at"]]
            by_kind.setdefault(before[-1] if before else "?", []).append(
                incident["phases_s"]["total"]
            )
        counts = Counter(kind.value for _, kind in self.injected)
        lines = [f"seed {self.seed}: {dict(counts)}; {len(closed)} incidents"]
        for kind, times in sorted(by_kind.items()):
            lines.append(f"{kind:>17}: {percentiles(times)}")
        return "\n".join(lines)

    def _inject(self, generator: random.Random, kinds: list[FaultKind]) -> None:
        self._record_processes()
        kind = generator.choices(kinds, [self.kinds[candidate] for candidate in kinds])[0]
        rank = generator.randrange(self.run.training.parallel.world_size)
        if kind in (FaultKind.NODE_LOSS, FaultKind.PARTITION) and self._node_is_away():
            kind = FaultKind.KILL  # losing two nodes at once may lose both copies of a state
        parameters: dict[str, Any] = {}
        if kind.spec.has_rank:
            parameters["rank"] = rank
        if kind is FaultKind.REMOTE_DOWN:
            parameters["duration_s"] = 2.0
        if kind is FaultKind.PARTITION:
            parameters["duration_s"] = generator.uniform(0.2, 4.0)
            self._repaired_at = time.time() + parameters["duration_s"] + REPAIR_S
        self.injected.append((time.time(), kind))
        before = self.run.supervisor
        self.run.inject(kind, **parameters)
        if kind is FaultKind.SUPERVISOR_DEATH:
            self.run.wait(lambda: self.run.supervisor is not before)

    def _node_is_away(self) -> bool:
        return bool(self.run.agents.lost_seats) or time.time() < self._repaired_at

    def _record_processes(self) -> None:
        for agent in self.run.agents.agents.values():
            if agent.process is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    parent = psutil.Process(agent.process.pid)
                    self.processes |= {parent, *parent.children(recursive=True)}

    def _let_nodes_return(self) -> None:
        for seat in self.run.agents.lost_seats:
            time.sleep(NODE_AWAY_S)
            self.run.agents.return_node(seat)

    def _step(self) -> int:
        self._let_nodes_return()
        return self.run.newest_step()


def may_follow(kind: FaultKind, so_far: Collection[FaultKind]) -> bool:
    """Whether `kind` may follow `so_far`. A program that exits twice at one step is a user error
    and ends the job."""
    return kind in DURING_RECOVERY and not (kind is FaultKind.EXIT and kind in so_far)


def percentiles(times: Sequence[float]) -> str:
    ordered = sorted(times)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99)]
    return f"{len(ordered):4d} incidents, p50 {at[0]:.2f} p90 {at[1]:.2f} p99 {at[2]:.2f} s"
