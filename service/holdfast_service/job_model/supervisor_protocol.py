"""The protocol between supervisor and reconciler, and the reconciler's interface to the cluster.

The reconciler pulls events: the supervisor keeps numbered events; the reconciler fetches those
after the last number it has stored and writes them, with the rows they change, in one transaction.
An event carries everything that the tables need, so a replay from number 0 rebuilds them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast_service.diagnosis.node_faults import InspectedNode
from holdfast_service.job_model.events.kinds import EventKind
from holdfast_service.job_model.lifecycle import Phase, StopKind, StopOrder
from holdfast_service.placement.restore_points import InitialCheckpoint
from holdfast_service.policy.quarantine import Avoided
from holdfast_workers.protocol.messages import Beat, LogLine, StepRow, SupervisorEvent
from holdfast_workers.protocol.processes import StorageOptions

__all__ = [
    "AvoidOrder",
    "Capacity",
    "Cluster",
    "ClusterUnavailable",
    "Cursors",
    "EventKind",
    "FaultOrder",
    "GrowthRequest",
    "JobLaunch",
    "LaunchRefused",
    "NodeCapacity",
    "PathAnswer",
    "Phase",
    "SizeOrder",
    "StopKind",
    "StopOrder",
    "SupervisorEvent",
    "SupervisorReport",
    "SupervisorUnavailable",
]


@dataclass(frozen=True)
class FaultOrder:
    """Order to inject a fault. The supervisor accepts each number once, in order."""

    number: int
    fault: dict[str, Any]  # `Injection.document()`


@dataclass(frozen=True)
class AvoidOrder:
    """The complete set of nodes that are set aside now, by name."""

    nodes: dict[str, Avoided]


@dataclass(frozen=True)
class SizeOrder:
    """The size that an elastic job is to have."""

    nodes: int | None
    """Most nodes that may train, as the user ordered; None: as many as the spec allows."""
    is_held: bool = False
    """Other jobs wait for nodes: this one must not take more, or only some."""
    held_off: tuple[str, ...] | None = None
    """If it is held: the ids of the nodes that the others wait for, sorted; it may take others.
    None: it must take none."""

    @property
    def holds_all(self) -> bool:
        return self.is_held and self.held_off is None


_EVENTS_PER_EPOCH = 1 << 32


def first_event(epoch: int, after: int = 0) -> int:
    """The number of the first event of the supervisor with this epoch.

    It is higher than every number that an earlier supervisor has used or still uses, whichever of
    them this supervisor knows. `after`: a number that is in use, for an epoch that is not certain
    to be the highest.
    """
    return max(epoch, after // _EVENTS_PER_EPOCH + 1) * _EVENTS_PER_EPOCH + 1


def is_next_event(number: int, last: int) -> bool:
    """Whether no event is known to be missing between `last` and `number`."""
    return number == last + 1 or (number > last and number % _EVENTS_PER_EPOCH == 1)


def number_in_epoch(number: int) -> int:
    """The place of an event among those of its supervisor, from 1."""
    return number % _EVENTS_PER_EPOCH


@dataclass(frozen=True)
class Cursors:
    """The position up to which the reconciler has stored everything. Each poll sends it, which
    acknowledges what came before."""

    event: int = 0
    row: tuple[int, int] = (0, 0)  # (attempt, step) of the last metric row
    logs: dict[str, int] = field(default_factory=dict)  # "<agent>.<incarnation>" -> seq


@dataclass(frozen=True)
class SupervisorReport:
    """The answer to a poll: everything after the cursors, up to a bound."""

    epoch: int
    phase: Phase
    step: int
    attempt: int
    events: tuple[SupervisorEvent, ...] = ()
    rows: tuple[StepRow, ...] = ()  # (attempt, step) > cursors.row, ascending, bounded number
    digests: dict[int, str] = field(default_factory=dict)  # step -> digest, newly known
    logs: tuple[LogLine, ...] = ()
    beats: tuple[Beat, ...] = ()  # the progress of each rank, ages as of now; () if unknown
    build: str = ""  # of Holdfast, that the job's ranks run; "" from versions before 0.2
    avoided: dict[str, Avoided] | None = None  # the newest order taken; None before 0.2
    size: SizeOrder | None = None  # the same


@dataclass(frozen=True)
class NodeCapacity:
    """The resources of one node, in use or not."""

    node_id: str
    host: str
    cpus: float
    gpus: float
    foreign_cpus: float = 0.0  # in use by other programs on the cluster
    foreign_gpus: float = 0.0
    custom: Mapping[str, float] = field(default_factory=dict)  # Ray's custom resources
    foreign_custom: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Capacity:
    """The resources of the cluster. `can_grow`: it adds nodes on demand."""

    nodes: tuple[NodeCapacity, ...]
    can_grow: bool
    unlimited: bool = False  # room for every job, whatever the nodes: of a simulated cluster
    placed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The nodes on which each job has its place already, by job id."""


@dataclass(frozen=True)
class GrowthRequest:
    """The nodes that a queued job starts with, some of which the cluster has not."""

    job: str
    what: str
    """What is asked for, in words."""
    nodes: int
    new: int
    """Of `nodes`, those that the cluster has not."""
    bundle: Mapping[str, float]
    """What each node must have free, by resource."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Ray's label selector of each."""
    off: tuple[str, ...] = ()
    """Ids of the present nodes that must not be among them, sorted."""


