"""Finds the step from which an attempt can start, from inventories of held state. Pure.

Promises: a restore point is one (step, attempt that computed it) that *every* rank can load from
copies not known to be bad; steps of different attempts, and of different saves of a program, are
never mixed; and it is on the line of history, so that work which a later attempt has replaced never
returns.

On the mesh that computed a step, each rank loads its own payload. On any other mesh, ranks load
boxes from any rank that has them: of ranks with equal payloads (`replica_equality`) one is enough.
A step of which a program saved each rank's own state is for its own mesh alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from holdfast_workers.protocol.messages import Held, InitPart, Origin, Place, Restore, Tier
from holdfast_workers.state.replicas import ReplicaEquality, payload_groups


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A finished checkpoint of the remote tier: `attempt` computed `step`; `uri` is its folder."""

    step: int
    attempt: int
    uri: str
    nbytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    mesh: Mapping[str, int] = field(default_factory=dict, hash=False)
    """The mesh that saved it; empty: not known."""


@dataclass(frozen=True)
class HeldCopy:
    """One rank's state at one step, in the memory of one agent's node."""

    agent: str
    incarnation: str
    host: str
    data_port: int
    held: Held


@dataclass(frozen=True)
class BadCopy:
    """A copy that failed to load. With an incarnation it is bad only until that agent restarts: a
    restarted agent verifies its segments again. `agent` "": the state is bad in every copy."""

    agent: str
    place: Place
    rank: int
    attempt: int
    step: int
    incarnation: str = ""

    def matches(self, copy: HeldCopy) -> bool:
        held = copy.held
        if not self.agent:
            return (self.rank, self.attempt, self.step) == (held.rank, held.attempt, held.step)
        return (
            (self.agent, self.place, self.rank, self.attempt, self.step)
            == (copy.agent, held.place, held.rank, held.attempt, held.step)
        ) and self.incarnation in ("", copy.incarnation)


@dataclass(frozen=True)
class AttemptBranch:
    """An attempt, the step it started from, and whether it may have computed steps."""

    attempt: int
    restored_step: int
    ran: bool = False


@dataclass(frozen=True)
class HistoryCut:
    """A rollback: steps after `step`, computed by this attempt or earlier ones, are discarded."""

    attempt: int
    step: int


@dataclass(frozen=True)
class HistoryLine:
    """The line of history: the steps that each attempt took over from earlier attempts."""

    branches: tuple[AttemptBranch, ...] = ()
    cuts: tuple[HistoryCut, ...] = ()

    def with_attempt(self, attempt: int, restored_step: int) -> HistoryLine:
        """The line after `attempt` was formed to start from `restored_step`."""
        return replace(self, branches=(*self.branches, AttemptBranch(attempt, restored_step)))

    def starts_elsewhere(self, step: int) -> bool:
        """Whether an attempt that starts from `step` differs in that from the attempt before it."""
        return not self.branches or self.branches[-1].restored_step != step

    def with_rollback(self, attempt: int, step: int) -> HistoryLine:
        """The line after a rollback: later steps of `attempt` and of earlier ones are discarded."""
        return replace(self, cuts=(*self.cuts, HistoryCut(attempt, step)))

    def with_run(self, attempt: int) -> HistoryLine:
        """The line after `attempt` has started to run: its steps now replace older ones."""
        branches = (
            replace(branch, ran=True) if branch.attempt == attempt else branch
            for branch in self.branches
        )
        return replace(self, branches=tuple(branches))

    def contains(self, attempt: int, step: int, *, formed_too: bool = False) -> bool:
        """Whether `step` as computed by `attempt` is part of history: it was not rolled back, and
        no later attempt that ran (or, with `formed_too`, was only formed) started from an older
        step."""
        kept = all(step <= cut.step for cut in self.cuts if attempt <= cut.attempt)
        return kept and all(
            step <= later.restored_step
            for later in self.branches
            if later.attempt > attempt and (later.ran or formed_too)
        )

    def limits(self) -> dict[int, int]:
        """Attempt → its last step that is part of history, for attempts that have a limit."""
        ends = [(cut.attempt + 1, cut.step) for cut in self.cuts]
        ends += [(branch.attempt, branch.restored_step) for branch in self.branches if branch.ran]
        found = {}
        for branch in self.branches:
            steps = [step for attempt, step in ends if branch.attempt < attempt]
            if steps:
                found[branch.attempt] = min(steps)
        return found


