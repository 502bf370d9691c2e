"""What crosses between a node agent and its supervisor: plain values, no behaviour.

Everything carries the attempt it speaks of. `epoch` is the supervisor's: an agent refuses
commands of an older epoch, and of an attempt lower than one it has already been told of.
Times are `time.time()` of the machine that saw the thing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class WorkerState(StrEnum):
    WARM = "warm"  # forked, no rank
    JOINING = "joining"  # told its rank; rendezvous, build, restore under way
    TRAINING = "training"
    PARKED = "parked"  # left its attempt, process alive, ready to join the next
    DONE = "done"  # finished its last step: the spec's, or the one that all stopped after


class SignalKind(StrEnum):
    WORKER_EXITED = "worker_exited"  # detail: exit_code | signal, out_of_memory: why it was that
    WORKER_FAILED = "worker_failed"  # detail: error (WorkerError as dict), step, finding, trip
    WORKER_JOINED = "worker_joined"  # detail: restore tier, step, phase timings
    FIRST_STEP = "first_step"  # the first step of the attempt was committed; detail: step, at
    WORKER_DONE = "worker_done"  # detail: step
    SHARD_SAVED = "shard_saved"  # remote tier: one rank's shard is durable; detail: shard record
    SHARD_FAILED = "shard_failed"  # remote tier: a shard is given up; detail: message, superseded
    SHARD_DELAYED = "shard_delayed"  # the storage does not take it; tried again; detail: message
    TIDIED = "tidied"  # retention is through, or failed; detail: step, deleted, message
    PARTNER_LOST = "partner_lost"  # replication to the partner fails; detail: partner agent
    ZYGOTE_LOST = "zygote_lost"  # a new one is being started; or detail: unfit, why not
    SOURCES_LOST = "sources_lost"  # what a reshard failed to get parts from; detail: origins
    RANK_STALLED = "rank_stalled"  # a rank is in its phase for longer than learned; detail: beat
    NODE_UNWELL = "node_unwell"  # its health changed; detail: health, findings, measured
    GUARD_TRIPPED = "guard_tripped"  # on all ranks, training goes on; detail: guards.told
    RECOMPUTED = "recomputed"  # the step of FormOrder.recheck was; detail: step, digests by rank
    BAD_SHARD = "bad_shard"  # a saved state failed verification; detail: tier, step, message


class ErrorKind(StrEnum):
    COMMUNICATION = "communication"  # a collective or the rendezvous failed: a peer's fault
    USER = "user"  # an exception raised by the recipe
    RESTORE = "restore"  # the state named in the order could not be loaded
    DAMAGED = "damaged"  # it is there, and is not what was saved
    STORAGE = "storage"  # the remote tier did not answer: the state in it may be good
    NOT_FINITE = "not_finite"  # loss or gradient norm of a step: by all ranks alike, not applied
    GUARD = "guard"  # a guard has tripped: training is to go back; by all ranks alike
    GUARD_STOP = "guard_stop"  # a guard has tripped, and the job is to end
    CORRUPTION = "corruption"  # some rank's state is not what it should be, as all ranks found
    INTERNAL = "internal"


@dataclass(frozen=True)
class WorkerError:
    kind: ErrorKind
    type: str
    message: str
    traceback: str
    step: int


@dataclass(frozen=True)
class Signal:
    """Something an agent saw. `seq` grows by one per agent incarnation."""

    kind: SignalKind
    agent: str
    incarnation: str
    seq: int
    at: float
    attempt: int = 0
    rank: int | None = None
    worker: str | None = None
    pid: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)


class Place(StrEnum):
    OWN = "own"  # written by this node's own worker (or fetched for it)
    REPLICA = "replica"  # kept for a partner


@dataclass(frozen=True)
class Held:
    """A committed memory checkpoint of one rank that an agent holds."""

    rank: int
    step: int
    attempt: int  # the attempt that computed this step
    mesh: str  # e.g. "dp_shard=2,tp=2": a payload fits only this mesh
    digest: str  # xxh3-128, hex
    nbytes: int
    place: Place


@dataclass(frozen=True)
class GroupBeat:
    """How far a rank has come in the collectives of one process group."""

    group: str  # "world", or the mesh axis it belongs to: "dp_shard", "tp"
    entered: int  # collectives entered since the attempt began
    left: int  # those of them that it has left
    kind: str  # of the one entered last: "all_gather", "reduce_scatter", ...


@dataclass(frozen=True)
class Beat:
    """What a rank's beacon says of its progress, read from outside."""

    rank: int
    worker: str
    pid: int
    attempt: int
    step: int
    phase: str
    micro_batch: int
    age_s: float  # how long ago the beacon last changed
    limit_s: float  # how long it may stand still in this phase, as learned so far
    groups: tuple[GroupBeat, ...] = ()


@dataclass(frozen=True)
class Inspection:
    """A rank as its agent sees it from outside, without the rank's help."""

    beat: Beat
    process: str  # state of the training thread in /proc: R, S, D, T, Z; "" if it is gone
    stack: tuple[str, ...] = ()  # of the training thread, innermost first: "function (file:line)"
    problem: str = ""  # why there is no stack


@dataclass(frozen=True)
class WorkerReport:
    worker: str  # unique for ever within the job: "<agent>.<incarnation>.<n>"
    pid: int
    state: WorkerState
    attempt: int = 0
    rank: int | None = None
    step: int = 0
    failure: dict[str, Any] | None = None  # detail of its WORKER_FAILED, if it left that way
    expected: int | None = None  # the only rank that it may be given; None: any, if it had none