@dataclass(frozen=True)
class FormerNumbers:
    """What supervisors of version 0.1 noted in the job's folder: the highest numbers in use."""

    epoch: int = 0
    attempt: int = 0
    fault: int = 0
    """The newest injected fault that was taken."""


@dataclass(frozen=True)
class JobLaunch:
    """The arguments of a supervisor; they do not change while it lives."""

    job_id: str
    name: str
    spec: dict[str, Any]  # the resolved JobSpec, as JSON
    data_dir: str = ""  # the job's folder, of servers before 0.2; "": nothing is read from it
    last_event: int = 0  # the number of the last stored event
    last_attempt: int = 0  # number of the last known attempt; numbers only grow
    origin: InitialCheckpoint | None = None  # None: random from the seed
    skipped: tuple[tuple[int, int], ...] = ()  # the ledger of skipped windows, as stored
    avoid: dict[str, Avoided] = field(default_factory=dict)  # nodes that are set aside at the start
    nodes: int | None = None  # most nodes that may train, as the user ordered
    reserved: tuple[str, ...] = ()  # ids of nodes that it must not start on: kept for older jobs
    given: tuple[str, ...] = ()  # ids of nodes that it leaves at the start, if others have room
    package: bytes | None = field(
        default=None, repr=False
    )  # the zip file that `spec.code` refers to
    installation: str = ""  # the installation's id; the cluster sets it
    remote_root: str = ""  # URI below which its remote checkpoints are; "": in `data_dir`
    former: FormerNumbers = field(default_factory=FormerNumbers)
    packages: tuple[str, ...] = ()  # the exact requirements that each node installs


@dataclass(frozen=True)
class PathAnswer:
    """What a node found at a path."""

    host: str
    exists: bool
    error: str = ""  # why it cannot be read


@dataclass(frozen=True)
class PackagesAnswer:
    """What became of a job's packages on a node."""

    host: str
    packages: tuple[str, ...] = ()  # the exact requirements, as each node installs them
    error: str = ""  # why they cannot be installed


class ClusterUnavailable(Exception):
    """The cluster does not answer at present; try again later."""


class SupervisorUnavailable(Exception):
    """The job's supervisor does not answer at present (it restarts, or was never created)."""


class LaunchRefused(Exception):
    """The job can never be started as it is. `code`, and the text: its outcome."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


class Cluster(Protocol):
    """The operations that the reconciler needs from Ray. Every call has its own deadline."""

    async def capacity(self) -> Capacity: ...

    async def ask_for_nodes(
        self, requests: Collection[GrowthRequest], may_start: Collection[str]
    ) -> None:
        """Ask the cluster's autoscaler for exactly these nodes, in place of all that any server of
        this installation asked for before. What other programs ask for stays. `may_start`: queued
        jobs for which enough nodes are there: those that were asked for are kept until a job
        starts."""
        ...

    async def look_for_path(self, source: str, folder: bool, timeout_s: float) -> PathAnswer:
        """Whether a node that runs jobs has this path or pattern of its own; `folder`: as a folder.
        Raises ClusterUnavailable if no node has answered in time."""
        ...

    async def install_packages(
        self, requirements: Sequence[str], timeout_s: float, avoid: Collection[str] = ()
    ) -> PackagesAnswer:
        """Install the packages on a node that runs jobs, without taking its resources; on none of
        the names in `avoid` if there is another. Raises ClusterUnavailable while there is none."""
        ...

    async def ensure_supervisor(self, launch: JobLaunch) -> bool:
        """Create the job's supervisor, or adopt the existing one. True if it was created. Raises
        LaunchRefused."""
        ...

    async def poll(self, job_id: str, cursors: Cursors) -> SupervisorReport: ...

    async def await_news(self, job_id: str, cursors: Cursors, timeout_s: float) -> bool:
        """True as soon as the supervisor has an event, or a step of an attempt, after the cursors.
        False after the timeout, for a supervisor of an earlier version, and once a later call waits
        for the same job."""
        ...

    async def stop(self, job_id: str, order: StopOrder) -> None:
        """Send the order to the job's supervisor. Idempotent."""
        ...

    async def inject(self, job_id: str, number: int, fault: dict[str, Any]) -> None:
        """Send a fault to the job's supervisor; returns when it has accepted the fault. Idempotent:
        the supervisor accepts each number once, in order."""
        ...

    async def avoid(self, job_id: str, nodes: dict[str, Avoided]) -> None:
        """Send the job's supervisor the complete set of nodes that are set aside now."""
        ...

    async def resize(self, job_id: str, order: SizeOrder) -> None:
        """Send the order to the job's supervisor. Idempotent."""
        ...

    async def release(self, job_id: str) -> bool:
        """Remove every actor, placement group and segment of the job. True if none is left."""
        ...

    async def inspect(
        self, store: tuple[str, StorageOptions] | None, deadline_s: float
    ) -> list[InspectedNode]:
        """What can be measured on each living node within about `deadline_s`, access to the `store`
        (its URI, and how to open it) included."""
        ...

    async def jobs_present(self) -> set[str]:
        """Ids of this installation's jobs that have anything on the cluster (for the reaper)."""
        ...
