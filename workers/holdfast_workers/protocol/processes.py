"""Control messages: all that a node agent and the processes forked for it send to each other.

`ipc/control_channel.py` carries them, encoded by `codec.py`. A process is forked for a *job*: the
request to fork it, which says what process it becomes and what it answers. A new message is a
dataclass, and its name in the union of its direction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar, get_args

from pydantic import Field

from holdfast_workers.protocol.answers import AgentFailure, PublishedCheckpoint
from holdfast_workers.protocol.commands import FinalizeCheckpoint, TidyRemoteTier
from holdfast_workers.protocol.findings import HealthFinding
from holdfast_workers.protocol.messages import JoinOrder, Partner, StepRow
from holdfast_workers.protocol.run_plan import RunPlan
from holdfast_workers.protocol.signals import (
    FirstStep,
    GuardTripReported,
    ProgramAttached,
    RetentionDone,
    ShardFailed,
    ShardRecord,
    StepRecomputed,
    WorkerDone,
    WorkerFailed,
    WorkerJoined,
    WorkerLeft,
)

# --- from an agent to a worker --------------------------------------------------------------------


@dataclass(frozen=True)
class ArmFault:
    """Inject a fault, now or when it is due. A repeated number changes nothing."""

    number: int
    fault: dict[str, str | int | float]
    """`Injection.document()`."""


@dataclass(frozen=True)
class JoinAttempt:
    """Take a rank of an attempt, with the faults that are injected into it."""

    order: JoinOrder
    faults: tuple[ArmFault, ...] = ()


@dataclass(frozen=True)
class LeaveAttempts:
    """Leave every attempt before this one; the worker answers `AttemptsLeft`."""

    attempt: int


@dataclass(frozen=True)
class StateReply:
    """The rank's segment contains the state that its order names, or why it does not."""

    attempt: int
    problem: str = ""
    damaged: bool = False
    """The state exists, and is not the one that was saved."""


class LoadResult(StrEnum):
    """How a load ended."""

    LOADED = "loaded"
    BAD = "bad"
    """The checkpoint is damaged."""
    UNFIT = "unfit"
    """The checkpoint is of another model."""
    OTHER_ROOM = "other_room"
    """Objects have another room in the checkpoint."""
    FAILED = "failed"
    """The storage refused it, or it was not finished."""


@dataclass(frozen=True)
class LoadOutcome:
    """A loader's answer, which its agent passes on to the worker."""

    attempt: int
    result: LoadResult
    uri: str = ""
    """The damaged object, or the one that the storage refused."""
    reason: str = ""
    rooms: dict[str, int] = field(default_factory=dict)
    """The rooms of the objects in the checkpoint, by the names of their entries."""
    number: int = 0
    """Of the order that was carried out."""


@dataclass(frozen=True)
class StepReplicated:
    """All partners of the rank hold this step."""

    attempt: int
    step: int
    digest: str = ""
    """The digest of the commit that they hold: a program may save a step more than once."""


@dataclass(frozen=True)
class PartnerPresence:
    """Whether the rank has partners now. What former partners held no longer counts."""

    attempt: int
    present: bool


@dataclass(frozen=True)
class StopAfterStep:
    """Request a stop in the next step agreement."""

    attempt: int
    leaves: bool = False
    """Whether the ranks only leave the attempt, so that the mesh can change; the job goes on."""


@dataclass(frozen=True)
class NewIntervals:
    """Propose these save intervals, as in `FormOrder.intervals`, in the next step agreement."""

    attempt: int
    steps: tuple[int, int]


@dataclass(frozen=True)
class LeaseUpdate:
    """The rank may step until this time of the lease's clock."""

    attempt: int
    until: float
    number: int
    """A message with a lower number is older, whenever it arrives."""


WorkerOrder = (
    JoinAttempt
    | LeaveAttempts
    | StateReply
    | LoadOutcome
    | StepReplicated
    | PartnerPresence
    | StopAfterStep
    | NewIntervals
    | LeaseUpdate
    | ArmFault
)
WORKER_ORDERS: tuple[type, ...] = get_args(WorkerOrder)

# --- from a worker to its agent -------------------------------------------------------------------


SignalOfWorker = (
    WorkerJoined
    | WorkerFailed
    | FirstStep
    | WorkerDone
    | WorkerLeft
    | GuardTripReported
    | StepRecomputed
    | ShardFailed
    | ProgramAttached
)


@dataclass(frozen=True)
class WorkerSignal:
    """An event that the agent reports to the supervisor, once it has taken note of it."""

    attempt: int
    rank: int
    detail: Annotated[SignalOfWorker, Field(discriminator="kind")]


@dataclass(frozen=True)
class CommittedToMemory:
    """The rank's segment contains this step, as `attempt` computed it."""

    attempt: int
    step: int
    protected: int = -1
    """The step of a program that the partners of every rank hold; -1: not known."""


