"""The response models of jobs and their parts: read-only values for JSON.

Times are RFC 3339 in JSON, and Unix seconds in Python. A number that was not measured is null,
never zero. Everything here is derived from the store alone, so all API servers return the same
values.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.job_model.log_levels import LogLevel
from holdfast_service.job_model.program_levels import Brings
from holdfast_service.job_model.times import EventDocument, Time
from holdfast_service.policy.quarantine import NodeStanding
from holdfast_workers.protocol.findings import Level
from holdfast_workers.protocol.messages import InitPart


class View(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True)  # a CLI command uses few of them

    @classmethod
    def from_attributes(cls, source: object, **other: Any) -> Self:
        """The view of `source`, which has every field that `other` lacks, under the same name."""
        same = {name: getattr(source, name) for name in cls.model_fields if name not in other}
        return cls(**same, **other)


class ProgressView(View):
    """How far a job has come."""

    step: int = Field(description="optimizer steps applied, as last reported")
    steps: int | None = Field(
        description="optimizer steps the spec asks for; null: not known, of a user's program"
    )
    attempt: int = Field(description="0: no attempt has formed yet")
    loss: float | None
    tokens_per_second: float | None
    incidents: int = Field(description="number of incidents so far, including an open one")


class OutcomeView(View):
    """Why a job ended. `code` is stable; `traceback` is from the user's program, if it raised."""

    code: str
    message: str
    traceback: str | None


class ReservationView(View):
    """Nodes that are kept for the first queued job that has waited for long."""

    job: str = Field(description="id of that job: the waiting job itself, or one before it")
    name: str
    nodes: int


class AskedNodesView(View):
    """Nodes that the cluster's autoscaler was asked to add."""

    nodes: int
    cpus: float = Field(description="of each node, at least")
    gpus: float = Field(description="of each node, at least")
    since: Time = Field(description="when nodes were first asked for during this wait")


class WaitingView(View):
    """The resource that a job waits for."""

    resource: str
    reason: str
    since: Time
    until: Time | None = Field(
        description="time at which the wait fails; null: it retries without limit"
    )
    reserved: ReservationView | None = Field(
        default=None, description="for a job in the queue: nodes that are reserved; null: none"
    )
    asked: AskedNodesView | None = Field(
        default=None, description="for a job in the queue: nodes to come; null: none"
    )


class OriginView(View):
    """The initial state of a job: `init_from` as resolved at submission."""

    uri: str
    step: int = Field(description="the step from which the job continues")
    what: InitPart
    job: str | None = Field(description="id of the job that saved the checkpoint")


class IntervalView(View):
    """The save interval of a tier with `every_steps: auto`, and the measurements behind it."""

    every_steps: int
    before: int = Field(description="the previous interval")
    cost_s: float | None = Field(description="training time added by one save")
    mtbf_s: float | None = Field(
        description="expected time between two failures that this tier covers"
    )
    step_s: float | None
    why: str


class TripView(View):
    """A guard trip: a step whose loss or gradients were out of bounds."""

    at: Time
    attempt: int
    kind: str = Field(description="nonfinite, loss_spike or grad_norm_spike")
    step: int
    window: int = Field(description="the data window that the step read; the first is window 0")
    loss: float | None = Field(description="null: not finite")
    grad_norm: float | None = Field(description="null: not finite")
    limit: float | None = Field(description="for a spike: the largest allowed value")
    decision: str = Field(description="report, retry, skip, rollback or stop")
    why: str
    skipped: tuple[int, int] | None = Field(description="skipped data windows: first, and end")
    back_to: int | None = Field(description="for a rollback: the newest step that may be kept")
    ranks: tuple[int, ...] = Field(description="ranks where it started")
    micro_batch: int | None
    layer: str | None = Field(description="the module or parameter where it started")
    what: str | None = Field(description="output, loss, gradient or state")


class GuardsView(View):
    """The trips of the step loop's guards, and the data windows skipped because of them."""

    trips: int = Field(default=0, description="number of guard trips in the whole job")
    ledger: tuple[tuple[int, int], ...] = Field(
        default=(), description="skipped data windows, as ranges: first, and end"
    )
    recent: tuple[TripView, ...] = Field(default=(), description="the latest trips, oldest first")


