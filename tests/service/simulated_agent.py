"""The node agent of the simulated cluster: processes and memory, no network."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from holdfast_service.recovery.config import RecoveryConfig
from holdfast_service.recovery.effects import SetPartner
from holdfast_workers.messages import (
    AgentReport,
    Held,
    Place,
    Restore,
    Seat,
    Signal,
    WorkerError,
    WorkerReport,
    WorkerState,
)


@dataclass
class SimWorker:
    name: str
    pid: int
    state: WorkerState = WorkerState.WARM
    attempt: int = 0
    rank: int | None = None
    step: int = 0
    error: WorkerError | None = None


@dataclass
class SimAgent:
    name: str
    config: RecoveryConfig
    domain: str = ""
    alive: bool = True
    reachable: bool = True
    ready: bool = False
    rotten: bool = False
    sticky: bool = False
    life: int = 1
    node: int = 1
    told: int = 0
    signals: int = 0
    workers: dict[str, SimWorker] = field(default_factory=dict)
    memory: dict[tuple[Place, int], list[Held]] = field(default_factory=dict)
    partners: dict[int, str | None] = field(default_factory=dict)
    restores: dict[int, Restore] = field(default_factory=dict)
    shards: list[dict[str, int]] = field(default_factory=list)
    unsent: list[Signal] = field(default_factory=list)
    _pids: itertools.count[int] = field(default_factory=lambda: itertools.count(100))

    @property
    def incarnation(self) -> str:
        return f"i{self.life}"

    @property
    def capacity(self) -> int:
        return self.config.workers_per_node

    def report(self) -> AgentReport:
        return AgentReport(
            agent=self.name,
            incarnation=self.incarnation,
            node_id=f"{self.name}-{self.node}",
            host=self.name,
            pid=1,
            data_port=1000 + self.life,
            store_port=2000 + self.life,
            capacity=self.capacity,
            epoch=0,
            attempt=self.told,
            ready=self.ready,
            workers=tuple(
                WorkerReport(w.name, w.pid, w.state, w.attempt, w.rank, w.step, w.error)
                for w in self.workers.values()
            ),
            held=tuple(held for slots in self.memory.values() for held in slots),
            shards=tuple(dict(shard) for shard in self.shards),
            domain=self.domain,
        )

    def become_ready(self) -> None:
        self.ready = True
        self.warm_up()

    def warm_up(self) -> None:
        while self.ready and len(self.workers) < self.capacity:
            self.fork()

    def fork(self) -> SimWorker:
        pid = next(self._pids)
        worker = SimWorker(f"{self.name}.{self.incarnation}.{pid}", pid)
        self.workers[worker.name] = worker
        return worker

    def fence(self, attempt: int, *, kill: bool) -> list[SimWorker]:
        """Park what is of an older attempt; with `kill`, one of them does not obey and dies."""
        self.told = max(self.told, attempt)
        killed: list[SimWorker] = []
        for worker in list(self.workers.values()):
            if worker.state is WorkerState.WARM or worker.attempt >= attempt:
                continue
            worker.state = WorkerState.PARKED
            if kill and not killed:
                killed.append(self.workers.pop(worker.name))
        return killed

    def seat(self, seat: Seat, attempt: int) -> SimWorker | None:
        worker = self.fork() if seat.worker is None else self.workers.get(seat.worker)
        if worker is not None:
            worker.state, worker.attempt, worker.rank = WorkerState.JOINING, attempt, seat.rank
            worker.error = None
            self.partners[seat.rank] = seat.partner.agent if seat.partner else None
        return worker

    def set_partner(self, effect: SetPartner) -> None:
        self.partners[effect.rank] = effect.partner.agent if effect.partner else None

    def commit(self, rank: int, attempt: int, step: int) -> Held:
        held = Held(rank, step, attempt, self._mesh(), f"{rank}:{step}", 1, Place.OWN)
        self._keep(held)
        return held

    def keep_replica(self, held: Held) -> None:
        self._keep(replace(held, place=Place.REPLICA))

    def take_copy(self, source: Restore, rank: int, to: SimAgent) -> bool:
        """Bring the copy that `source` names into the own memory of `to`, if it is there."""
        if self.rotten:
            return False
        for held in self.memory.get((source.place, rank), []):
            if (held.attempt, held.step) == (source.attempt, source.step):
                to._keep(replace(held, place=Place.OWN))
                return True
        return False

    def die(self) -> None:
        self.alive, self.ready = False, False
        self.workers.clear()
        self.shards.clear()
        self.unsent.clear()

    def forget(self) -> None:
        self.memory.clear()
        self.node += 1

    def start_again(self) -> None:
        self.life += 1
        self.alive, self.told = True, 0
        self.partners.clear()

    def _keep(self, held: Held) -> None:
        """Two slots per rank and place: a new step takes that of the older one."""
        slots = self.memory.setdefault((held.place, held.rank), [])
        slots[:] = [one for one in slots if (one.attempt, one.step) != (held.attempt, held.step)]
        slots.append(held)
        del slots[:-2]

    def _mesh(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.config.mesh.items())