@dataclass(frozen=True)
class StepReport:
    """The row of a committed step, from the reporting rank of its node."""

    rank: int
    row: StepRow


@dataclass(frozen=True)
class StepDigest:
    """The digest (xxh3-128, hex) of the state after a step, from the reporting rank."""

    step: int
    digest: str
    attempt: int = 0


@dataclass(frozen=True)
class SegmentReady:
    """The rank has made its segment, to be filled from another mesh."""

    attempt: int
    own: dict[str, bytes]
    """The entries that belong to this rank alone."""


@dataclass(frozen=True)
class AttemptsLeft:
    """The worker has left every attempt before this one."""

    attempt: int


@dataclass(frozen=True)
class ProgramStarted:
    """The worker has started the user's program: this process is the rank."""

    attempt: int
    pid: int


@dataclass(frozen=True)
class FaultFired:
    """An injected fault is about to happen."""

    number: int


# --- answers of other processes -------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessReady:
    """A zygote or a template has prepared everything."""

    build: str = ""
    """The build of Holdfast that a zygote runs; see `build.py`."""


@dataclass(frozen=True)
class TemplateUnfit:
    """A template has threads, or could prepare nothing."""


@dataclass(frozen=True)
class Forked:
    """A zygote's or a template's answer to a job."""

    pid: int
    """0: no process could be forked."""
    threads: tuple[str, ...] = ()
    """Why it was not forked: the modules that have started threads in the zygote."""


@dataclass(frozen=True)
class AskStorePort:
    """An agent asks its rendezvous store whether it still answers."""

    attempt: int = 0
    """If not 0, the attempt that forms next: it gets a new store, on another port, unless it has
    one."""


@dataclass(frozen=True)
class StorePort:
    """The rendezvous store listens on this port."""

    port: int
    """0: on none, and the process ends."""
    problem: str = ""
    """Why it listens on none."""
    attempt: int = 0
    """The attempt that `AskStorePort` asked for."""


@dataclass(frozen=True)
class FetchOrder:
    """What a fetcher is to follow; a later one replaces it."""

    window: int | None = None
    """The first window of the sample order that ranks of the node read now; None: not known yet."""
    caches: tuple[Partner, ...] = ()
    """As in `FormOrder`."""


@dataclass(frozen=True)
class StorageRefusal:
    """The storage refuses the operation for now."""

    message: str


@dataclass(frozen=True)
class PreflightResult:
    """The result of a check of the node."""

    findings: tuple[HealthFinding, ...]
    measured: dict[str, float]
    """Device → GB/s of its memory."""


# --- jobs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrozenCopy:
    """One rank's state at one step, frozen in the file at `path`. A worker hands it to its agent;
    as a job, a saver writes it to the remote tier."""

    path: str
    rank: int
    attempt: int
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the step, for the manifest."""

    process: ClassVar[str] = "saver"
    answers: ClassVar[tuple[type, ...]] = (ShardRecord, StorageRefusal)


@dataclass(frozen=True)
class LoadOrder:
    """What to load for one rank, and where to. A worker hands it to its agent if the checkpoint is
    in a bucket; as a job, a loader carries it out."""

    attempt: int
    rank: int
    uri: str
    mesh: dict[str, int]
    own: bool
    """Whether the checkpoint is one of the rank's own job: if it is bad, it is quarantined."""
    exact: bool = False
    """Whether the checkpoint is refused if it has weights of a model that the layout lacks."""
    memory: str = ""
    """Path of the shared memory: the payload, then its layout as JSON."""
    payload_bytes: int = 0
    object_name: str = ""
    """If set, what is loaded is no checkpoint, but this small object at `uri`: the shared memory is
    for its content."""
    number: int = 0
    """Among the orders of an attempt of a rank, from 1 on: a late outcome is of an earlier one."""

    process: ClassVar[str] = "loader"
    answers: ClassVar[tuple[type, ...]] = (LoadOutcome,)


WorkerMessage = (
    WorkerSignal
    | CommittedToMemory
    | StepReport
    | StepDigest
    | FrozenCopy
    | LoadOrder
    | SegmentReady
    | AttemptsLeft
    | ProgramStarted
    | FaultFired
)


@dataclass(frozen=True)
class RankPlace:
    """A rank of a mesh. The axes are ordered: a mesh with another order is another place."""

    axes: tuple[tuple[str, int], ...]
    rank: int

    @classmethod
    def of(cls, mesh: dict[str, int], rank: int) -> RankPlace:
        return cls(tuple(mesh.items()), rank)

    @property
    def mesh(self) -> dict[str, int]:
        return dict(self.axes)