class StragglerView(View):
    """A rank that computes more slowly than its peers."""

    rank: int
    agent: str
    node: str = Field(description="name of its node, as in `/nodes`; empty: not known")
    factor: float = Field(description="its compute time relative to its peers")
    since_step: int
    since: Time = Field(description="time of detection")


class NodeFindingView(View):
    """A finding of a health probe about a node."""

    probe: str = Field(
        description="accelerator, host, network, preflight, exchange; or room: the node is too "
        "small for the job that reported it"
    )
    kind: str
    level: Level
    what: str
    where: str = Field(description="device, folder or interface")
    code: int | None = Field(description="XID number")
    lost: bool = Field(description="the device or node cannot run anything")
    needed: int = Field(default=0, description="room: what the job needs, in bytes or as a number")
    there: int = Field(default=0, description="room: what the node has of it")
    at: Time | None = Field(default=None, description="when it was reported; null: not known")


class UnwellNodeView(View):
    """A node of a job with health findings."""

    node: str = Field(description="its name, as in `/nodes`")
    ranks: tuple[int, ...] = Field(description="ranks of the job on the node; empty: a standby")
    findings: tuple[NodeFindingView, ...]


class NextLevelView(View):
    """What a program would gain from working more closely with Holdfast."""

    level: int
    gives: str
    lines: str = Field(description="lines to add to the program")


class JobView(View):
    id: str
    name: str
    state: State
    desired: Desired
    spec: dict[str, Any] = Field(description="the resolved spec, defaults filled in")
    origin: OriginView | None = Field(description="null: the job starts from its seed")
    progress: ProgressView
    brings: Brings = Field(default=Brings.RECIPE, description="what the spec brings to be run")
    level: int | None = Field(
        default=None,
        description="how much the program works with Holdfast. 0: it is launched as it is. 1: it "
        "reports its steps. 2: its checkpoints are in memory. 3: a recipe or function. null: not "
        "known yet",
    )
    integration: str | None = Field(
        default=None,
        description="the plug-in through which a program attached, such as `lightning`; null: "
        "none, or the program attached itself",
    )
    gives: str | None = Field(
        default=None, description="what Holdfast does for a program at its level; null: no program"
    )
    next_level: NextLevelView | None = Field(
        default=None, description="of a program: the level after its own; null: none"
    )
    intervals: dict[str, IntervalView] = Field(
        description="of the tiers `memory` and `remote` with a measured interval"
    )
    guards: GuardsView
    stragglers: tuple[StragglerView, ...] = Field(
        default=(), description="ranks that compute more slowly than their peers at present"
    )
    unwell_nodes: tuple[UnwellNodeView, ...] = Field(
        default=(),
        description="nodes of the present attempt, including standbys, with health findings; "
        "empty while the job is not on the cluster",
    )
    outcome: OutcomeView | None = Field(description="null until the job has ended")
    waiting: WaitingView | None
    wanted_nodes: int | None = Field(
        default=None,
        description="most nodes that may train, as ordered by `/resize`; null: as many as "
        "`resources.nodes` allows",
    )
    build: str | None = Field(
        description="the build of Holdfast that its ranks run, as in `/version`; null: not known"
    )
    packages: tuple[str, ...] | None = Field(
        default=None,
        description="the exact versions of the packages that `runtime_env` adds to its nodes; "
        "null: not known yet",
    )
    generation: int = Field(
        description="number of the changes by users (labels, priority, size, commands), from 1; "
        "the `ETag`"
    )
    created_at: Time
    started_at: Time | None
    ended_at: Time | None
    released: bool = Field(description="the job has ended and left the cluster")
    event_seq: int = Field(description="number of the newest event")


class CancelledJobView(View):
    id: str
    name: str
    state: State


class RemovedJobView(View):
    """A job that was removed with its history."""

    id: str
    name: str
    removed_checkpoints: tuple[str, ...] = Field(description="URIs")
    kept_checkpoints: tuple[str, ...] = Field(
        description="URIs; no job knows them any more, and nothing removes them by itself"
    )


class MemberView(View):
    """One rank of an attempt."""

    rank: int
    worker: str
    agent: str
    node_id: str
    host: str
    pid: int | None
    role: str


class OddsView(View):
    probability: float
    standard_error: float = Field(description="0: exact")