@dataclass(frozen=True)
class AgentReport:
    """What a node agent is and holds."""

    agent: str  # stable name of the seat in the placement group: "n0", "n1", ...
    incarnation: str  # new after each restart of the agent's process
    node_id: str
    host: str  # address that other nodes reach this one by
    pid: int
    data_port: int  # replication, fetch and lifeline connections
    store_port: int  # TCPStore hosted beside the agent, for rendezvous
    capacity: int  # ranks it can run
    epoch: int  # highest supervisor epoch it has obeyed
    attempt: int  # highest attempt it has been told of
    ready: bool  # zygote up, warm workers forked
    workers: tuple[WorkerReport, ...] = ()
    held: tuple[Held, ...] = ()
    shards: tuple[dict[str, Any], ...] = ()  # remote-tier shard records not yet in a manifest
    saving: tuple[tuple[int, int, int], ...] = ()
    """(rank, attempt, step) of the shards that it has yet to save, from frozen copies."""
    domain: str = ""
    failure: dict[str, Any] | None = None  # why the agent cannot run workers, if it cannot
    health: int = 0  # grows with each change of what follows
    findings: tuple[dict[str, Any], ...] = ()  # of the node's health (Finding as dict)
    measured: dict[str, float] = field(default_factory=dict)  # device -> GB/s of its memory


class Polled(NamedTuple):
    """An agent's answer to a poll: series beyond the cursors, and what signals told before."""

    rows: list[StepRow]
    digests: dict[int, str]
    lines: list[LogLine]
    workers: tuple[WorkerReport, ...]
    shards: tuple[dict[str, Any], ...]  # as in the agent's report
    beats: tuple[Beat, ...] = ()  # how far every rank here has come, without its groups


class Tier(StrEnum):
    """Where a rank's state comes from, cheapest first."""

    OWN_RAM = "own_ram"
    PARTNER_RAM = "partner_ram"
    RESHARD = "reshard"  # boxes of several ranks of another mesh, all from memory
    REMOTE = "remote"
    INIT = "init"  # what the job begins with: the seed, or a checkpoint that its spec names


STOCK_URI = "dcp:"
"""What the URI of a checkpoint begins with that stock torch wrote, not Holdfast: `dcp:/path`."""


class InitPart(StrEnum):
    """How much of another run's state a job begins with."""

    EVERYTHING = "everything"  # as if it were this job's own: step, position, optimizer
    MODEL = "model"  # parameters alone: step 0, all else from the seed


@dataclass(frozen=True)
class Origin:
    """One rank's commit, of a mesh that may be another one, and who holds it."""

    rank: int
    agent: str
    place: Place
    host: str
    data_port: int
    digest: str


@dataclass(frozen=True)
class Restore:
    """Which state a rank takes. All ranks of an attempt take the same step."""

    tier: Tier
    step: int
    attempt: int = 0  # the attempt that computed it (memory tiers)
    digest: str = ""
    agent: str = ""  # memory tiers: who holds it
    place: Place = Place.OWN
    host: str = ""
    data_port: int = 0
    uri: str = ""  # remote tier: the checkpoint's folder; init: what `init_from` names, "" the seed
    what: InitPart = InitPart.EVERYTHING  # of the init tier: how much of it is taken
    mesh: str = ""  # reshard: the mesh that computed it
    origins: tuple[Origin, ...] = ()  # reshard: everybody who holds a part of it


@dataclass(frozen=True)
class Partner:
    agent: str
    host: str
    data_port: int


@dataclass(frozen=True)
class Seat:
    """One rank of the next attempt on one agent. `worker` None: fork a new one. `partners` each
    keep a copy of its memory checkpoints."""

    rank: int
    worker: str | None
    restore: Restore
    partners: tuple[Partner, ...] = ()


@dataclass(frozen=True)
class FormOrder:
    """What one agent must bring up for an attempt."""

    attempt: int
    mesh: dict[str, int]
    world_size: int
    store_host: str
    store_port: int
    seats: tuple[Seat, ...]
    intervals: tuple[int, int] | None = None
    """Steps between two saves to memory, and to the remote tier. None: as the spec begins."""
    skipped: tuple[tuple[int, int], ...] = ()
    """The ledger: windows of data, half-open, that no step is to read."""
    leased: bool = False
    """Its ranks may step only while a supervisor's lease covers them (`protocol/lease.py`)."""
    recheck: int | None = None
    """The step whose digests, rank by rank, are to be told."""


@dataclass(frozen=True)
class StepRow:
    """What a committed step measured; the same on every rank. Times in seconds."""

    attempt: int
    step: int  # number of optimizer steps applied when this row was made: 1 is the first
    at: float
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_time_s: float
    loader_wait_s: float
    samples: str  # digest of the sample ids consumed, all ranks, in order
    digest: str | None = None  # digest of the state after this step; known one step later
    protected_step: int = -1  # newest step whose state every rank's partners hold too
    checkpoint_wait_s: float = 0.0  # of the reporting rank, for its memory checkpoint
    memory_saved: bool = False  # the step before was saved to memory, beside this one
    remote_saving: bool = False  # a remote save of the reporting rank was under way
    compute_s: tuple[float, ...] = ()  # by rank: its time for the step without any waiting
    own: dict[str, float] = field(default_factory=dict)  # what a user's function tells, by name


@dataclass(frozen=True)
class LogLine:
    agent: str
    incarnation: str
    seq: int
    at: float
    worker: str
    attempt: int
    rank: int | None
    stream: str
    text: str