@dataclass(frozen=True)
class InitialCheckpoint:
    """The checkpoint that a job starts from instead of its seed, and the job's step after that."""

    uri: str
    step: int = 0
    what: InitPart = InitPart.MODEL


class RestoreSource(StrEnum):
    """The tier from which an attempt loads its state."""

    MEMORY = "memory"
    RESHARD = "reshard"  # memory too, from the ranks of another mesh
    REMOTE = "remote"
    INIT = "init"


@dataclass(frozen=True)
class RestorePoint:
    """The step that all ranks of an attempt start from."""

    source: RestoreSource
    step: int = 0
    attempt: int = 0
    uri: str = ""
    mesh: str = ""
    what: InitPart = InitPart.EVERYTHING
    copies: Mapping[int, tuple[HeldCopy, ...]] = field(default_factory=dict)

    @property
    def number(self) -> int | None:
        """Number of the save among those of the attempt, for a user's program; None if it is not
        from memory."""
        copies = (copy for of_rank in self.copies.values() for copy in of_rank)
        return next((copy.held.number for copy in copies), None)


def find_restore_point(
    *,
    world_size: int,
    mesh: Mapping[str, int],
    copies: Iterable[HeldCopy],
    remotes: Iterable[RemoteCheckpoint],
    line: HistoryLine,
    bad: frozenset[BadCopy] = frozenset(),
    bad_uris: frozenset[str] = frozenset(),
    initial: InitialCheckpoint | None = None,
    equality: ReplicaEquality = ReplicaEquality.NOTHING,
) -> RestorePoint:
    """The newest step that every rank can load: memory, else remote, else the initial state.

    At the same step, memory is preferred over remote, a later attempt over an earlier one, and
    copies of this mesh over those of another mesh. `equality`: what replicas hold alike.
    """
    found = copies_by_step(copies, bad)
    of_others = _newest_of_others(found, line, equality)
    in_memory = (_newest_of_own(world_size, mesh, found, line), of_others)
    memory = max(
        (point for point in in_memory if point),
        key=lambda point: (point.step, point.attempt),
        default=None,
    )
    usable = [
        checkpoint
        for checkpoint in remotes
        if checkpoint.uri not in bad_uris and line.contains(checkpoint.attempt, checkpoint.step)
    ]
    remote = max(usable, key=lambda remote: (remote.step, remote.attempt), default=None)
    if memory is not None and (remote is None or memory.step >= remote.step):
        return memory
    if remote is not None and remote.step > 0:
        return RestorePoint(
            RestoreSource.REMOTE,
            remote.step,
            remote.attempt,
            remote.uri,
            mesh=",".join(f"{axis}={size}" for axis, size in remote.mesh.items()),
        )
    if initial is not None:
        return RestorePoint(RestoreSource.INIT, initial.step, uri=initial.uri, what=initial.what)
    return RestorePoint(RestoreSource.INIT)


def restore_for(
    rank: int, agent: str, point: RestorePoint, busy: Mapping[str, int] | None = None
) -> Restore:
    """How the rank on `agent` loads its state at the restore point: from its own node if possible,
    else from the agent that serves the fewest other ranks (`busy`: agent -> number of ranks)."""
    if point.source is not RestoreSource.MEMORY:
        return Restore(
            tier=Tier(point.source.value),
            step=point.step,
            attempt=point.attempt,
            uri=point.uri,
            what=point.what,
            mesh=point.mesh,
            origins=tuple(_origin(copy) for held in point.copies.values() for copy in held),
            number=point.number,
        )
    copy = min(
        point.copies[rank],
        key=lambda copy: (
            copy.agent != agent,
            0 if busy is None else busy.get(copy.agent, 0),
            copy.held.place is Place.REPLICA,
            copy.agent,
        ),
    )
    return Restore(
        tier=Tier.OWN_RAM if copy.agent == agent else Tier.PARTNER_RAM,
        step=point.step,
        attempt=point.attempt,
        digest=copy.held.digest,
        agent=copy.agent,
        place=copy.held.place,
        host=copy.host,
        data_port=copy.data_port,
        number=point.number,
    )