class MemoryProtectionView(View):
    """The failures that memory checkpoints survive, given the present partners."""

    copies: int = Field(description="copies wanted on other nodes")
    partners: dict[int, tuple[str, ...]] = Field(
        description="rank -> agents that hold its copies; empty where replicas replace copies"
    )
    recoverable: dict[int, OddsView] = Field(
        description="k -> probability that training continues from memory when k of the nodes that "
        "hold state are lost at once"
    )
    unprotected: tuple[str, ...] = Field(
        description="groups, domains and nodes whose loss would lose state, with the reason"
    )


class SpareWorkerView(View):
    """A warm process on a standby."""

    worker: str
    pid: int | None = None


class StandbyView(View):
    """An agent without ranks in an attempt."""

    agent: str
    node_id: str = ""
    host: str = ""
    workers: tuple[SpareWorkerView, ...] = ()


class FoundStateView(View):
    """A saved state that was found when an attempt formed."""

    tier: str
    step: int
    attempt: int = 0
    mesh: str = ""
    complete: bool = True
    missing: tuple[tuple[int, ...], ...] = Field(
        default=(),
        description="ranks without a copy; ranks of which one copy would be enough are grouped",
    )


class RestoreView(View):
    """The state that an attempt starts from."""

    step: int | None = Field(default=None, description="null: not known")
    attempt: int = Field(default=0, description="the attempt that computed it; 0: none, or unknown")
    tiers: dict[str, str] = Field(default={}, description="rank -> tier")
    sources: dict[str, str] = Field(default={}, description="rank -> agent or URI")
    newest: dict[str, int] = Field(
        default={}, description="tier -> newest step that it could restore"
    )
    found: tuple[FoundStateView, ...] = Field(
        default=(), description="available saved states, newest first"
    )


class JoinView(View):
    """How a rank joined an attempt."""

    phases_s: dict[str, float] = Field(default={}, description="phase -> seconds")


class AttemptView(View):
    number: int
    state: str = Field(description="forming, running or ended")
    mesh: dict[str, int]
    world_size: int
    members: tuple[MemberView, ...]
    standbys: tuple[StandbyView, ...]
    restore: RestoreView
    cause_incident: int | None
    joined: dict[str, JoinView] = Field(description="by rank")
    memory_protection: MemoryProtectionView | None = Field(
        default=None, description="null: not known yet"
    )
    first_step: int | None
    last_step: int | None
    forming_at: Time
    running_at: Time | None
    ended_at: Time | None
    reason: str | None = Field(description="why the attempt ended")


class RefusedView(View):
    """A rejected alternative of a decision."""

    decision: str
    why: str


class BudgetView(View):
    """The use of a job's failure budget at the time of a decision."""

    failures: int
    max_failures: int
    failures_left: int
    preemptions: int = Field(description="attempts that ended by preemption")
    max_preemptions: int
    without_progress: int = Field(description="attempts in a row without a new step")
    max_without_progress: int
    window_s: float


class LostView(View):
    """A process or node that was lost to a fault."""

    cause: str = ""
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    worker: str | None = None
    agent: str | None = None
    attempt: int | None = None
    on_notice: bool = Field(
        default=False, description="the cluster had announced that it would remove the node"
    )


class SuspectView(View):
    """A rank that may have caused an incident, and its place."""

    rank: int
    score: float = Field(description="strength of the evidence, up to 1")
    reasons: tuple[str, ...] = ()
    agent: str = ""
    node_id: str = ""
    worker: str | None = None


class StackView(View):
    """A call stack of all these ranks."""

    ranks: tuple[int, ...]
    frames: tuple[str, ...] = Field(description="innermost first")


class MeshChangeView(View):
    """A change of the mesh: the world shrank or grew, after a fault or because it was to."""

    before: dict[str, int]
    after: dict[str, int]
    ranks_before: int
    ranks_after: int


