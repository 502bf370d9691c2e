"""The answers of a node agent: its state, its inspections, and the results of commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from holdfast_workers.errors import WorkersError
from holdfast_workers.protocol import codec
from holdfast_workers.protocol.findings import EarlyStop, HealthReport
from holdfast_workers.protocol.messages import (
    Beat,
    Held,
    Inspection,
    LogLine,
    StepRow,
    SupervisorEvent,
    WorkerState,
)
from holdfast_workers.protocol.process_identity import ProcessIdentity
from holdfast_workers.protocol.signals import FailedShard, ShardRecord, WorkerFailed

Accepted = TypeVar("Accepted")


@dataclass(frozen=True)
class WorkerReport:
    """One worker process of an agent."""

    worker: str
    """Name, never used again within the job: "<agent>.<incarnation>.<n>"."""
    pid: int
    state: WorkerState
    attempt: int = 0
    """The attempt that it belongs to, or belonged to last."""
    rank: int | None = None
    step: int = 0
    """Steps applied to its state."""
    failure: WorkerFailed | None = None
    """Detail of its `WORKER_FAILED` signal, if it left its attempt that way."""
    expected: int | None = None
    """The only rank that it can take, because it was forked for it; None: any rank, if it has
    none yet."""
    expected_mesh: str = ""
    """The mesh of that rank, as in `Held.mesh`; "": the mesh of the newest attempt."""
    early: EarlyStop | None = None
    """Detail of its `WORKER_DONE` signal, if it ended before the job's last step."""
    evaluates_first: bool = False
    """It evaluates the first step of its attempt, which is not committed yet."""


@dataclass(frozen=True)
class AgentFailure:
    """Why an agent cannot run workers."""

    message: str
    type: str = ""
    """Class name of the exception in the user's program that is the cause; "" if it is not one."""
    traceback: str | None = None


@dataclass(frozen=True)
class AgentReport:
    """The whole state of a node agent: what it runs and what it holds."""

    agent: str
    """Stable name of the agent's slot in the placement group: "n0", "n1", ..."""
    incarnation: str
    """Changes with each restart of the agent's process."""
    node_id: str
    """Ray's id of the node."""
    host: str
    """Address at which other nodes reach this node."""
    pid: int
    data_port: int
    """Port for replication, fetch and lifeline connections."""
    store_port: int
    """Port of the TCPStore hosted beside the agent, for the rendezvous."""
    capacity: int
    """Number of ranks that it can run."""
    epoch: int
    """Highest supervisor epoch that it has obeyed."""
    attempt: int
    """Highest attempt that it knows."""
    ready: bool
    """True once the zygote and the store run."""
    workers: tuple[WorkerReport, ...] = ()
    held: tuple[Held, ...] = ()
    """Its memory checkpoints, own ones and replicas."""
    shards: tuple[ShardRecord, ...] = ()
    """Remote-tier shards that are not yet in a manifest."""
    saving: tuple[tuple[int, int, int], ...] = ()
    """(rank, attempt, step) of each shard that it has yet to save from a frozen copy."""
    domain: str = ""
    """Failure domain of the node, e.g. a rack; "" if unknown."""
    failure: AgentFailure | None = None
    """Why the agent cannot run workers, if it cannot."""
    health: HealthReport = field(default_factory=HealthReport)
    process: ProcessIdentity | None = None
    """The agent's process; None: not known."""
    build: str = ""
    """The build of Holdfast that the agent and its ranks run."""
    fast_domain: str = ""
    """Nodes with the same name are connected fastest; "": those of one failure domain are."""

    @property
    def near(self) -> str:
        """The domain within which ranks exchange most."""
        return self.fast_domain or self.domain


@dataclass(frozen=True)
class PollAnswer:
    """Answer to `Poll`.

    Carries the series newer than the poll's cursors, and repeats what signals already reported,
    because a signal may be lost."""

    rows: tuple[StepRow, ...]
    digests: dict[int, str]
    """Digest of the state (xxh3-128, hex) by step."""
    lines: tuple[LogLine, ...]
    workers: tuple[WorkerReport, ...]
    shards: tuple[ShardRecord, ...]
    """The shards, as in `AgentReport`."""
    beats: tuple[Beat, ...] = ()
    """Progress of every rank of this agent, without process groups."""
    failed_shards: tuple[FailedShard, ...] = ()
    """The shards that this agent gave up, newest last; a bounded number."""
    digest_attempts: dict[int, int] = field(default_factory=dict)
    """The attempt that computed each digest."""
    health: HealthReport = field(default_factory=HealthReport)
    """The health of the node, as last reported."""
    lines_left: int = 0
    """The number of log lines after these."""


@dataclass(frozen=True)
class Done:
    """The command was carried out and has no other answer."""


@dataclass(frozen=True)
class Inspections:
    """Answer to `Inspect`."""

    inspections: tuple[Inspection, ...]


@dataclass(frozen=True)
class PublishedCheckpoint:
    """Answer to `FinalizeCheckpoint`: the manifest is durable."""

    uri: str
    nbytes: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class KeptEvents:
    """Answer to `ListEvents`, in order of their numbers."""

    events: tuple[SupervisorEvent, ...]


@dataclass(frozen=True)
class ExchangeResult:
    """Answer to `ExchangeBytes`. `problem`: "" if the bytes came back intact."""

    problem: str


@dataclass(frozen=True)
class Refusal:
    """Answer to any request that was not carried out."""

    type: str
    """Class name of the agent's error."""
    message: str
    """What is wrong, and what to do."""
    later: bool = False
    """The remote tier refuses a checkpoint for now: repeat the request."""


class RequestRefused(WorkersError):
    """An agent answered with a `Refusal`."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.type}: {refusal.message}")
        self.later = refusal.later


def accepted(document: bytes, kind: type[Accepted]) -> Accepted:
    """The answer to a request that was carried out. Raises RequestRefused, UnreadableDocument."""
    kinds: tuple[type, ...] = (kind, Refusal)
    answer: Accepted | Refusal = codec.decode(document, *kinds)
    if isinstance(answer, Refusal):
        raise RequestRefused(answer)
    return answer


Answer = (
    AgentReport
    | PollAnswer
    | Done
    | Inspections
    | PublishedCheckpoint
    | KeptEvents
    | ExchangeResult
)
