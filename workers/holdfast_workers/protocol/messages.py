"""The vocabulary of all messages between agents, workers and supervisor: plain immutable values.

`signals.py`, `answers.py` and `commands.py` are composed of these values; `codec.py` encodes them.
This module has no behaviour, and of the project it imports `metrics.py` only.

Conventions that all messages share:

- Every message names the attempt it belongs to. `attempt` counts the worlds of one job from 1; it
  only grows, and 0 means "no attempt".
- `epoch` is the supervisor's. An agent refuses commands of an older epoch, and commands of an
  attempt lower than one it already knows.
- A timestamp (`at`) is `time.time()` in seconds, on the machine that observed the event. Durations
  end in `_s` (seconds), sizes are bytes.
- `step` is the number of optimizer steps applied: 1 is the state after the first step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from holdfast_workers.protocol.metrics import Measured


class WorkerState(StrEnum):
    """Where a worker process is in its life."""

    WARM = "warm"
    """Forked and imported; has no rank."""
    JOINING = "joining"
    """Has a rank; rendezvous, model build and restore are under way."""
    TRAINING = "training"
    """Takes steps."""
    PARKED = "parked"
    """Left its attempt; the process is alive and ready to join the next one."""
    DONE = "done"
    """Finished its last step: the last of the job spec, or the one after which all ranks
    stopped."""
    LEFT = "left"
    """Left its attempt after a step on which all ranks agreed, so that the mesh can change. The
    state after that step is in memory."""


class ErrorKind(StrEnum):
    """Why a worker left its attempt; decides how the supervisor recovers."""

    COMMUNICATION = "communication"
    """A collective or the rendezvous failed: the cause lies with a peer."""
    USER = "user"
    """The recipe raised an exception."""
    RESTORE = "restore"
    """The state named in the order could not be loaded."""
    DAMAGED = "damaged"
    """The state named in the order exists, and is not the one that was saved."""
    STORAGE = "storage"
    """The remote tier did not answer; the state in it may be good."""
    DATA = "data"
    """Data of the job did not come to the node in time; it may come later."""
    NOT_FINITE = "not_finite"
    """Loss or gradient norm of a step was not finite. Raised by all ranks alike; the step was not
    applied."""
    GUARD = "guard"
    """A guard tripped and training must roll back. Raised by all ranks alike."""
    GUARD_STOP = "guard_stop"
    """A guard tripped and the job must end."""
    CORRUPTION = "corruption"
    """All ranks found that the state of some rank differs from what it should be."""
    INTERNAL = "internal"
    """An error of Holdfast itself."""


UNKNOWN_STEP = -1
"""The step of an error of a rank that shows none: only the world's newest step is known then."""


@dataclass(frozen=True)
class ErrorReport:
    """The exception with which a worker left its attempt."""

    kind: ErrorKind
    type: str
    """Class name of the exception."""
    message: str
    """Its message, shortened in the middle."""
    traceback: str
    """Its formatted traceback, shortened in the middle."""
    step: int
    """Steps applied when it was raised; of a program whose rank shows no steps, UNKNOWN_STEP."""


class Place(StrEnum):
    """The role in which a node holds a memory checkpoint."""

    OWN = "own"
    """Written by the node's own worker, or fetched for it."""
    REPLICA = "replica"
    """Kept for a partner."""


@dataclass(frozen=True)
class Held:
    """A committed memory checkpoint of one rank that an agent holds."""

    rank: int
    step: int
    attempt: int
    """The attempt that computed the state."""
    mesh: str
    """Axis sizes of the mesh, e.g. "dp_shard=2,tp=2". A payload fits only its own mesh."""
    digest: str
    """xxh3-128 of the payload, in hex."""
    nbytes: int
    """Size of the payload."""
    place: Place
    number: int = 0
    """The number among a user's program's saves in this attempt, the same on all ranks: a program
    may save a step more than once."""
    divisible: bool = True
    """A world of another mesh can load it. False: the program saved each rank's own state."""


@dataclass(frozen=True)
class GroupBeat:
    """The progress of one rank in the collectives of one process group."""

    group: str
    """Name of the group: "world", or the mesh axis that the group belongs to: "dp_shard", "tp", ...
    A group of several axes: "dp_shard+cp"."""
    entered: int
    """Collectives that the rank entered since the attempt began."""
    left: int
    """Collectives among them from which it has returned."""
    kind: str
    """The collective entered last: "all_gather", "reduce_scatter", ..."""