class IncidentView(View):
    """One fault, or one resize, from its first signal to the first new step."""

    number: int
    cause: str = Field(
        description="the root cause among `causes`; `resize`: nothing failed, another mesh was due"
    )
    causes: tuple[str, ...] = ()
    attempt: int
    lost: tuple[LostView, ...]
    evidence: tuple[str, ...] = Field(
        description="all signals of the incident, in order of arrival"
    )
    suspects: tuple[SuspectView, ...] = Field(
        default=(), description="ranks that may have caused the incident, the most likely first"
    )
    stacks: tuple[StackView, ...] = Field(
        default=(), description="for a hang: ranks with equal stacks share an entry"
    )
    decision: str | None
    reason: str | None
    refused: tuple[RefusedView, ...] = Field(
        default=(),
        description="all other decisions, the cheapest first, with the rejection reason",
    )
    budget: BudgetView | None = Field(default=None, description="null: no decision yet")
    attempts_lost: int = Field(default=0, description="number of attempts that the incident ended")
    mesh_change: MeshChangeView | None = Field(
        default=None, description="the change of the mesh because of it; null: none"
    )
    restored_step: int | None
    steps_lost: int | None
    device_seconds_lost: float = Field(
        default=0.0,
        description="from the goodput account (`/goodput`): detection, recovery and repeated "
        "steps; up to now while the incident is open",
    )
    tiers: dict[str, str]
    phases_s: dict[str, float | None]
    signalled_at: Time | None = Field(default=None, description="time of the first signal")
    opened_at: Time
    closed_at: Time | None
    resolution: str | None


class FaultView(View):
    """A fault injected by a user."""

    number: int = Field(description="per job, from 1, without gaps")
    kind: str
    fault: dict[str, Any] = Field(
        description="the requested fault, including a randomly chosen rank"
    )
    requested_at: Time
    injected_at: Time | None = Field(
        description="time at which the job's supervisor accepted it; a fault with a step or phase "
        "waits for it there. null: not yet"
    )


class EventView(View):
    seq: int = Field(description="per job, from 1, without gaps")
    at: Time
    kind: str
    data: EventDocument


class MetricPoint(View):
    step: int
    attempt: int
    at: Time
    values: dict[str, float | int | str | None]


class DiscardedView(View):
    """Steps of an attempt that a rollback discarded."""

    attempt: int
    points: tuple[MetricPoint, ...] = Field(description="ascending by step")


class LogLineView(View):
    line: int = Field(description="number of the line in the job, in order of arrival")
    at: Time
    rank: int | None
    attempt: int
    agent: str
    worker: str
    stream: str
    text: str
    level: LogLevel | None = Field(
        default=None, description="parsed from the text; null: not found"
    )


class NodeTroubleView(View):
    """An incident attributed to a node."""

    job: str
    incident: int
    cause: str
    at: Time


class NodeView(View):
    id: str = Field(description="the machine's address; on the embedded cluster, Ray's id")
    host: str
    state: NodeStanding
    reason: str | None = Field(description="why the node is not used; null: it is")
    since: Time | None
    until: Time | None = Field(description="when it ends by itself; null: when a user lifts it")
    quarantines: int = Field(
        description="consecutive quarantines; each is twice as long as the previous"
    )
    there: bool = Field(description="the node is in the cluster now")
    cpus: float
    gpus: float
    first_seen: Time
    last_seen: Time
    jobs: tuple[str, ...] = Field(description="jobs with ranks on the node now")
    findings: tuple[NodeFindingView, ...] = Field(
        description="reported by the last job on the node"
    )
    memory_gb_per_s: dict[str, float] = Field(
        description="device -> memory copy bandwidth measured by the check before use"
    )
    incidents: tuple[NodeTroubleView, ...] = Field(description="newest first, 50 at most")


class CheckpointView(View):
    """A checkpoint of the remote tier; deleted and bad checkpoints stay listed."""

    step: int
    attempt: int
    tier: str
    uri: str
    nbytes: int
    mesh: dict[str, int]
    metrics: dict[str, float] = Field(description="metrics of its step, as far as known")
    saved_at: Time
    verified_at: Time | None = Field(description="when all bytes were last verified")
    deleted_at: Time | None
    deleted_why: str | None
    bad: str | None = Field(description="the verification error, if any")
    best: bool = Field(description="kept as a best checkpoint by `checkpoint.remote.keep_best`")
    pinned: bool | None = Field(description="null: the storage did not answer")
    needed_by: tuple[str, ...] | None = Field(
        description="jobs that start from it and have no own checkpoint yet; null: as above"
    )


class MemoryTierView(View):
    protected_step: int | None = Field(
        description="newest step whose state is also held by every rank's partner; null: none, or "
        "the job has ended"
    )


class CodeView(View):
    """A user's code package."""

    code: str = Field(description="`sha256:` and the digest of its bytes, as used in a spec")
    bytes: int
    files: int


class DigestView(View):
    step: int
    digest: str = Field(description="digest of the whole state after the step")
