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
from holdfast_service.job_model.capacity import Capacity, NodeCapacity
from holdfast_service.job_model.events.kinds import EventKind
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import Phase, StopKind, StopOrder
from holdfast_service.job_model.preparation import (
    SourceProgress,
    SourceRequest,
    WeightsProgress,
    WeightsRequest,
)
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
    "JobPlan",
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
    """If the job is held, the sorted ids of the nodes that the others wait for; it may take others.
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
    fresh: bool = False  # ask the agents first: there is no later poll
    incident: int = 0  # the number of the newest incident, by whichever supervisor


@dataclass(frozen=True)
class StartWait:
    """What an attempt waits for before it has started."""

    what: str
    """`rank 1 to join`"""
    since: float
    until: float | None
    """When the wait ends in any case; None: it has no limit of its own."""


@dataclass(frozen=True)
class SupervisorReport:
    """The answer to a poll: everything after the cursors, up to a bound."""

    epoch: int
    phase: Phase
    step: int | None  # None: no step is known yet, by this supervisor
    attempt: int
    events: tuple[SupervisorEvent, ...] = ()
    rows: tuple[StepRow, ...] = ()  # (attempt, step) > cursors.row, ascending, bounded number
    digests: dict[int, str] = field(default_factory=dict)  # step -> digest, newly known
    logs: tuple[LogLine, ...] = ()
    beats: tuple[Beat, ...] = ()  # the progress of each rank, ages as of now; () if unknown
    start: StartWait | None = None  # None: the attempt has started, or an event stated the wait
    build: str = ""  # of Holdfast, that the job's ranks run
    avoided: dict[str, Avoided] = field(default_factory=dict)  # the newest order taken
    size: SizeOrder = field(default_factory=lambda: SizeOrder(None))  # the same


@dataclass(frozen=True)
class GrowthRequest:
    """The nodes that a queued job starts with, some of which the cluster has not."""

    job: str
    what: str
    """The request in words."""
    nodes: int
    new: int
    """Number of `nodes` that the cluster does not have."""
    bundle: Mapping[str, float]
    """Amounts that each node must have free, by resource."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Ray's label selector of each."""
    off: tuple[str, ...] = ()
    """Ids of the present nodes that must not be among them, sorted."""


@dataclass(frozen=True)
class LostAttempt:
    """An attempt whose end nobody has reported, as the store knows it."""

    attempt: int
    world_size: int
    step: int | None
    """The newest step that was stored; None: a program has reported none."""


@dataclass(frozen=True)
class JobPlan:
    """A job's spec, and the facts of this stay on a cluster. A driver makes it once, when it starts
    the job; it travels whole to the supervisor, and does not change while that lives."""

    job_id: str
    spec: JobSpec
    remote_root: str = ""
    """URI below which its remote checkpoints are."""
    last_event: int = 0
    """The number of the last stored event."""
    last_attempt: int = 0
    """Number of the last known attempt; numbers only grow."""
    last_incident: int = 0
    """The number of the last stored incident: a number is never used again."""
    lost: LostAttempt | None = None
    """The attempt that may be lost with everything that the job had on the cluster; None: none."""
    origin: InitialCheckpoint | None = None
    """The checkpoint that the first weights come from; None: they are random, from the seed."""
    skipped: tuple[tuple[int, int], ...] = ()
    """The ledger of skipped windows, half-open, as stored."""
    avoid: dict[str, Avoided] = field(default_factory=dict)
    """Nodes that are set aside at the start. No agent is ever placed on a cordoned one; at first,
    none of a job with a fixed number of nodes on one in quarantine, if there is room elsewhere."""
    nodes: int | None = None
    """Most nodes that may train, as the user ordered."""
    reserved: tuple[str, ...] = ()
    """Ids of nodes that are kept for other jobs: the job gets its place elsewhere, or none."""
    given: tuple[str, ...] = ()
    """Ids of nodes that it leaves to others at the start, if there is room elsewhere."""
    package: bytes | None = field(default=None, repr=False)
    """The zip file that `spec.code` refers to."""
    packages: tuple[str, ...] = ()
    """The exact requirements that each node installs."""
    installation: str = ""
    """The installation's id; the cluster sets it."""


@dataclass(frozen=True)
class PathAnswer:
    """What a node found at a path."""

    host: str
    exists: bool
    error: str = ""  # why it cannot be read


@dataclass(frozen=True)
class PackagesAnswer:
    """The result of an installation of a job's packages on a node."""

    host: str
    packages: tuple[str, ...] = ()  # the exact requirements, as each node installs them
    error: str = ""  # why they cannot be installed


@dataclass(frozen=True)
class SampleText:
    """A sample as the model will see it."""

    position: int
    source: str
    tokens: int
    text: str


@dataclass(frozen=True)
class SamplesAnswer:
    samples: tuple[SampleText, ...] = ()
    error: str = ""  # why they cannot be read


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

    async def prepare_tokens(self, requests: Sequence[SourceRequest]) -> tuple[SourceProgress, ...]:
        """Begin to prepare the sources, or go on; how far each is. Raises ClusterUnavailable."""
        ...

    async def prepare_weights(self, request: WeightsRequest) -> WeightsProgress:
        """Begin to read the folder of a published model, or go on; how far it is. Raises
        ClusterUnavailable."""
        ...

    async def read_samples(self, spec: JobSpec, count: int) -> SamplesAnswer:
        """The first samples of a spec with prepared sources, as text. Raises
        ClusterUnavailable."""
        ...

    async def ensure_supervisor(self, plan: JobPlan) -> bool:
        """Create the job's supervisor, or adopt the existing one. True if it was created. Raises
        LaunchRefused."""
        ...

    async def poll(self, job_id: str, cursors: Cursors) -> SupervisorReport: ...

    async def await_news(self, job_id: str, cursors: Cursors, timeout_s: float) -> bool:
        """True as soon as the supervisor has an event, or a step of an attempt, after the cursors.
        False after the timeout, and once a later call waits for the same job."""
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
        """Measurements of each living node, made within about `deadline_s`; access to the `store`
        (its URI, and how to open it) is one of them."""
        ...

    async def jobs_present(self) -> set[str]:
        """Ids of this installation's jobs that have anything on the cluster (for the reaper)."""
        ...
