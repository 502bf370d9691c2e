"""The node agent of the simulated cluster: processes and memory, without a network."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from holdfast_service.placement.restore_points import mesh_name, sizes
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_workers.memory.segment_store import mesh_tag
from holdfast_workers.protocol.answers import AgentFailure, AgentReport, WorkerReport
from holdfast_workers.protocol.commands import FreeMemory, SaveShard, SetPartners
from holdfast_workers.protocol.findings import EarlyStop, HealthFinding, HealthReport
from holdfast_workers.protocol.messages import Held, Origin, Place, Restore, Seat, WorkerState
from holdfast_workers.protocol.process_identity import ProcessIdentity
from holdfast_workers.protocol.signals import FailedShard, ShardRecord, Signal, WorkerFailed

EARLY = EarlyStop("eval_loss", 2, 2.5, 10)
"""Why a simulated job ends early."""


@dataclass
class SimWorker:
    name: str
    pid: int
    state: WorkerState = WorkerState.WARM
    attempt: int = 0
    rank: int | None = None
    step: int = 0
    failure: WorkerFailed | None = None
    early: EarlyStop | None = None
    evaluates_first: bool = False
    bound: tuple[str, int] | None = None
    """The mesh and rank that it was built for: it can take no other."""
    hangs: str = ""
    """The process state of a hung worker: R, S, D or T; "" if it does not hang."""


@dataclass
class SimAgent:
    name: str
    config: RecoveryConfig
    domain: str = ""
    machine: str = ""
    alive: bool = True
    reachable: bool = True
    beats: bool = True
    """Whether its lifeline is connected: nothing is granted to it otherwise."""
    silences: int = 0
    """How often its lifeline was reset."""
    counts_as_lost: bool = False
    """Whether the supervisor has given it up since its lifeline ended."""
    ready: bool = False
    copies_unreadable: bool = False
    loses_next_worker: bool = False
    loses_signals: bool = False
    never_ready: bool = False
    failure: AgentFailure | None = None
    build: str = ""
    life: int = 1
    node: int = 1
    store: int = 1
    """Number of its present rendezvous store; 0 while none is running."""
    stores: int = 1
    known_attempt: int = 0
    mesh: dict[str, int] = field(default_factory=dict)
    """The mesh of its last order."""
    signals: int = 0
    workers: dict[str, SimWorker] = field(default_factory=dict)
    memory: dict[tuple[Place, int], list[Held]] = field(default_factory=dict)
    partners: dict[int, tuple[str, ...]] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    """Partners to which replication fails."""
    refused: set[str] = field(default_factory=set)
    """Commands that fail once."""
    restores: dict[int, Restore] = field(default_factory=dict)
    shards: list[ShardRecord] = field(default_factory=list)
    failed_shards: list[FailedShard] = field(default_factory=list)
    saving: set[tuple[int, int, int]] = field(default_factory=set)
    unsent: list[Signal] = field(default_factory=list)
    granted: dict[int, float] = field(default_factory=dict)
    """Attempt → until when its ranks may step."""
    to_finish: set[int] = field(default_factory=set)
    to_leave: set[int] = field(default_factory=set)
    prepared: dict[str | None, int] = field(default_factory=dict)
    """Worker → the rank of another mesh that it was prepared for."""
    health: int = 0
    findings: tuple[HealthFinding, ...] = ()
    _pids: itertools.count[int] = field(default_factory=lambda: itertools.count(100))

    @property
    def incarnation(self) -> str:
        return f"i{self.life}"

    @property
    def capacity(self) -> int:
        return self.config.best_shape.ranks_per_node

    @property
    def store_port(self) -> int:
        return 2000 + self.store if self.store else 0

    def start_store(self) -> None:
        self.stores += 1
        self.store = self.stores

    def report(self) -> AgentReport:
        return AgentReport(
            agent=self.name,
            incarnation=self.incarnation,
            node_id=f"{self.name}-{self.node}",
            host=self.name,
            pid=1,
            data_port=1000 + self.life,
            store_port=self.store_port,
            capacity=self.capacity,
            epoch=0,
            attempt=self.known_attempt,
            ready=self.ready and self.store > 0,
            workers=tuple(
                WorkerReport(
                    *(w.name, w.pid, w.state, w.attempt, w.rank, w.step, w.failure),
                    expected=w.bound[1] if w.rank is None and w.bound is not None else None,
                    expected_mesh=w.bound[0] if w.bound is not None else "",
                    early=w.early,
                    evaluates_first=w.evaluates_first,
                )
                for w in self.workers.values()
            ),
            held=tuple(held for slots in self.memory.values() for held in slots),
            shards=tuple(self.shards),
            saving=tuple(sorted(self.saving)),
            domain=self.domain,
            health=HealthReport(self.health, self.findings),
            failure=self.failure,
            build=self.build,
            process=ProcessIdentity(f"{self.machine} pid:[1]", 1, 0) if self.machine else None,
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

    def prepare(self, place: tuple[str, int]) -> None:
        """Fork a process for this mesh and rank."""
        if self.ready and not any(worker.bound == place for worker in self.workers.values()):
            worker = self.fork()
            worker.bound = place
            self.prepared[worker.name] = place[1]

    def fence(self, attempt: int, *, kill: bool) -> list[SimWorker]:
        """Park workers of older attempts. With `kill`, one of them does not obey and is killed."""
        self.known_attempt = max(self.known_attempt, attempt)
        killed: list[SimWorker] = []
        for worker in list(self.workers.values()):
            if worker.state is WorkerState.WARM or worker.attempt >= attempt:
                continue
            worker.state = WorkerState.PARKED
            if worker.hangs or (kill and not killed):
                killed.append(self.workers.pop(worker.name))
        return killed

    def seat(self, seat: Seat, attempt: int) -> SimWorker | None:
        worker = self.fork() if seat.worker is None else self.workers.get(seat.worker)
        if worker is not None:
            worker.state, worker.attempt, worker.rank = WorkerState.JOINING, attempt, seat.rank
            worker.failure = None
            self.partners[seat.rank] = tuple(partner.agent for partner in seat.partners)
        return worker

    def request_stop(self, attempt: int) -> None:
        if any(worker.attempt == attempt for worker in self.workers.values()):
            self.to_finish.add(attempt)

    def request_leave(self, attempt: int) -> None:
        if any(worker.attempt == attempt for worker in self.workers.values()):
            self.to_leave.add(attempt)

    def set_partners(self, effect: SetPartners) -> None:
        self.partners[effect.rank] = tuple(partner.agent for partner in effect.partners)

    def free(self, effect: FreeMemory) -> None:
        kept = {Place.OWN: effect.own, Place.REPLICA: effect.replicas}
        mesh = mesh_name(effect.mesh)
        for (place, rank), slots in list(self.memory.items()):
            stays = rank in kept[place]
            slots[:] = [s for s in slots if stays and mesh_name(sizes(s.mesh)) == mesh]
            if not slots:
                del self.memory[place, rank]

    def may_save(self, effect: SaveShard) -> bool:
        """Whether the agent holds the requested shard and is not saving it already."""
        slots = self.memory.get((effect.place, effect.rank), [])
        held = any((held.attempt, held.step) == (effect.attempt, effect.step) for held in slots)
        shard = (effect.rank, effect.attempt, effect.step)
        saved = {(record.rank, record.attempt, record.step) for record in self.shards}
        return held and shard not in saved | self.saving

    def newest(self, place: Place, rank: int, attempt: int) -> int:
        """The newest step of that attempt that the agent holds for the rank; -1 if none."""
        slots = self.memory.get((place, rank), [])
        return max((held.step for held in slots if held.attempt == attempt), default=-1)

    def commit(self, rank: int, attempt: int, step: int) -> Held:
        held = Held(rank, step, attempt, mesh_tag(self.mesh), f"{rank}:{step}", 1, Place.OWN)
        self._keep(held)
        return held

    def keep_replica(self, held: Held) -> None:
        self._keep(replace(held, place=Place.REPLICA))

    def holds(self, origin: Origin, source: Restore) -> bool:
        """Whether the agent can serve this part of a state of another mesh."""
        slots = self.memory.get((origin.place, origin.rank), ())
        return (
            self.alive
            and not self.copies_unreadable
            and any(
                (held.attempt, held.step, held.mesh) == (source.attempt, source.step, source.mesh)
                for held in slots
            )
        )

    def keep_resharded(self, rank: int, source: Restore) -> None:
        """The rank has made its part of `source` out of the parts of another mesh."""
        self.commit(rank, source.attempt, source.step)

    def take_copy(self, source: Restore, rank: int, to: SimAgent) -> bool:
        """Copy the state named by `source` into the own memory of `to`. False if it is missing."""
        if self.copies_unreadable:
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
        self.failed_shards.clear()
        self.saving.clear()
        self.unsent.clear()

    def forget(self) -> None:
        self.memory.clear()
        self.node += 1

    def start_again(self) -> None:
        self.life += 1
        self.start_store()
        self.health, self.findings = 0, ()
        self.alive, self.known_attempt = True, 0
        self.partners.clear()

    def _keep(self, held: Held) -> None:
        """Keep two slots per mesh, rank and place: a new step replaces the oldest."""
        slots = self.memory.setdefault((held.place, held.rank), [])
        name = (held.mesh, held.attempt, held.step)
        slots[:] = [other for other in slots if (other.mesh, other.attempt, other.step) != name]
        slots.append(held)
        own = [other for other in slots if other.mesh == held.mesh]
        slots[:] = [other for other in slots if other.mesh != held.mesh] + own[-2:]
