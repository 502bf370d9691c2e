"""A storm over an elastic job: nodes are lost, join and drain, sizes are ordered, processes die.

The events are determined by a seed. At least one node stays, so the job never has to wait for long.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.support.nodes.supervised import SupervisedRun

from holdfast_service.job_model.supervisor_protocol import SizeOrder
from holdfast_workers.fault_injection.kinds import FaultKind

ADVANCE_S = 240.0
DRAIN_S = 2.0
JOIN, LOSS, DRAIN, ORDER = "join", "loss", "drain", "order"
NODE_EVENTS: Mapping[str, int] = {JOIN: 9, LOSS: 4, DRAIN: 3, ORDER: 5}
FAULTS: Mapping[FaultKind, int] = {
    FaultKind.KILL: 5,
    FaultKind.SEGFAULT: 1,
    FaultKind.STOP: 1,
    FaultKind.GIL: 1,
    FaultKind.AGENT_DEATH: 2,
    FaultKind.SUPERVISOR_DEATH: 2,
    FaultKind.RESET: 2,
}
BURST_SHARE = 0.25
"""Share of the events that follow the one before at once."""


@dataclass
class ElasticStorm:
    """Causes `events` events in the run. Which ranks and nodes exist changes with them."""

    run: SupervisedRun
    seed: int
    events: int
    caused: list[str] = field(default_factory=list)
    _draining: dict[str, float] = field(default_factory=dict)
    """Seat → when its node is removed."""

    def cause_all(self) -> None:
        generator = random.Random(self.seed)
        while len(self.caused) < self.events:
            self._let_steps_pass(generator.randrange(2, 9))
            self._cause_one(generator)
            while len(self.caused) < self.events and generator.random() < BURST_SHARE:
                time.sleep(generator.uniform(0.0, 0.4))  # at a random time of the change before
                self._cause_one(generator)
        self._end_drains()
        for seat in self.run.agents.lost_seats:
            self.run.agents.return_node(seat)
        self.run.supervisor.resize(SizeOrder(None))

    def summary(self) -> str:
        return f"seed {self.seed}: {dict(sorted(Counter(self.caused).items()))}"

    def _cause_one(self, generator: random.Random) -> None:
        kinds = [*NODE_EVENTS, *FAULTS]
        weights = [*NODE_EVENTS.values(), *FAULTS.values()]
        kind = generator.choices(kinds, weights)[0]
        seat = generator.choice(self.run.agents.seats)
        present = self._present()
        match kind:
            case "join":
                away = self.run.agents.lost_seats
                if not away:
                    return
                self.run.agents.return_node(generator.choice(away))
            case "loss" | "drain":
                if len(present) < 2 or seat not in present:
                    return
                if kind == LOSS:
                    self.run.agents.kill_node(seat)
                else:
                    self._drain(seat)
            case "order":
                nodes = generator.choice((None, None, 4, 3, 2, 1))
                self.run.supervisor.resize(SizeOrder(nodes))
            case FaultKind():
                self._inject(kind, generator)
        self.caused.append(str(kind))

    def _inject(self, kind: FaultKind, generator: random.Random) -> None:
        ranks = 2 * max(1, len(self._present()))
        has_rank = kind.spec.has_rank
        before = self.run.supervisor
        self.run.inject(kind, **({"rank": generator.randrange(ranks)} if has_rank else {}))
        if kind is FaultKind.SUPERVISOR_DEATH:
            self.run.wait(lambda: self.run.supervisor is not before, ADVANCE_S)

    def _drain(self, seat: str) -> None:
        """The cluster announces the removal of a node."""
        deadline = time.time() + DRAIN_S
        self._draining[seat] = deadline
        self.run.agents.draining_nodes[self.run.agents.agents[seat].config.node_id] = deadline

    def _end_drains(self, now: float | None = None) -> None:
        """The cluster removes the nodes whose deadline has passed."""
        for seat, deadline in [*self._draining.items()]:
            if now is None or now >= deadline:
                del self._draining[seat]
                self.run.agents.kill_node(seat)

    def _present(self) -> list[str]:
        """The seats whose nodes stay."""
        gone = {*self.run.agents.lost_seats, *self._draining}
        return [seat for seat in self.run.agents.seats if seat not in gone]

    def _let_steps_pass(self, steps: int) -> None:
        """Wait for further steps, from the newest known one on, which a fault may take back."""
        made = len(self.run.all_rows) + steps

        def has_passed() -> bool:
            self._end_drains(time.time())
            return len(self.run.all_rows) >= made

        self.run.wait(has_passed, ADVANCE_S)
