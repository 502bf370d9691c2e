"""Random histories of the queue: jobs arrive, wait, start, change their size, lose nodes and end.

The pure admission decides; this file carries it out on a made-up cluster, as Ray and the
supervisors do, and checks in every tick that nothing is used twice, that no job starves, and that
no node stays idle which an unreserved waiting job could use. Each history depends on its seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from holdfast_service.job_model.admission import (
    Claim,
    FreeNode,
    NodeDemand,
    admit,
    nodes_to_reserve,
    reason_to_wait,
    usable,
)
from holdfast_service.job_model.node_labels import LabelRule
from holdfast_service.job_model.supervisor_protocol import Capacity, NodeCapacity
from holdfast_service.policy.quarantine import Avoided, NodeStanding

OVERDUE, LONGEST_RUN, PATIENCE = 3, 6, 2
_LONGEST_QUEUE = 10
_LEVELS = 4
"""Sizes of room on a node: the freest node is reserved anew when another has become freer."""
_SLACK = 1e-9
_CORDONED = Avoided(NodeStanding.CORDONED, "cordoned: to be repaired")


HAPPENINGS = {"started", "ended", "reserved", "grown", "given back", "queued again", "foreign"}


class PromiseBroken(AssertionError):
    """The message names the seed of the history."""


@dataclass
class SimulatedJob:
    number: int
    demand: NodeDemand
    work: int
    """Ticks that it still has to run with enough nodes."""
    since: int
    """When it was queued."""
    is_possible: bool
    """Whether it fits into the whole cluster."""
    priority: int = 0
    is_tried: bool = False
    is_admitted: bool = False
    nodes: list[str] = field(default_factory=list)
    limit: int = 0
    """Most nodes that it takes; 0: as many as it may."""
    admitted_at: int = 0
    reserved: tuple[str, ...] = ()
    """The nodes that it must not take when it starts."""
    short_since: int | None = None

    @property
    def name(self) -> str:
        return f"{self.number:04}"

    @property
    def place(self) -> tuple[int, int]:
        """Its order in the queue."""
        return -self.priority, self.number

    @property
    def most(self) -> int:
        return self.limit or self.demand.nodes

    @property
    def is_short(self) -> bool:
        return self.is_admitted and len(self.nodes) < self.demand.to_start


class QueueHistory:
    """One history. `reserves`, `keeps_off`: False breaks the promise that no job starves."""

    def __init__(
        self,
        seed: int,
        *,
        nodes: Sequence[float] = (),
        reserves: bool = True,
        keeps_off: bool = True,
    ) -> None:
        """`nodes`: their CPUs; by default random nodes."""
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.reserves, self.keeps_off = reserves, keeps_off
        self.counts: Counter[str] = Counter()
        self.now = 0
        self.jobs: dict[int, SimulatedJob] = {}
        """Jobs that have not ended, the oldest first."""
        self.whole = {
            f"n{index}": (rng.choice((0.5, 1.0, 2.0)), rng.choice((0.0, 0.0, 1.0)))
            for index in range(rng.randint(1, 4))
        }
        special = random.Random(f"labels and custom resources {seed}")
        self.is_special = not nodes and special.random() < 0.3
        """Whether nodes differ by a label and a custom resource, and jobs ask for them."""
        self.special = special
        self.disk = {node: special.choice(("a", "b", "")) for node in self.whole}
        self.fpgas = {node: float(special.randint(0, 2)) for node in self.whole}
        if nodes:
            self.disk, self.fpgas = {}, {}
            self.whole = {f"n{index}": (cpus, 0.0) for index, cpus in enumerate(nodes)}
        self.foreign = dict.fromkeys(self.whole, 0.0)
        self.away: set[str] = set()
        self.cordoned: set[str] = set()
        self.disturbances = rng.choice((0.0, 0.1, 0.3))
        """The share of ticks with a disturbance."""
        self.placed_later = not nodes and rng.random() < 0.3
        self.is_crowded = rng.random() < 0.005
        self.arriving = 2.0 if self.is_crowded else rng.choice((0.3, 0.6, 1.2))
        self.ticks = 40 if self.is_crowded else rng.choice((6, 12, 12, 24))
        self._calm_since = 0
        self._first: tuple[int, int] | None = None
        """The first waiting job that fits the cluster, and since when it is that."""
        self._submitted = 0

    def play(self) -> Counter[str]:
        """The whole history, and what has happened in it. Raises PromiseBroken."""
        for _ in range(self.ticks):
            self._arrive()
            if self.rng.random() < self.disturbances:
                self._disturb()
            if self.rng.random() < 0.3:
                self._order_size()
            self.pass_time()
        self._calm_down()
        work = sum(job.work + OVERDUE + PATIENCE + 1 for job in self.jobs.values())
        for _ in range(_LEVELS * work + LONGEST_RUN):
            if not any(job.is_possible for job in self.jobs.values()):
                return self.counts
            self.pass_time()
        waiting = sorted(number for number, job in self.jobs.items() if job.is_possible)
        raise self._broken(f"jobs {waiting} never end")

    def submit(self, demand: NodeDemand, work: int, priority: int = 0) -> int:
        """Its number."""
        number, self._submitted = self._submitted, self._submitted + 1
        possible = self._is_possible(demand)
        self.jobs[number] = SimulatedJob(number, demand, work, self.now, possible, priority)
        return number

    def pass_time(self) -> None:
        """One tick."""
        self.now += 1
        for job in list(self.jobs.values()):
            if job.is_admitted and not job.is_short:
                job.work -= 1
                if job.work <= 0:
                    del self.jobs[job.number]
                    self.counts["ended"] += 1
        for job in self.jobs.values():
            self._find_nodes(job)
        while self._admit_some():
            pass
        self._check_nothing_is_used_twice()
        self._check_work_is_conserved()
        self._check_no_job_starves()

    def _is_possible(self, demand: NodeDemand) -> bool:
        """Whether the job fits into the whole cluster."""
        whole = {
            node: [cpus, gpus, self._fpgas_of(node)] for node, (cpus, gpus) in self.whole.items()
        }
        return len(self._room(whole, demand)) >= demand.to_start

    # --- what happens to the cluster ------------------------------------------------------------

    def _arrive(self) -> None:
        rng = self.rng
        for _ in range(int(self.arriving) + (rng.random() < self.arriving % 1.0)):
            waiting = sum(not job.is_admitted for job in self.jobs.values())
            if waiting >= _LONGEST_QUEUE and not self.is_crowded:
                return
            nodes = rng.randint(1, 4)
            least = rng.randint(1, nodes) if rng.random() < 0.6 else 0
            gpus = 1.0 if rng.random() < 0.1 else 0.0
            demand = NodeDemand(nodes, rng.choice((0.5, 1.0, 2.0)), gpus, least)
            if self.is_special:
                demand = self._choosy(demand)
            if self._is_possible(demand) or rng.random() < 0.1:
                self.submit(demand, rng.randint(1, LONGEST_RUN), rng.choice((0, 0, 0, -1, 1)))

    def _choosy(self, demand: NodeDemand) -> NodeDemand:
        """The demand with a label, a custom resource, both or none."""
        rng = self.special
        rules = ((), (LabelRule("disk", ("a",)),), (LabelRule("disk", ("a", "b"), negated=True),))
        custom = ((), (("fpga", 1.0),), (("fpga", 2.0),))
        return replace(demand, labels=rng.choice(rules), custom=rng.choice(custom))

    def _disturb(self) -> None:
        """A node is lost or returns, is cordoned or not; another program takes or frees CPUs."""
        node = self.rng.choice(sorted(self.whole))
        match self.rng.randrange(3):
            case 0:
                self.away ^= {node}
                for job in self.jobs.values():
                    if node in self.away and node in job.nodes:
                        job.nodes.remove(node)
                self.foreign[node] = 0.0
            case 1:
                free = self.free().get(node, [0.0])[0]
                self.foreign[node] = 0.0 if self.foreign[node] else self.rng.choice((0.5, 1.0))
                if self.foreign[node] > free + _SLACK:
                    self.foreign[node] = 0.0
                self.counts["foreign"] += 1
            case _:
                self.cordoned ^= {node}
        self._calm_since = self.now

    def _order_size(self) -> None:
        """The user of an elastic job orders another size: it gives nodes back, or may grow."""
        elastic = [job for job in self.jobs.values() if job.demand.least and job.is_admitted]
        if elastic:
            job = self.rng.choice(elastic)
            job.limit = self.rng.randint(job.demand.least, job.demand.nodes)
            self.counts["given back"] += max(0, len(job.nodes) - job.limit)
            del job.nodes[job.limit :]

    def _calm_down(self) -> None:
        self.away, self.cordoned = set(), set()
        self.foreign = dict.fromkeys(self.whole, 0.0)
        self._calm_since = self.now

    # --- one tick -------------------------------------------------------------------------------

    def _find_nodes(self, job: SimulatedJob) -> None:
        """A started job takes missing nodes, is queued again for lack of them, or grows."""
        if not job.is_admitted:
            return
        if job.is_short:
            self._take(job, job.demand.to_start)
            job.reserved = ()
            if len(job.nodes) >= job.demand.to_start:
                job.short_since = None
            elif job.short_since is None:
                job.short_since = self.now
                is_calm = job.admitted_at > self._calm_since
                self.counts["without room"] += is_calm and not job.nodes
            elif self.now - job.short_since > PATIENCE:
                job.nodes, job.is_admitted, job.is_tried = [], False, False
                job.short_since, job.since = None, self.now
                self.counts["queued again"] += 1
        elif len(job.nodes) < job.most and not self._others_wait(job):
            job.reserved = ()
            self._take(job, len(job.nodes) + 1)
            self.counts["grown"] += 1

    def _admit_some(self) -> bool:
        """Each waiting job is tried once, in any order. Whether one of them may start."""
        waiting = [job for job in self.jobs.values() if not job.is_admitted]
        self.rng.shuffle(waiting)
        capacity, held, aside = self.capacity(), self._held(), self._aside()
        admitted = False
        for job in waiting:
            before = [self._claim(other) for other in self._waiting() if other.place < job.place]
            admission = admit(capacity, aside, held, before, job.demand)
            if not admission.may_start:
                job.is_tried = True
                continue
            job.reserved = admission.reserved_nodes if self.keeps_off else ()
            room = self._room(self.free(), job.demand)
            if len(set(room) - set(job.reserved)) < job.demand.to_start:
                raise self._broken(f"job {job.number} was admitted to nodes that are in use")
            job.is_admitted, job.admitted_at, admitted = True, self.now, True
            self.counts["started"] += 1
            if not self.placed_later:
                self._take(job, job.most)
            capacity, held = self.capacity(), self._held()
        return admitted

    # --- what the admission sees ----------------------------------------------------------------

    def capacity(self) -> Capacity:
        return Capacity(
            tuple(
                NodeCapacity(
                    node,
                    node,
                    cpus,
                    gpus,
                    foreign_cpus=self.foreign[node],
                    custom={"fpga": self._fpgas_of(node)} if self.is_special else {},
                    labels={"disk": self.disk[node]} if self.disk.get(node) else {},
                )
                for node, (cpus, gpus) in self.whole.items()
                if node not in self.away
            ),
            can_grow=False,
            placed={job.name: job.nodes for job in self.jobs.values() if job.nodes},
        )

    def _aside(self) -> dict[str, Avoided]:
        return dict.fromkeys(self.cordoned, _CORDONED)

    def _held(self) -> list[Claim]:
        return [Claim(job.name, job.demand) for job in self.jobs.values() if job.is_admitted]

    def _claim(self, job: SimulatedJob) -> Claim:
        return Claim(job.name, job.demand, is_overdue=self._is_overdue(job))

    def _is_overdue(self, job: SimulatedJob) -> bool:
        return self.reserves and self.now - job.since > OVERDUE

    def _waiting(self) -> list[SimulatedJob]:
        """In the order of the queue."""
        waiting = (job for job in self.jobs.values() if job.is_tried and not job.is_admitted)
        return sorted(waiting, key=lambda job: job.place)

    def _others_wait(self, job: SimulatedJob) -> bool:
        """Whether another job lacks nodes that the cluster has: then this one does not grow."""
        bare = self.capacity()
        return any(
            reason_to_wait(bare, (), (), other.demand) is None
            for other in self.jobs.values()
            if other is not job and (other.is_short or (other.is_tried and not other.is_admitted))
        )

    # --- the nodes ------------------------------------------------------------------------------

    def free(self) -> dict[str, list[float]]:
        """What no job and no other program uses, on the nodes that may be used."""
        left = {
            node: [cpus - self.foreign[node], gpus, self._fpgas_of(node)]
            for node, (cpus, gpus) in self.whole.items()
            if node not in self.away
        }
        for job in self.jobs.values():
            for node in job.nodes:
                left[node][0] -= job.demand.cpus
                left[node][1] -= job.demand.gpus
                left[node][2] -= dict(job.demand.custom).get("fpga", 0.0)
        return {node: room for node, room in left.items() if node not in self.cordoned}

    def _room(self, free: dict[str, list[float]], demand: NodeDemand) -> list[str]:
        """The nodes that have room for a bundle, those with most free first."""
        found = [
            node
            for node, (cpus, gpus, fpgas) in free.items()
            if cpus + _SLACK >= demand.cpus and gpus + _SLACK >= demand.gpus
            if fpgas >= dict(demand.custom).get("fpga", 0.0)
            if self._has_disk(node, demand)
        ]
        return sorted(found, key=lambda node: (-free[node][0], -free[node][1], node))

    def _has_disk(self, node: str, demand: NodeDemand) -> bool:
        disk = self.disk.get(node)
        return all((disk in rule.values) != rule.negated for rule in demand.labels)

    def _as_free_nodes(self, free: dict[str, list[float]]) -> dict[str, FreeNode]:
        labels = {node.node_id: node.labels for node in self.capacity().nodes}
        return {
            node: FreeNode(dict(zip(("CPU", "GPU", "fpga"), left, strict=True)), labels[node])
            for node, left in free.items()
        }

    def _fpgas_of(self, node: str) -> float:
        return self.fpgas[node] if self.is_special else 0.0

    def _take(self, job: SimulatedJob, size: int) -> None:
        taken = {*job.nodes, *job.reserved}
        room = [node for node in self._room(self.free(), job.demand) if node not in taken]
        job.nodes += room[: size - len(job.nodes)]

    # --- the promises ---------------------------------------------------------------------------

    def _check_nothing_is_used_twice(self) -> None:
        if any(min(room) < -_SLACK for room in self.free().values()):
            raise self._broken(f"a node is used twice: {self.free()}")

    def _check_work_is_conserved(self) -> None:
        """No waiting job has room outside the reserved nodes. Nodes are kept for started jobs that
        are not placed yet, so nothing can be said as long as there are any."""
        if any(job.is_short for job in self.jobs.values()):
            return
        free, reserved = self.free(), set[str]()
        capacity = usable(self.capacity(), self._aside())
        for job in self._waiting():
            idle = [node for node in self._room(free, job.demand) if node not in reserved]
            if len(idle) >= job.demand.to_start:
                raise self._broken(f"job {job.number} waits, although {idle} are free")
            if self._is_overdue(job) and not reserved:
                reserved = set(nodes_to_reserve(capacity, self._as_free_nodes(free), job.demand))
                if len(reserved) > job.demand.to_start:
                    raise self._broken(f"{reserved} are reserved for {job.number}")
                self.counts["reserved"] += bool(reserved)

    def _check_no_job_starves(self) -> None:
        """The first job starts within the runs of those that use its nodes."""
        first = next((job for job in self._waiting() if job.is_possible), None)
        if first is None:
            self._first = None
            return
        if self._first is None or self._first[0] != first.number:
            self._first = first.number, self.now
        bare = usable(self.capacity(), self._aside())
        if reason_to_wait(bare, (), (), first.demand) is not None:
            self._calm_since = self.now  # too few nodes are left for it
        bound = OVERDUE + PATIENCE + _LEVELS * first.demand.to_start * (LONGEST_RUN + 1)
        if self.now - max(self._first[1], self._calm_since) > bound:
            raise self._broken(f"job {first.number} starves since {first.since}")

    def _broken(self, promise: str) -> PromiseBroken:
        return PromiseBroken(f"seed {self.seed}, tick {self.now}: {promise}")
