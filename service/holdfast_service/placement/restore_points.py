"""Who holds which step, and from where an attempt can start: pure look-ups over inventories.

Promises: a restore point is one (step, attempt that computed it) which *every* rank can have from
copies not known to be bad; steps of different attempts are never mixed; and it lies on the line
of history, so work that a later attempt has already replaced never comes back.

A rank of the mesh that computed a step takes its own payload; any other mesh takes boxes from
whichever ranks have them, for which one replica along `dp_replicate` of every shard is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from holdfast_workers.protocol.messages import Held, InitPart, Origin, Place, Restore, Tier
from holdfast_workers.state.replicas import ranks_by_shard


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A finished checkpoint of the remote tier: `attempt` computed `step`; `uri` is its folder."""

    step: int
    attempt: int
    uri: str
    nbytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)


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
    """A copy that failed. With an incarnation it is bad only for that life of the agent: a
    restarted agent verifies its segments again. `agent` "": the state itself is bad, whoever
    holds it and wherever."""

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
    """An attempt, the step it started from, and whether it may have computed anything."""

    attempt: int
    restored_step: int
    ran: bool = False


@dataclass(frozen=True)
class HistoryCut:
    """What the attempts up to this one computed after `step` was taken back on purpose."""

    attempt: int
    step: int


@dataclass(frozen=True)
class HistoryLine:
    """The line of history: what each attempt took over from those before it."""

    branches: tuple[AttemptBranch, ...] = ()
    cuts: tuple[HistoryCut, ...] = ()

    def with_attempt(self, attempt: int, restored_step: int) -> HistoryLine:
        return replace(self, branches=(*self.branches, AttemptBranch(attempt, restored_step)))

    def starts_elsewhere(self, step: int) -> bool:
        """Whether an attempt from `step` starts from another one than the attempt before it."""
        return not self.branches or self.branches[-1].restored_step != step

    def with_rollback(self, attempt: int, step: int) -> HistoryLine:
        """No later step that `attempt`, or one before it, computed belongs to history."""
        return replace(self, cuts=(*self.cuts, HistoryCut(attempt, step)))

    def with_run(self, attempt: int) -> HistoryLine:
        """`attempt` got as far as running: from here on its steps replace older ones."""
        branches = (
            replace(one, ran=True) if one.attempt == attempt else one for one in self.branches
        )
        return replace(self, branches=tuple(branches))

    def contains(self, attempt: int, step: int, *, formed_too: bool = False) -> bool:
        """Whether `step` as computed by `attempt` is part of history: it was not taken back, and
        no later attempt that ran (or, with `formed_too`, was formed at all) started from an older
        step."""
        kept = all(step <= cut.step for cut in self.cuts if attempt <= cut.attempt)
        return kept and all(
            step <= later.restored_step
            for later in self.branches
            if later.attempt > attempt and (later.ran or formed_too)
        )


@dataclass(frozen=True)
class InitialCheckpoint:
    """What a job begins with instead of its seed: a checkpoint, and the step it then stands at."""

    uri: str
    step: int = 0
    what: InitPart = InitPart.MODEL


class RestoreSource(StrEnum):
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


def find_restore_point(
    *,
    world_size: int,
    mesh: Mapping[str, int],
    copies: Iterable[HeldCopy],
    remotes: Iterable[RemoteCheckpoint],
    line: HistoryLine,
    bad: frozenset[BadCopy] = frozenset(),
    bad_uris: frozenset[str] = frozenset(),
    beginning: InitialCheckpoint | None = None,
) -> RestorePoint:
    """The newest step that every rank can have: memory, else remote, else what the job begins with.

    At the same step memory wins over remote, this mesh's own copies over another mesh's, and a
    later attempt over an earlier one.
    """
    found = copies_by_step(copies, bad)
    in_memory = (_newest_of_own(world_size, mesh, found, line), _newest_of_others(found, line))
    memory = max((one for one in in_memory if one), key=lambda one: one.step, default=None)
    usable = [
        one for one in remotes if one.uri not in bad_uris and line.contains(one.attempt, one.step)
    ]
    remote = max(usable, key=lambda one: (one.step, one.attempt), default=None)
    if memory is not None and (remote is None or memory.step >= remote.step):
        return memory
    if remote is not None and remote.step > 0:
        return RestorePoint(RestoreSource.REMOTE, remote.step, remote.attempt, remote.uri)
    if beginning is not None:
        return RestorePoint(
            RestoreSource.INIT, beginning.step, uri=beginning.uri, what=beginning.what
        )
    return RestorePoint(RestoreSource.INIT)


