"""A seeded storm over a running job, and what must be true after it.

Faults come as the job advances, so that all of them fit into it; about every third brings another
at once, which meets the recovery from the first. A lost node comes back as another.
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
from holdfast_workers.fault_injection.kinds import FaultKind, Injection, Victim

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
}
"""How often each comes, against the others."""

WITH_PARTITIONS = {**KINDS, FaultKind.PARTITION: 3}

IN_A_RECOVERY = (
    FaultKind.KILL,
    FaultKind.SEGFAULT,
    FaultKind.ABORT,
    FaultKind.EXIT,
    FaultKind.AGENT_DEATH,
    FaultKind.SUPERVISOR_DEATH,
)
"""What the second of two may be: a hang while a world forms ends with that stage's deadline, which
is longer than a test should take."""

ANOTHER = 0.35
ADVANCE_S = 120.0
NODE_AWAY_S = 0.5
MENDING_S = 5.0
"""Until a node that was cut off holds copies again, about."""


@dataclass
class Storm:
    """`faults` of them over the run, the same for a seed; the last well before its end."""

    run: SupervisedRun
    seed: int
    faults: int
    kinds: dict[FaultKind, int] = field(default_factory=lambda: dict(KINDS))
    struck: list[tuple[float, FaultKind]] = field(default_factory=list)
    processes: set[psutil.Process] = field(default_factory=set)
    """All that were seen to run for the job, in whatever life of its agents."""
    _mended_at: float = 0.0

    def blow(self) -> None:
        drawn = random.Random(self.seed)
        steps = self.run.training.train.steps
        while len(self.struck) < self.faults:
            due = 2 + (steps - 10) * len(self.struck) // self.faults
            self.run.wait(lambda due=due: self._step() >= due, ADVANCE_S)  # type: ignore[misc]
            burst = len(self.struck)
            self._strike(drawn, list(self.kinds))
            while len(self.struck) < self.faults and drawn.random() < ANOTHER:
                time.sleep(drawn.uniform(0.0, 0.3))  # somewhere in the recovery
                so_far = {kind for _, kind in self.struck[burst:]}
                self._strike(drawn, [kind for kind in self.kinds if may_follow(kind, so_far)])
            self._let_nodes_return()

    def assert_all_came(self) -> None:
        """Kinds that were to come have come: a storm without them shows less than it says."""
        assert len(self.struck) == self.faults
        assert len({kind for _, kind in self.struck}) >= min(len(self.kinds), self.faults // 4)

    def summary(self) -> str:
        """Seconds from the first signal to the first new step, by the kind that came first."""
        closed = [
            one
            for one in self.run.of(EventKind.INCIDENT_CLOSED)
            if one["cause"] != "remote_unavailable"
        ]
        found: dict[str, list[float]] = {}
        for incident in closed:
            before = [k for at, k in self.struck if at <= incident["opened_at"]]
            found.setdefault(before[-1] if before else "?", []).append(
                incident["phases_s"]["total"]
            )
        counts = Counter(kind.value for _, kind in self.struck)
        lines = [f"seed {self.seed}: {dict(counts)}; {len(closed)} incidents"]
        for kind, times in sorted(found.items()):
            lines.append(f"{kind:>17}: {percentiles(times)}")
        return "\n".join(lines)

    def _strike(self, drawn: random.Random, kinds: list[FaultKind]) -> None:
        self._look_at_processes()
        kind = drawn.choices(kinds, [self.kinds[one] for one in kinds])[0]
        rank = drawn.randrange(self.run.training.parallel.world_size)
        if kind in (FaultKind.NODE_LOSS, FaultKind.PARTITION) and self._away():
            kind = FaultKind.KILL  # two nodes at once may take both copies of a state
        how: dict[str, Any] = {}
        if Injection(kind).victim in (Victim.RANK, Victim.NODE):
            how["rank"] = rank
        if kind is FaultKind.REMOTE_DOWN:
            how["duration_s"] = 2.0
        if kind is FaultKind.PARTITION:
            how["duration_s"] = drawn.uniform(0.2, 4.0)
            self._mended_at = time.time() + how["duration_s"] + MENDING_S
        self.struck.append((time.time(), kind))
        before = self.run.supervisor
        self.run.inject(kind, **how)
        if kind is FaultKind.SUPERVISOR_DEATH:
            self.run.wait(lambda: self.run.supervisor is not before)

    def _away(self) -> bool:
        return bool(self.run.agents.lost_seats) or time.time() < self._mended_at

    def _look_at_processes(self) -> None:
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
    """A program that ends itself twice at one step is its user's error, and ends the job."""
    return kind in IN_A_RECOVERY and not (kind is FaultKind.EXIT and kind in so_far)


def percentiles(times: Sequence[float]) -> str:
    found = sorted(times)
    at = [found[min(len(found) - 1, int(share * len(found)))] for share in (0.5, 0.9, 0.99)]
    return f"{len(found):4d} incidents, p50 {at[0]:.2f} p90 {at[1]:.2f} p99 {at[2]:.2f} s"
