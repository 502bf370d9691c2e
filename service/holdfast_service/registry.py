"""Who holds which step, and from where an attempt can start: pure look-ups over inventories.

Promises: a restore point is one (step, attempt that computed it) which *every* rank can have from
copies not known to be bad; steps of different attempts are never mixed; and it lies on the line
of history, so work that a later attempt has already replaced never comes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from holdfast_workers.messages import Held, Place, Restore, Tier


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A finished checkpoint of the remote tier: `attempt` computed `step`; `uri` is its folder."""

    step: int
    attempt: int
    uri: str
    nbytes: int = 0


@dataclass(frozen=True)
class Copy:
    """One rank's state at one step, in the memory of one agent's node."""

    agent: str
    incarnation: str
    host: str
    data_port: int
    held: Held


@dataclass(frozen=True)
class BadCopy:
    """A copy that failed. With an incarnation it is bad only for that life of the agent: a
    restarted agent verifies its segments again."""

    agent: str
    place: Place
    rank: int
    attempt: int
    step: int
    incarnation: str = ""

    def matches(self, copy: Copy) -> bool:
        held = copy.held
        return (
            (self.agent, self.place, self.rank, self.attempt, self.step)
            == (copy.agent, held.place, held.rank, held.attempt, held.step)
        ) and self.incarnation in ("", copy.incarnation)


@dataclass(frozen=True)
class Branch:
    """An attempt, the step it started from, and whether it may have computed anything."""

    attempt: int
    restored_step: int
    ran: bool = False


@dataclass(frozen=True)
class Line:
    """The line of history: what each attempt took over from those before it."""

    branches: tuple[Branch, ...] = ()

    def formed(self, attempt: int, restored_step: int) -> Line:
        return Line((*self.branches, Branch(attempt, restored_step)))

    def ran(self, attempt: int) -> Line:
        """`attempt` got as far as running: from here on its steps replace older ones."""
        return Line(
            tuple(
                replace(one, ran=True) if one.attempt == attempt else one for one in self.branches
            )
        )

    def holds(self, attempt: int, step: int, *, formed_too: bool = False) -> bool:
        """Whether `step` as computed by `attempt` is part of history: no later attempt that ran
        (or, with `formed_too`, was formed at all) started from an older step."""
        return all(
            step <= later.restored_step
            for later in self.branches
            if later.attempt > attempt and (later.ran or formed_too)
        )


class Source(StrEnum):
    MEMORY = "memory"
    REMOTE = "remote"
    INIT = "init"


@dataclass(frozen=True)
class RestorePoint:
    """The step that all ranks of an attempt start from."""

    source: Source
    step: int = 0
    attempt: int = 0
    uri: str = ""
    copies: Mapping[int, tuple[Copy, ...]] = field(default_factory=dict)


def find_restore_point(
    *,
    world_size: int,
    mesh: Mapping[str, int],
    copies: Iterable[Copy],
    remotes: Iterable[RemoteCheckpoint],
    line: Line,
    bad: frozenset[BadCopy] = frozenset(),
    bad_uris: frozenset[str] = frozenset(),
) -> RestorePoint:
    """The newest step that every rank can have: memory, else remote, else the seed.

    At the same step memory wins over remote, and a later attempt over an earlier one.
    """
    memory = _newest_in_memory(world_size, mesh, copies, line, bad)
    usable = [
        one for one in remotes if one.uri not in bad_uris and line.holds(one.attempt, one.step)
    ]
    remote = max(usable, key=lambda one: (one.step, one.attempt), default=None)
    if memory is not None and (remote is None or memory.step >= remote.step):
        return memory
    if remote is not None and remote.step > 0:
        return RestorePoint(Source.REMOTE, remote.step, remote.attempt, remote.uri)
    return RestorePoint(Source.INIT)


def restore_for(rank: int, agent: str, point: RestorePoint) -> Restore:
    """How the rank, seated on `agent`, gets its state at the restore point."""
    if point.source is Source.INIT:
        return Restore(tier=Tier.INIT, step=0)
    if point.source is Source.REMOTE:
        return Restore(tier=Tier.REMOTE, step=point.step, attempt=point.attempt, uri=point.uri)
    copy = min(
        point.copies[rank],
        key=lambda one: (one.agent != agent, one.held.place is Place.REPLICA, one.agent),
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


def _same_mesh(name: str, mesh: Mapping[str, int]) -> bool:
    axes = [axis for axis in name.split(",") if axis and not axis.endswith("=1")]
    return ",".join(axes) == mesh_name(mesh)


def _newest_in_memory(
    world_size: int,
    mesh: Mapping[str, int],
    copies: Iterable[Copy],
    line: Line,
    bad: frozenset[BadCopy],
) -> RestorePoint | None:
    shelves: dict[tuple[int, int], dict[int, list[Copy]]] = {}
    for copy in copies:
        held = copy.held
        if held.step < 1 or not 0 <= held.rank < world_size or not _same_mesh(held.mesh, mesh):
            continue
        if any(one.matches(copy) for one in bad):
            continue
        shelves.setdefault((held.step, held.attempt), {}).setdefault(held.rank, []).append(copy)
    for step, attempt in sorted(shelves, reverse=True):
        ranks = shelves[step, attempt]
        if len(ranks) == world_size and line.holds(attempt, step):
            found = {rank: tuple(ranks[rank]) for rank in sorted(ranks)}
            return RestorePoint(Source.MEMORY, step, attempt, copies=found)
    return None
