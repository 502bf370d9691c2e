"""Random histories of the queue: jobs arrive, wait, start, change their size, lose nodes and end.

The pure admission decides, on what the store keeps of each job; this file carries it out on a
made-up cluster, as Ray, the supervisors and one or two servers do. In every tick it checks by its
own count that nothing is used twice, that no job passes an overdue one that needs its nodes, that
no job starves, also beside jobs that never end, and that no node stays idle which an unreserved
waiting job could use. Each history depends on its seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tests.support.simulation.simulated_queue_job import ENDLESS, SimulatedJob, fpgas_of

from holdfast_service.job_model.admission import (
    LEAST_WAIT_S,
    Claim,
    LackedNodes,
    NodeDemand,
    QueuePass,
    admit,
    times_overdue,
)
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.node_labels import LabelRule
from holdfast_service.job_model.supervisor_protocol import Capacity, NodeCapacity
from holdfast_service.policy.quarantine import Avoided, NodeStanding
from holdfast_service.store.models import JobRecord

OVERDUE, LONGEST_RUN, PATIENCE = 3, 6, 2
_LONGEST_QUEUE = 10
_LEVELS = 4
"""Sizes of room on a node: the freest node is reserved anew when another has become freer."""
_SLACK = 1e-9
_CORDONED = Avoided(NodeStanding.CORDONED, "cordoned: to be repaired")
_QUARANTINED = Avoided(NodeStanding.QUARANTINED, "quarantined: of late")
_UNSUITABLE = Avoided(NodeStanding.CORDONED, "too small")
_KEPT = Avoided(NodeStanding.CORDONED, "reserved")


HAPPENINGS = {
    *("started", "ended", "reserved", "grown", "given back", "queued again", "foreign"),
    *("in quarantine", "look failed", "not driven", "unsuitable", "impossible", "stale"),
    *("several reserved", "more reserved", "beside an endless job", "held back"),
}


class PromiseBroken(AssertionError):
    """The message names the seed of the history."""


class QueueHistory:
    """One history. `reserves`, `reserves_more`, `keeps_off`: False breaks the promise that no job
    starves."""

    def __init__(
        self,
        seed: int,
        *,
        nodes: Sequence[float] = (),
        reserves: bool = True,
        reserves_more: bool = True,
        keeps_off: bool = True,
    ) -> None:
        """`nodes`: their CPUs; by default random nodes."""
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.reserves, self.keeps_off = reserves, keeps_off
        self.most_overdue = ENDLESS if reserves_more else 1
        self.counts: Counter[str] = Counter()
        self.now = 1
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
        self.aside: dict[str, Avoided] = {}
        self.disturbances = rng.choice((0.0, 0.1, 0.3))
        """The share of ticks with a disturbance."""
        self.failing_looks = 0.0 if nodes else rng.choice((0.0, 0.1, 0.3))
        """The share of looks at the cluster that fail."""
        self.servers = 1 if nodes else rng.choice((1, 2))
        self.placed_later = not nodes and rng.random() < 0.3
        self.is_crowded = rng.random() < 0.005
        self.arriving = 2.0 if self.is_crowded else rng.choice((0.3, 0.6, 1.2))
        self.ticks = 40 if self.is_crowded else rng.choice((6, 12, 12, 24))
        self.has_endless = not nodes and not self.is_crowded and rng.random() < 0.05
        if self.has_endless:
            self.ticks, self.arriving = 80, 1.2
        self._calm_since = 0
        self._first: tuple[int, int] | None = None
        """The first waiting job that fits the cluster, and since when it is that."""
        self._submitted = 0
        self._is_settled = True
        """The last round of tries changed nothing in the queue."""

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
        waits = OVERDUE * 2 ** len(self.whole) + PATIENCE + 1
        work = sum(job.work + waits for job in self.jobs.values())
        for _ in range(_LEVELS * work + LONGEST_RUN):
            if not any(job.is_possible for job in self.jobs.values()):
                return self.counts
            self.pass_time()
        waiting = sorted(number for number, job in self.jobs.items() if job.is_possible)
        raise self._broken(f"jobs {waiting} never end")

    def submit(self, demand: NodeDemand, work: int, priority: int = 0) -> int:
        """Its number."""
        number, self._submitted = self._submitted, self._submitted + 1
        whole = {node: [*room, self._fpgas_of(node)] for node, room in self.whole.items()}
        possible = len(self._room(whole, demand)) >= demand.to_start
        record = JobRecord(
            id=f"{number:04}",
            state=State.QUEUED,
            spec={},
            step=0,
            held_s=0.0,
            productive_s=0.0,
            cursor_attempt=0,
            event_seq=0,
        )
        record.queued_at = float(self.now)
        job = SimulatedJob(number, demand, work, self.now, possible, record, priority)
        if self.disturbances and self.rng.random() < 0.2:
            job.unsuitable = set(self.rng.sample(sorted(self.whole), 1))
        self.jobs[number] = job
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
            work = rng.randint(1, LONGEST_RUN)
            if self.has_endless and rng.random() < 0.1:
                demand, work = replace(demand, cpus=0.5), ENDLESS
            number = self.submit(demand, work, rng.choice((0, 0, 0, -1, 1)))
            if not self.jobs[number].is_possible and rng.random() < 0.9:
                del self.jobs[number]

    def _choosy(self, demand: NodeDemand) -> NodeDemand:
        """The demand with a label, a custom resource, both or none."""
        rng = self.special
        rules = ((), (LabelRule("disk", ("a",)),), (LabelRule("disk", ("a", "b"), negated=True),))
        custom = ((), (("fpga", 1.0),), (("fpga", 2.0),))
        return replace(demand, labels=rng.choice(rules), custom=rng.choice(custom))

    def _disturb(self) -> None:
        """A node is lost or returns, is set aside or not, suits a job or not; another program takes
        or frees CPUs."""
        node = self.rng.choice(sorted(self.whole))
        match self.rng.randrange(5):
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
            case 2 if self.jobs:
                job = self.rng.choice(list(self.jobs.values()))
                job.unsuitable ^= {node}
                self.counts["unsuitable"] += 1
            case 3:
                self._set_aside(node, _CORDONED)
            case _:
                self._set_aside(node, _QUARANTINED)
        self._calm_since = self.now

    def _set_aside(self, node: str, how: Avoided) -> None:
        if self.aside.pop(node, None) is None:
            self.aside[node] = how

    def _order_size(self) -> None:
        """The user of an elastic job orders another size: it gives nodes back, or may grow."""
        elastic = [job for job in self.jobs.values() if job.demand.least and job.is_admitted]
        if elastic:
            job = self.rng.choice(elastic)
            job.limit = self.rng.randint(job.demand.least, job.demand.nodes)
            self.counts["given back"] += max(0, len(job.nodes) - job.limit)
            del job.nodes[job.limit :]

    def _calm_down(self) -> None:
        self.away, self.aside = set(), {}
        for job in self.jobs.values():
            job.unsuitable = set()
            job.work = min(job.work, LONGEST_RUN)  # a user cancels those that never end
        self.foreign = dict.fromkeys(self.whole, 0.0)
        self.disturbances = self.failing_looks = 0.0
        self._calm_since = self.now

    # --- one tick -------------------------------------------------------------------------------

    def _find_nodes(self, job: SimulatedJob) -> None:
        """A started job takes missing nodes, is queued again for lack of them, or grows."""
        if not job.is_admitted:
            return
        if job.is_short:
            self._take(job, job.demand.to_start)
            if len(job.nodes) >= job.demand.to_start:
                job.has_its_place(self.now)
            elif job.off - job.unsuitable:
                self._queue_again(job)
            elif job.short_since is None:
                job.short_since = self.now
                is_calm = job.admitted_at > self._calm_since
                self.counts["without room"] += is_calm and not job.nodes
            elif self.now - job.short_since > PATIENCE:
                self._queue_again(job)
        elif len(job.nodes) < job.most:
            job.is_kept_off = False
            before, off = len(job.nodes), self._others_wait_for(job)
            self._take(job, before + 1, off)
            self.counts["grown"] += len(job.nodes) - before
            self.counts["held back"] += bool(off)

    def _queue_again(self, job: SimulatedJob) -> None:
        job.nodes, job.is_admitted, job.short_since, job.is_kept_off = [], False, None, False
        record = job.stored(self.now)
        if job.record.state == State.RUNNING:
            job.since = self.now
        else:
            self.counts["back at once"] += 1
        for state in (State.PAUSING, State.PAUSED, State.QUEUED):
            record.transition(state)
        record.wait_for("nodes", "it has given its nodes back")
        self.counts["queued again"] += 1

    def _admit_some(self) -> bool:
        """Each waiting job is tried once, in any order, by any server. Whether one may start."""
        waiting = [job for job in self.jobs.values() if not job.is_admitted]
        self.rng.shuffle(waiting)
        views = [self.capacity() for _ in range(self.servers)]
        queue, admitted = self._waiting(), False
        for job in waiting:
            server = self.rng.randrange(self.servers)
            if self.rng.random() < self.failing_looks:
                self._fail(job)
            elif self._admit(job, views[server]):
                views[server], admitted = self.capacity(), True
            elif self.rng.random() < 0.5:
                views[server] = self.capacity()
        self._is_settled = queue == self._waiting()
        return admitted

    def _fail(self, job: SimulatedJob) -> None:
        """The cluster does not answer, or the job cannot be driven."""
        if self.rng.random() < 0.8:
            job.stored(self.now).wait_for("cluster", "no head answers")
            self.counts["look failed"] += 1
        else:
            job.stored(self.now).wait_for("reconciler", "an error")
            self.counts["not driven"] += 1
        self._calm_since = self.now

    def _admit(self, job: SimulatedJob, view: Capacity) -> bool:
        """`view`: what the server has read of the cluster, perhaps before another has admitted."""
        before = [self._claim(other) for other in self._waiting() if other.place < job.place]
        admission = admit(view, self.aside, self._held(), before, self._claim(job))
        record = job.stored(self.now)
        if not admission.may_start:
            record.wait_for("nodes", admission.why, reserved=admission.reservation)
            return False
        is_stale = view.placed != self.capacity().placed
        self.counts["stale"] += is_stale
        self._check_none_is_passed(job, admission.reserved_nodes)
        record.transition(State.STARTING)
        job.record.kept_off = list(admission.reserved_nodes)
        job.is_admitted, job.admitted_at = True, self.now
        job.is_kept_off = self.keeps_off
        room = set(self._room(self.free(), job.demand, job.off))
        if len(room) < job.demand.to_start and not is_stale:
            raise self._broken(f"job {job.number} was admitted to nodes that are in use")
        self.counts["started"] += 1
        self.counts["in quarantine"] += admission.why.startswith("nodes in quarantine are used")
        if not self.placed_later:
            self._take(job, job.most, admission.given_nodes)
            if job.is_short:
                self._take(job, job.demand.to_start)
            if not job.is_short:
                job.has_its_place(self.now)
        return True

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
            placed={job.name: tuple(job.nodes) for job in self.jobs.values() if job.nodes},
        )

    def _held(self) -> list[Claim]:
        return [self._claim(job) for job in self.jobs.values() if job.is_admitted]

    def _claim(self, job: SimulatedJob) -> Claim:
        """As it is made of the job's record."""
        overdue = self._times_overdue(self.now - job.record.queued_at)
        unusable = dict.fromkeys(job.unsuitable, _UNSUITABLE) | dict.fromkeys(
            job.off - job.unsuitable, _KEPT
        )
        overdue = overdue if self.reserves and not job.is_admitted else 0
        return Claim(job.name, job.demand, overdue=overdue, unusable=unusable)

    def _times_overdue(self, waited: float) -> int:
        times = times_overdue(waited * LEAST_WAIT_S, OVERDUE * LEAST_WAIT_S)
        return min(times, self.most_overdue)

    def _waiting(self) -> list[SimulatedJob]:
        """In the order of the queue."""
        waiting = (job for job in self.jobs.values() if job.is_waiting)
        return sorted(waiting, key=lambda job: job.place)

    def _others_wait_for(self, job: SimulatedJob) -> set[str]:
        """The nodes that other jobs lack and could use: the job does not grow on these."""
        others = [
            other
            for other in self.jobs.values()
            if other is not job and (other.is_short or other.is_waiting)
        ]
        lacked = LackedNodes(self.capacity(), self.aside, map(self._claim, others))
        possible = (other for other in others if self._is_possible_now(other, other.off))
        expected = set[str]().union(*(self._large_enough(o, o.off) for o in possible))
        if lacked.beside(job.name) != expected:
            raise self._broken(f"{lacked.beside(job.name)} in place of {expected} are left alone")
        return expected

    # --- the nodes ------------------------------------------------------------------------------

    def free(self) -> dict[str, list[float]]:
        """What no job and no other program uses, on the nodes that may be used."""
        left = self._for_jobs()
        for job in self.jobs.values():
            self._use(left, job.nodes, job.demand)
        return {node: room for node, room in left.items() if self._is_usable(node)}

    def _use(self, free: dict[str, list[float]], nodes: Iterable[str], demand: NodeDemand) -> None:
        for node in nodes:
            for index, amount in enumerate((demand.cpus, demand.gpus, fpgas_of(demand))):
                free[node][index] -= amount

    def _for_jobs(self) -> dict[str, list[float]]:
        return {
            node: [cpus - self.foreign[node], gpus, self._fpgas_of(node)]
            for node, (cpus, gpus) in self.whole.items()
            if node not in self.away
        }

    def _is_usable(self, node: str) -> bool:
        return self.aside.get(node) is not _CORDONED

    def _room(
        self, free: dict[str, list[float]], demand: NodeDemand, off: Iterable[str] = ()
    ) -> list[str]:
        """The nodes that have room for a bundle, the best first."""
        found = [
            node
            for node, (cpus, gpus, fpgas) in free.items()
            if cpus + _SLACK >= demand.cpus and gpus + _SLACK >= demand.gpus
            if fpgas >= fpgas_of(demand)
            if self._has_disk(node, demand) and node not in off
        ]
        return sorted(
            found, key=lambda node: (node in self.aside, -free[node][0], -free[node][1], node)
        )

    def _large_enough(self, job: SimulatedJob, off: Iterable[str]) -> set[str]:
        """The nodes on which the job would fit if no job were there."""
        usable = {node: room for node, room in self._for_jobs().items() if self._is_usable(node)}
        return set(self._room(usable, job.demand, off))

    def _is_possible_now(self, job: SimulatedJob, off: Iterable[str]) -> bool:
        return len(self._large_enough(job, off)) >= job.demand.to_start

    def _has_disk(self, node: str, demand: NodeDemand) -> bool:
        disk = self.disk.get(node)
        return all((disk in rule.values) != rule.negated for rule in demand.labels)

    def _fpgas_of(self, node: str) -> float:
        return self.fpgas[node] if self.is_special else 0.0

    def _take(self, job: SimulatedJob, size: int, off: Iterable[str] = ()) -> None:
        off = {*job.nodes, *job.off, *off}
        job.nodes += self._room(self.free(), job.demand, off)[: size - len(job.nodes)]

    # --- the promises ---------------------------------------------------------------------------

    def _is_overdue(self, job: SimulatedJob) -> bool:
        """Whether no later one may pass it on the nodes that it needs, by its age and the nodes as
        they are."""
        is_late = self.now - job.since > OVERDUE
        is_overdue = is_late and self._is_possible_now(job, job.unsuitable)
        self.counts["impossible"] += is_late and not is_overdue
        return is_overdue

    def _check_none_is_passed(self, job: SimulatedJob, kept_off: Sequence[str]) -> None:
        """An admitted job leaves each overdue job before it enough nodes: it is kept off them, or
        they have room for both."""
        before = [other for other in self.jobs.values() if other.place < job.place]
        tried = [other for other in before if other.waits_for in ("nodes", "cluster")]
        kept = set(kept_off if self.keeps_off else ())
        free = {node: room for node, room in self.free().items() if node not in kept}
        for overdue in filter(self._is_overdue, tried):
            left = self._large_enough(overdue, overdue.unsuitable) & kept
            for_both = replace(
                overdue.demand,
                cpus=overdue.demand.cpus + job.demand.cpus,
                gpus=overdue.demand.gpus + job.demand.gpus,
                custom=(("fpga", fpgas_of(overdue.demand) + fpgas_of(job.demand)),),
            )
            left.update(self._room(free, for_both, overdue.unsuitable))
            if len(left) < overdue.demand.to_start:
                raise self._broken(f"job {overdue.number} is passed by {job.number}: {left} left")

    def _check_nothing_is_used_twice(self) -> None:
        if any(min(room) < -_SLACK for room in self.free().values()):
            raise self._broken(f"a node is used twice: {self.free()}")

    def _check_work_is_conserved(self) -> None:
        """No waiting job has room outside the reserved nodes, and no more are reserved than needed.
        Nothing can be said while started jobs are not placed yet, or after a job came into the
        queue or left it when those behind it had been tried. Nodes are kept for a job whose look at
        the cluster has failed: it starts in a later tick."""
        if not self._is_settled or any(job.is_short for job in self.jobs.values()):
            return
        free, kept = self.free(), set[str]()
        queue = QueuePass(self.capacity(), self.aside, self._held())
        for job in self._waiting():
            queue.serve(self._claim(job))
            needed = job.demand.to_start
            idle = self._room(free, job.demand, {*job.unsuitable, *kept})[:needed]
            own = {node for node, owner in queue.reserved.items() if owner == job.name}
            if len(idle) == needed:
                if job.waits_for == "nodes":
                    raise self._broken(f"job {job.number} waits, although {idle} are free")
                self._use(free, idle, job.demand)
            elif self.reserves and self._is_overdue(job):
                self._check_reservation(job, own, set(idle), kept)
                kept |= own
            elif own:
                raise self._broken(f"{own} are reserved for nothing")
        self.counts["reserved"] += bool(kept)
        self.counts["several reserved"] += len(queue.reservations) > 1

    def _check_reservation(
        self, job: SimulatedJob, own: set[str], idle: set[str], others: set[str]
    ) -> None:
        """It has all idle nodes, and no more of the others than its age gives it."""
        could = self._large_enough(job, job.unsuitable) - others
        missing = job.demand.to_start - len(idle)
        most = missing * self._times_overdue(self.now - job.since)
        if not idle <= own <= could or len(own - idle) != min(most, len(could - idle)):
            raise self._broken(f"{own} are reserved for job {job.number}")
        self.counts["more reserved"] += len(own) > job.demand.to_start

    def _check_no_job_starves(self) -> None:
        """The first job starts within the runs of those that use its nodes."""
        first = next((job for job in self._waiting() if job.is_possible), None)
        if first is None:
            self._first = None
            return
        if self._first is None or self._first[0] != first.number:
            self._first = first.number, self.now
        if not self._is_possible_beside_endless(first):
            self._calm_since = self.now  # too few nodes are left for it
        waits = OVERDUE * 2 ** len(self.whole) + PATIENCE
        bound = waits + _LEVELS * first.demand.to_start * (LONGEST_RUN + 1)
        if self.now - max(self._first[1], self._calm_since) > bound:
            raise self._broken(f"job {first.number} starves since {first.since}")

    def _is_possible_beside_endless(self, job: SimulatedJob) -> bool:
        room = self._for_jobs()
        for other in self.jobs.values():
            if other.is_endless:
                self._use(room, [node for node in other.nodes if node in room], other.demand)
                self.counts["beside an endless job"] += bool(other.nodes)
        usable = {node: left for node, left in room.items() if self._is_usable(node)}
        return len(self._room(usable, job.demand, job.unsuitable)) >= job.demand.to_start

    def _broken(self, promise: str) -> PromiseBroken:
        return PromiseBroken(f"seed {self.seed}, tick {self.now}: {promise}")