PREPARING_PHASE = "preparing"
"""The phase of a rank whose worker is not ready to take its order yet: it builds the model, or
still leaves an attempt."""
JOINING_PHASE = "joining"
"""The phase of a rank whose worker is ready, and has not begun to carry out its order."""


DATA_PHASE = "data"
"""The phase of a rank whose next samples are not read yet."""
HOLD_PHASE = "hold"
"""The phase of a rank that stands still until it has a lease."""
PROGRAM_PHASE = "program"
"""The phase of a user's program that shows no steps itself, and prints or computes."""
BUSY_PHASE = "busy"
"""The same, of one that only computes: it has printed nothing, and no step was read of it, for
`program.silence_s`. A rank that waits for a device computes too."""


@dataclass(frozen=True)
class Beat:
    """The progress of one rank, read from its beacon without the rank's help."""

    rank: int
    worker: str
    """Name of its worker, see `WorkerReport.worker`."""
    pid: int
    attempt: int
    step: int
    phase: str
    """Phase of the step or of the restore, e.g. "forward"."""
    micro_batch: int
    """Index of the micro-batch within the step, from 0."""
    age_s: float
    """Time since the beacon last changed."""
    limit_s: float
    """How long the rank may stay in this phase before it counts as stalled, as learned so far."""
    groups: tuple[GroupBeat, ...] = ()
    """Its process groups; empty in a `PollAnswer`."""
    steps_timed: int = 0
    """The steps of a user's program in this attempt whose time `computed_s` adds up."""
    computed_s: float = 0.0
    """Time for these steps without waits in collectives, as far as functions of torch.distributed
    start these."""


@dataclass(frozen=True)
class Inspection:
    """A rank as its agent sees it from outside, without the rank's help."""

    beat: Beat
    process: str
    """State of the training thread in /proc: R, S, D, T or Z; "" if the process is gone."""
    stack: tuple[str, ...] = ()
    """Stack of the training thread, innermost frame first: "function (file:line)"."""
    problem: str = ""
    """Why there is no stack."""


class Tier(StrEnum):
    """Where a rank's state comes from, cheapest source first."""

    OWN_RAM = "own_ram"
    """The memory of its own node."""
    PARTNER_RAM = "partner_ram"
    """The memory of a partner's node."""
    RESHARD = "reshard"
    """Boxes of several ranks of another mesh, all from memory."""
    REMOTE = "remote"
    """A checkpoint on shared storage."""
    INIT = "init"
    """The beginning of the job: its seed, or the checkpoint that its spec names."""


DCP_URI_PREFIX = "dcp:"
"""Prefix of the URI of a checkpoint that stock PyTorch wrote (`torch.distributed.checkpoint`), not
Holdfast: `dcp:/path`."""


class InitPart(StrEnum):
    """How much of another run's state a job begins with."""

    EVERYTHING = "everything"
    """All of it, as if it were this job's own: step, data position, optimizer."""
    MODEL = "model"
    """Weights only (parameters, persistent buffers): step 0, and everything else from the seed."""


@dataclass(frozen=True)
class Origin:
    """The commit of one rank of a source mesh, and the agent that holds it."""

    rank: int
    """Rank within the source mesh."""
    agent: str
    place: Place
    host: str
    data_port: int
    """Data channel of that agent."""
    digest: str
    """xxh3-128 of the commit's payload, in hex."""


@dataclass(frozen=True)
class Restore:
    """The state that a rank restores. All ranks of an attempt restore the same step."""

    tier: Tier
    step: int
    attempt: int = 0
    """Memory tiers: the attempt that computed the state."""
    digest: str = ""
    """Memory tiers: xxh3-128 of the payload, in hex; "" if unknown."""
    agent: str = ""
    """Memory tiers: the agent that holds the state."""
    place: Place = Place.OWN
    """Memory tiers: the role in which that agent holds it."""
    host: str = ""
    """Memory tiers: address of that agent's data channel."""
    data_port: int = 0
    """Memory tiers: port of that agent's data channel."""
    uri: str = ""
    """Remote tier: folder of the checkpoint. Init tier: the checkpoint that `init_from` names; "":
    none, the state is that of the seed, or with published weights."""
    what: InitPart = InitPart.EVERYTHING
    """Init tier: how much of that checkpoint is loaded."""
    mesh: str = ""
    """Reshard, and remote tier if known: the mesh that computed the state, as in `Held.mesh`."""
    origins: tuple[Origin, ...] = ()
    """Reshard: every commit that holds a part of the state."""
    number: int | None = None
    """Memory tiers, of a user's program: as in `Held.number`; None: not known."""