def restore_for(
    rank: int, agent: str, point: RestorePoint, busy: Mapping[str, int] | None = None
) -> Restore:
    """How the rank, seated on `agent`, gets its state at the restore point: from its own node if
    it can, else from the agent that has the fewest others to serve (`busy`: agent → ranks)."""
    if point.source is RestoreSource.INIT:
        return Restore(tier=Tier.INIT, step=point.step, uri=point.uri, what=point.what)
    if point.source is RestoreSource.REMOTE:
        return Restore(tier=Tier.REMOTE, step=point.step, attempt=point.attempt, uri=point.uri)
    if point.source is RestoreSource.RESHARD:
        return Restore(
            tier=Tier.RESHARD,
            step=point.step,
            attempt=point.attempt,
            mesh=point.mesh,
            origins=tuple(_origin(copy) for held in point.copies.values() for copy in held),
        )
    copy = min(
        point.copies[rank],
        key=lambda one: (
            one.agent != agent,
            0 if busy is None else busy.get(one.agent, 0),
            one.held.place is Place.REPLICA,
            one.agent,
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
    )


def mesh_name(mesh: Mapping[str, int]) -> str:
    """The mesh as payloads name it; axes of size one change nothing and are left out."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)


def is_mesh(name: str, mesh: Mapping[str, int]) -> bool:
    """Whether payloads named so are of `mesh`."""
    return mesh_name(sizes(name)) == mesh_name(mesh)


def sizes(name: str) -> dict[str, int]:
    """The mesh that payloads name so, outermost axis first."""
    axes = (axis.partition("=") for axis in name.split(",") if axis)
    return {axis: int(size) for axis, _, size in axes}


@dataclass(frozen=True)
class StepCopies:
    """Every copy of one step, as one attempt computed it on one mesh, by rank."""

    mesh: str
    step: int
    attempt: int
    copies: Mapping[int, tuple[HeldCopy, ...]]

    def missing_shards(self) -> list[tuple[int, ...]]:
        """Shards that nobody holds, each as the ranks of which one would be enough."""
        return [
            ranks for ranks in ranks_by_shard(sizes(self.mesh)) if not set(ranks) & set(self.copies)
        ]


def copies_by_step(copies: Iterable[HeldCopy], bad: frozenset[BadCopy]) -> list[StepCopies]:
    """The copies that are not known to be bad, newest step first, then latest attempt."""
    found: dict[tuple[int, int, str], dict[int, list[HeldCopy]]] = {}
    for copy in copies:
        held = copy.held
        if held.step < 1 or any(one.matches(copy) for one in bad):
            continue
        shelf = found.setdefault((held.step, held.attempt, held.mesh), {})
        shelf.setdefault(held.rank, []).append(copy)
    return [
        StepCopies(mesh, step, attempt, {rank: tuple(ranks[rank]) for rank in sorted(ranks)})
        for (step, attempt, mesh), ranks in sorted(found.items(), reverse=True)
    ]


def _newest_of_own(
    world_size: int, mesh: Mapping[str, int], found: Iterable[StepCopies], line: HistoryLine
) -> RestorePoint | None:
    for shelf in found:
        whole = set(shelf.copies) >= set(range(world_size))
        if is_mesh(shelf.mesh, mesh) and whole and line.contains(shelf.attempt, shelf.step):
            copies = {rank: shelf.copies[rank] for rank in range(world_size)}
            return RestorePoint(RestoreSource.MEMORY, shelf.step, shelf.attempt, copies=copies)
    return None


def _newest_of_others(found: Iterable[StepCopies], line: HistoryLine) -> RestorePoint | None:
    """Of this mesh too, if a rank's own copy is gone and a replica of its shard is not."""
    for shelf in found:
        if line.contains(shelf.attempt, shelf.step) and not shelf.missing_shards():
            return RestorePoint(
                RestoreSource.RESHARD,
                shelf.step,
                shelf.attempt,
                mesh=shelf.mesh,
                copies=shelf.copies,
            )
    return None


def _origin(copy: HeldCopy) -> Origin:
    held = copy.held
    return Origin(held.rank, copy.agent, held.place, copy.host, copy.data_port, held.digest)