@dataclass(frozen=True)
class WorkerJob:
    """Train."""

    beacon: str
    """Path of the file in which it shows its progress."""
    env: dict[str, str] = field(default_factory=dict)
    place: RankPlace | None = None
    """The only place that it may be given; None: any place."""
    launches: bool = False
    """Whether it only launches a program of the user."""

    process: ClassVar[str] = "worker"
    answers: ClassVar[tuple[type, ...]] = get_args(WorkerMessage)


@dataclass(frozen=True)
class TemplateJob:
    """Prepare everything that a worker in this place needs, then fork such workers."""

    place: RankPlace

    process: ClassVar[str] = "template"
    answers: ClassVar[tuple[type, ...]] = (ProcessReady, TemplateUnfit)


@dataclass(frozen=True)
class StoreJob:
    """Host the rendezvous store, on the node's address."""

    host: str
    ports: str = ""
    """The range of ports to choose from, as in `HOLDFAST_PORT_RANGE`; "": any."""

    process: ClassVar[str] = "store"
    answers: ClassVar[tuple[type, ...]] = (StorePort,)


@dataclass(frozen=True)
class FinalizerJob:
    """Publish a remote checkpoint."""

    command: FinalizeCheckpoint

    process: ClassVar[str] = "finalizer"
    answers: ClassVar[tuple[type, ...]] = (PublishedCheckpoint, StorageRefusal)


@dataclass(frozen=True)
class TidierJob:
    """Remove the remote checkpoints that are not kept."""

    command: TidyRemoteTier
    epoch: int = 0
    """The epoch of the supervisor that wants it. Nothing is removed once the fence shows a later
    one, which may want what this one gave up."""

    process: ClassVar[str] = "tidier"
    answers: ClassVar[tuple[type, ...]] = (RetentionDone, StorageRefusal)


@dataclass(frozen=True)
class FetcherJob:
    """Bring the job's token sets into the node's cache, and hold there what its ranks read. The
    agent sends another `FetchOrder` whenever that changes."""

    cache_dir: str
    order: FetchOrder
    agent: str
    secret: bytes = field(repr=False)
    """Of the data channel."""
    tls_dir: str = ""
    """As in the agent's configuration."""

    process: ClassVar[str] = "fetcher"
    answers: ClassVar[tuple[type, ...]] = (StorageRefusal,)


@dataclass(frozen=True)
class PreflightJob:
    """Check processor and devices."""

    devices: bool
    memory_floor_gb_per_s: float
    """0: no minimum."""

    process: ClassVar[str] = "preflight"
    answers: ClassVar[tuple[type, ...]] = (PreflightResult,)


StorageJob = FrozenCopy | FinalizerJob | TidierJob | LoadOrder | FetcherJob
"""Reaches the storage of checkpoints, and runs no users' code."""
Job = WorkerJob | TemplateJob | StoreJob | PreflightJob | StorageJob
JOBS: tuple[type, ...] = get_args(Job)

# --- the zygotes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StorageOptions:
    """Connection, timeout and retry settings of a bucket. A file system ignores them."""

    endpoint: str | None = None
    """URL of an S3 service other than AWS's own."""
    region: str | None = None
    credentials: dict[str, str] | None = field(default=None, repr=False)
    """`access_key_id`, `secret_access_key`, optional `session_token`. None: AWS's default chain;
    with an `endpoint`, requests are then not signed."""
    refuse_local: bool = False
    """Whether an endpoint with a loopback or link-local address is refused."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    """Longest time without a byte from the server."""
    part_timeout_s: float = 120.0
    """Limit for one whole part, however slowly its bytes arrive."""
    attempts: int = 5
    patience_s: float = 60.0
    """The time from the start of an operation's first attempt to the start of its last."""
    part_bytes: int = 16 * 1024 * 1024
    in_flight: int = 4
    """Parts transferred concurrently; each open object takes this many parts of memory."""


@dataclass(frozen=True, kw_only=True)
class StorageZygoteConfig:
    """The configuration of the zygote without users' code, which forks storage jobs only."""

    plan: RunPlan
    storage: StorageOptions
    storage_fault_file: str
    """The file that requests failures of the remote tier, for fault injection."""
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ZygoteConfig(StorageZygoteConfig):
    """The configuration of the zygote that imports users' code, and of everything that is forked
    from it. Its `storage` has no credentials."""

    device: str
    """The device of a worker, as the worker itself names it."""
    cache_dir: str
    replication_patience_s: float
    replication_share: float
    code: str = ""
    """The folder of users' code; "": there is none."""
    packages: str = ""
    """The folder of the modules of the job's own packages; "": it has none."""
    imports_recipe: bool = True
    """Whether the zygote imports and prepares the recipe. Otherwise each process does that needs
    it: the recipe's modules start threads, and a process with threads cannot be forked."""


ZYGOTE_ANSWERS = (ProcessReady, AgentFailure)