def mesh_name(mesh: Mapping[str, int]) -> str:
    """The name of the mesh in payloads. Axes of size one have no effect and are omitted."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)


def is_mesh(name: str, mesh: Mapping[str, int]) -> bool:
    """Whether payloads with this mesh name are of `mesh`."""
    return mesh_name(sizes(name)) == mesh_name(mesh)


def sizes(name: str) -> dict[str, int]:
    """The mesh with this name, outermost axis first."""
    axes = (axis.partition("=") for axis in name.split(",") if axis)
    return {axis: int(size) for axis, _, size in axes}


@dataclass(frozen=True)
class StepCopies:
    """Every copy of one step as computed by one attempt on one mesh, by rank."""

    mesh: str
    step: int
    attempt: int
    copies: Mapping[int, tuple[HeldCopy, ...]]

    @property
    def divisible(self) -> bool:
        """Whether another mesh can load it."""
        return all(copy.held.divisible for copies in self.copies.values() for copy in copies)

    def missing_shards(self, equality: ReplicaEquality) -> list[tuple[int, ...]]:
        """Shards without a copy, each as the ranks of which one copy would be enough."""
        shards = payload_groups(sizes(self.mesh), equality)
        return [ranks for ranks in shards if not set(ranks) & set(self.copies)]


def copies_by_step(copies: Iterable[HeldCopy], bad: frozenset[BadCopy]) -> list[StepCopies]:
    """The copies not known to be bad, with the newest step first, then the latest attempt, and its
    last save."""
    found: dict[tuple[int, int, int, str], dict[int, list[HeldCopy]]] = {}
    for copy in copies:
        held = copy.held
        if held.step < 1 or any(bad_copy.matches(copy) for bad_copy in bad):
            continue
        key = held.step, held.attempt, held.number, held.mesh
        by_rank = found.setdefault(key, {})
        by_rank.setdefault(held.rank, []).append(copy)
    return [
        StepCopies(mesh, step, attempt, {rank: tuple(ranks[rank]) for rank in sorted(ranks)})
        for (step, attempt, _, mesh), ranks in sorted(found.items(), reverse=True)
    ]


def _newest_of_own(
    world_size: int, mesh: Mapping[str, int], found: Iterable[StepCopies], line: HistoryLine
) -> RestorePoint | None:
    for held_step in found:
        whole = set(held_step.copies) >= set(range(world_size))
        if (
            is_mesh(held_step.mesh, mesh)
            and whole
            and line.contains(held_step.attempt, held_step.step)
        ):
            copies = {rank: held_step.copies[rank] for rank in range(world_size)}
            return RestorePoint(
                RestoreSource.MEMORY, held_step.step, held_step.attempt, copies=copies
            )
    return None


def _newest_of_others(
    found: Iterable[StepCopies], line: HistoryLine, equality: ReplicaEquality
) -> RestorePoint | None:
    """The newest restore point of any mesh; also of this mesh, if a rank's own copy is lost but an
    equal one is not."""
    for held_step in found:
        is_known = line.contains(held_step.attempt, held_step.step)
        if is_known and held_step.divisible and not held_step.missing_shards(equality):
            return RestorePoint(
                RestoreSource.RESHARD,
                held_step.step,
                held_step.attempt,
                mesh=held_step.mesh,
                copies=held_step.copies,
            )
    return None


def _origin(copy: HeldCopy) -> Origin:
    held = copy.held
    return Origin(held.rank, copy.agent, held.place, copy.host, copy.data_port, held.digest)
