"""What crosses between a node agent and its supervisor: plain values, no behaviour.

Everything carries the attempt it speaks of. `epoch` is the supervisor's: an agent refuses
commands of an older epoch, and of an attempt lower than one it has already been told of.
Times are `time.time()` of the machine that saw the thing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class WorkerState(StrEnum):
    WARM = "warm"  # forked, no rank
    JOINING = "joining"  # told its rank; rendezvous, build, restore under way
    TRAINING = "training"
    PARKED = "parked"  # left its attempt, process alive, ready to join the next
    DONE = "done"  # finished its last step
    EXITED = "exited"


class SignalKind(StrEnum):
    WORKER_EXITED = "worker_exited"  # detail: exit_code | signal
    WORKER_FAILED = "worker_failed"  # detail: error (WorkerError as dict), step
    WORKER_JOINED = "worker_joined"  # detail: restore tier, step, phase timings
    FIRST_STEP = "first_step"  # the first step of the attempt was committed; detail: step, at
    WORKER_DONE = "worker_done"  # detail: step
    SHARD_SAVED = "shard_saved"  # remote tier: one rank's shard is durable; detail: shard record
    SHARD_FAILED = "shard_failed"  # remote tier: a shard could not be written; detail: message
    PARTNER_LOST = "partner_lost"  # replication to the partner fails; detail: partner agent
    ZYGOTE_LOST = "zygote_lost"  # informative: a new one is being started
    BAD_SHARD = "bad_shard"  # a saved state failed verification; detail: tier, step, message


class ErrorKind(StrEnum):
    COMMUNICATION = "communication"  # a collective or the rendezvous failed: a peer's fault
    USER = "user"  # an exception raised by the recipe
    RESTORE = "restore"  # the state named in the order could not be loaded
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
class WorkerReport:
    worker: str  # unique for ever within the job: "<agent>.<incarnation>.<n>"
    pid: int
    state: WorkerState
    attempt: int = 0
    rank: int | None = None
    step: int = 0
    error: WorkerError | None = None


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
    domain: str = ""
    failure: dict[str, Any] | None = None  # why the agent cannot run workers, if it cannot


class Tier(StrEnum):
    """Where a rank's state comes from, cheapest first."""

    LIVE = "live"  # the surviving worker's own tensors are at the step already
    OWN_RAM = "own_ram"
    PARTNER_RAM = "partner_ram"
    REMOTE = "remote"
    INIT = "init"  # step 0, from the seed


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
    uri: str = ""  # remote tier: the checkpoint's folder


@dataclass(frozen=True)
class Partner:
    agent: str
    host: str
    data_port: int


@dataclass(frozen=True)
class Seat:
    """One rank of the next attempt on one agent. `worker` None: fork a new one."""

    rank: int
    worker: str | None
    restore: Restore
    partner: Partner | None


@dataclass(frozen=True)
class FormOrder:
    """What one agent must bring up for an attempt."""

    attempt: int
    mesh: dict[str, int]
    world_size: int
    store_host: str
    store_port: int
    seats: tuple[Seat, ...]


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
    protected_step: int = -1  # newest step whose state every rank's partner holds too
    checkpoint_wait_s: float = 0.0  # of the reporting rank, for its memory checkpoint


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