@dataclass(frozen=True)
class Partner:
    """An agent that keeps what other nodes need, such as replicas of their ranks' memory
    checkpoints, and its data channel."""

    agent: str
    host: str
    data_port: int


@dataclass(frozen=True)
class Seat:
    """The place of one rank of the next attempt on one agent."""

    rank: int
    worker: str | None
    """The worker that takes the rank; None: fork a new one."""
    restore: Restore
    partners: tuple[Partner, ...] = ()
    """Each of them keeps a copy of the rank's memory checkpoints."""


@dataclass(frozen=True)
class FormOrder:
    """The ranks that one agent must bring up for an attempt."""

    attempt: int
    mesh: dict[str, int]
    """Size of each mesh axis, in order."""
    world_size: int
    store_host: str
    """Address of the TCPStore for the rendezvous."""
    store_port: int
    seats: tuple[Seat, ...]
    intervals: tuple[int, int] | None = None
    """Steps between two saves to memory, and steps between two saves to the remote tier. None: the
    intervals that the job spec begins with."""
    skipped: tuple[tuple[int, int], ...] = ()
    """The ledger of skipped data: half-open ranges of windows (one window is the `global_batch`
    samples of one step) that no step may read."""
    leased: bool = False
    """True: its ranks may step only while a lease covers them (`protocol/lease.py`)."""
    recheck: int | None = None
    """The step whose digests, rank by rank, the agent must report (`SignalKind.RECOMPUTED`)."""
    leave_after: int | None = None
    """The step after which the ranks leave the attempt, because the mesh changes then."""
    node_rank: int = 0
    """The place of this node among the nodes with ranks, by their lowest ranks."""
    nodes: int = 1
    """The number of nodes with ranks."""
    caches: tuple[Partner, ...] = ()
    """The nodes, this one among them, that have token sets from each other; empty: it has none."""


@dataclass(frozen=True)
class JoinOrder:
    """The order with which an agent gives a rank of an attempt to one of its workers."""

    form: FormOrder
    """The order without what only the agent uses: seats and caches."""
    seat: Seat
    """The seat without origins, which only the agent uses."""
    segment_path: str
    """The rank's own segment, in the folder of the node's memory checkpoints."""
    local_rank: int = 0
    """The place of this rank among those of its node. The first reports for all of them."""
    local_world_size: int = 1
    """The number of ranks of its node."""

    @property
    def attempt(self) -> int:
        return self.form.attempt

    @property
    def rank(self) -> int:
        return self.seat.rank


@dataclass(frozen=True)
class StepRow(Measured):
    """The measurements of a committed step; the same on every rank unless stated otherwise.
    `METRICS` of `metrics.py` describes those that are series of the job."""

    attempt: int
    step: int
    """Optimizer steps applied when the row was made: 1 is the first."""
    at: float
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_time_s: float
    samples: str
    protected_step: int = -1
    """The newest step whose state every rank's partners hold too; -1: none."""
    checkpoint_wait_s: float = 0.0
    memory_saved: bool = False
    """The previous step was saved to memory while this one was computed."""
    remote_saving: bool = False
    """A remote save of the reporting rank was under way."""
    compute_s: tuple[float, ...] = ()
    """Each rank's time for the step without any waiting."""
    own: dict[str, float] = field(default_factory=dict)
    """Metrics that the user's function reports, by name."""

    @property
    def waiting_share(self) -> float | None:
        """The part of the step in which a rank waited, on average: in collectives, in the bubble of
        a pipeline, for data. None in a world of one rank."""
        if len(self.compute_s) < 2 or self.step_time_s <= 0.0:
            return None
        computed = sum(self.compute_s) / len(self.compute_s)
        return min(1.0, max(0.0, 1.0 - computed / self.step_time_s))


@dataclass(frozen=True)
class LogLine:
    """One line of output of a worker or of another process of a node."""

    agent: str
    incarnation: str
    seq: int
    """Number of the line; grows by one within an incarnation of the agent."""
    at: float
    """When the agent read the line."""
    worker: str
    """Name of the process that printed it."""
    attempt: int
    rank: int | None
    """The rank of the process; None: it has none."""
    stream: str
    text: str
    """The line without its line feed."""


@dataclass(frozen=True)
class SupervisorEvent:
    """A numbered event of a supervisor. Agents keep it for the next supervisor, and the service
    stores it; `job_model/events/codec.py` of the service writes and reads its data."""

    seq: int
    """Grows: the first number of its supervisor's epoch, then by one."""
    at: float
    kind: str
    data: dict[str, Any]
    format: int = 1
    """Version of the format of `kind` and `data`."""
