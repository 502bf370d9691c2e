"""What the control plane shows of a job: read-only values, made for JSON.

Times are Unix seconds. A number that was not measured is null, never zero. Everything here is
derived from the store alone, so any API server gives the same answer.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.job_model.log_filters import LogLevel
from holdfast_service.policy.quarantine import Standing
from holdfast_workers.health.findings import Level
from holdfast_workers.protocol.messages import InitPart


class View(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True)  # a command needs few of them


class ProgressView(View):
    """How far a job has come."""

    step: int = Field(description="optimizer steps applied, as last reported")
    steps: int = Field(description="optimizer steps the spec asks for")
    attempt: int = Field(description="0: no world was formed yet")
    loss: float | None
    tokens_per_second: float | None
    incidents: int = Field(description="faults so far, the open one included")


class OutcomeView(View):
    """Why a job ended. `code` is stable; `traceback` is the user program's own, if it raised."""

    code: str
    message: str
    traceback: str | None


class WaitingView(View):
    """The named thing a job waits for."""

    resource: str
    reason: str
    since: float
    until: float | None = Field(description="when the wait ends with a reason; null: it retries")


class OriginView(View):
    """The state that a job begins with, as `init_from` was resolved when it was submitted."""

    uri: str
    step: int = Field(description="the step that the job goes on from")
    what: InitPart
    job: str | None = Field(description="id of the job whose checkpoint it is")


class IntervalView(View):
    """How often a tier of `every_steps: auto` is saved, and what that follows from."""

    every_steps: int
    before: int = Field(description="the interval until then")
    cost_s: float | None = Field(description="what one save adds to training")
    mtbf_s: float | None = Field(description="expected between two failures that the tier is for")
    step_s: float | None
    why: str


class TripView(View):
    """A guard that tripped: a step whose loss or gradients were out of bounds."""

    at: float
    attempt: int
    kind: str = Field(description="nonfinite, loss_spike or grad_norm_spike")
    step: int
    window: int = Field(description="of data, that the step had read; window 0 is the first")
    loss: float | None = Field(description="null: not finite")
    grad_norm: float | None = Field(description="null: not finite")
    limit: float | None = Field(description="of a spike: what the value may be")
    decision: str = Field(description="report, retry, skip, rollback or stop")
    why: str
    skipped: tuple[int, int] | None = Field(description="windows passed over: first, and end")
    back_to: int | None = Field(description="of a rollback: the newest step that may be kept")
    ranks: tuple[int, ...] = Field(description="on which it began")
    micro_batch: int | None
    layer: str | None = Field(description="the module or parameter where it began")
    what: str | None = Field(description="output, loss, gradient or state")


class GuardsView(View):
    """What the guards of the step loop have found and done."""

    trips: int = Field(default=0, description="how often one tripped, in the whole job")
    ledger: tuple[tuple[int, int], ...] = Field(
        default=(), description="windows of data passed over, as ranges: first, and end"
    )
    recent: tuple[TripView, ...] = Field(default=(), description="the last of them, oldest first")


class StragglerView(View):
    """A rank that computes more slowly than its peers."""

    rank: int
    agent: str
    node: str = Field(description="name of its node, as in `/nodes`; empty: not known")
    factor: float = Field(description="how many times as long as its peers it takes")
    since_step: int
    since: float = Field(description="when that was noticed")


class NodeFindingView(View):
    """What a health probe found of a node."""

    probe: str = Field(description="accelerator, host, network, preflight or exchange")
    kind: str
    level: Level
    what: str
    where: str = Field(description="device, folder or interface")
    code: int | None = Field(description="XID number")
    lost: bool = Field(description="nothing can run there")


class UnwellNodeView(View):
    """A node of a job of whose health something was found."""

    node: str = Field(description="its name, as in `/nodes`")
    ranks: tuple[int, ...] = Field(description="that the job has there; none: a standby")
    findings: tuple[NodeFindingView, ...]


class JobView(View):
    id: str
    name: str
    state: State
    desired: Desired
    spec: dict[str, Any] = Field(description="the resolved spec, defaults filled in")
    origin: OriginView | None = Field(description="null: it begins with the state of its seed")
    progress: ProgressView
    intervals: dict[str, IntervalView] = Field(
        description="of the tiers `memory` and `remote` whose interval was chosen by measurement"
    )
    guards: GuardsView
    stragglers: tuple[StragglerView, ...] = Field(
        default=(), description="ranks that compute more slowly than their peers at present"
    )
    unwell_nodes: tuple[UnwellNodeView, ...] = Field(
        default=(),
        description="nodes of the present attempt, standbys too, of whose health something was "
        "found; of a job that is on the cluster",
    )
    outcome: OutcomeView | None = Field(description="null while the job has not ended")
    waiting: WaitingView | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    released: bool = Field(description="the job has ended and nothing of it is left on the cluster")
    event_seq: int = Field(description="number of its newest event")


class JobPage(View):
    jobs: tuple[JobView, ...] = Field(description="newest first")
    next_cursor: str | None = Field(description="null: no more")


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
    """What memory checkpoints survive, as the partners of an attempt are placed now."""

    copies: int = Field(description="copies wanted on other nodes")
    partners: dict[int, tuple[str, ...]] = Field(
        description="rank -> agents that keep its copies; none where replicas make them needless"
    )
    recoverable: dict[int, OddsView] = Field(
        description="k -> probability that training goes on from memory when k of the nodes that "
        "hold state are lost at once"
    )
    unprotected: tuple[str, ...] = Field(
        description="groups, domains and nodes whose loss would lose state, and why"
    )


class AttemptView(View):
    number: int
    state: str = Field(description="forming, running or ended")
    mesh: dict[str, int]
    world_size: int
    members: tuple[MemberView, ...]
    standbys: tuple[dict[str, Any], ...]
    restore: dict[str, Any] = Field(
        description="step restored; tier and source agent per rank; `newest` step that each tier "
        "could have given, and `found`: what there was, and which ranks it lacked"
    )
    cause_incident: int | None
    joined: dict[str, Any] = Field(description="per rank: seconds of each phase of joining")
    memory_protection: MemoryProtectionView | None = Field(
        default=None, description="null: not known yet"
    )
    first_step: int | None
    last_step: int | None
    forming_at: float
    running_at: float | None
    ended_at: float | None
    reason: str | None = Field(description="why it ended")


class RefusedView(View):
    """A decision that was not taken."""

    decision: str
    why: str


class BudgetView(View):
    """What a job had used of what it may within the window, when a decision was taken."""

    failures: int
    max_failures: int
    failures_left: int
    preemptions: int = Field(description="attempts that ended because something was taken away")
    max_preemptions: int
    without_progress: int = Field(description="attempts in a row without a new step")
    max_without_progress: int
    window_s: float


class IncidentView(View):
    """One fault, from its first signal to the first new step."""

    number: int
    cause: str = Field(description="the deepest of `causes`")
    causes: tuple[str, ...] = ()
    attempt: int
    lost: tuple[Any, ...]
    evidence: tuple[Any, ...] = Field(description="all signals of it, the first one first")
    suspects: tuple[dict[str, Any], ...] = Field(
        default=(),
        description="ranks that may be to blame, the likeliest first: score (up to 1), reasons, "
        "agent, node_id, worker",
    )
    stacks: tuple[dict[str, Any], ...] = Field(
        default=(),
        description="of a hang: where the ranks stood (frames, the innermost first), told once for "
        "those that stood alike",
    )
    decision: str | None
    reason: str | None
    refused: tuple[RefusedView, ...] = Field(
        default=(), description="every other decision, the cheapest first, and why it was not taken"
    )
    budget: BudgetView | None = Field(default=None, description="null: nothing was decided yet")
    attempts_lost: int = Field(default=0, description="attempts that it ended")
    restored_step: int | None
    steps_lost: int | None
    device_seconds_lost: float = Field(
        default=0.0,
        description="by the account of the job's time (`/goodput`): of its detection, its recovery "
        "and the steps made again, times devices; until now, while it is open",
    )
    tiers: dict[str, str]
    phases_s: dict[str, float | None]
    signalled_at: float | None = Field(default=None, description="of the first signal")
    opened_at: float
    closed_at: float | None
    resolution: str | None


class FaultView(View):
    """A fault that somebody injected."""

    number: int = Field(description="per job, from 1, without gaps")
    kind: str
    fault: dict[str, Any] = Field(description="as asked for; a rank that was left to chance too")
    requested_at: float
    injected_at: float | None = Field(
        description="when the job's supervisor took it; one that names a step or phase waits for "
        "it there. null: not yet"
    )


class EventView(View):
    seq: int = Field(description="per job, from 1, without gaps")
    at: float
    kind: str
    data: dict[str, Any]


class EventPage(View):
    events: tuple[EventView, ...]
    last_seq: int = Field(description="pass it as `after` to go on; `after` itself if none came")
    state: State = Field(description="the job's state when these events were read")
    ended: bool = Field(description="the job is over and nothing of its run is left to be told")


class MetricPoint(View):
    step: int
    attempt: int
    at: float
    values: dict[str, float | int | str | None]


class DiscardedView(View):
    """Steps of an attempt that a rollback threw away."""

    attempt: int
    points: tuple[MetricPoint, ...] = Field(description="ascending by step")


class MetricPage(View):
    names: tuple[str, ...]
    points: tuple[MetricPoint, ...] = Field(description="ascending by step, one per step")
    last_step: int = Field(description="pass it as `after_step` to go on")
    more: bool
    discarded: tuple[DiscardedView, ...] = Field(
        default=(), description="if asked for: what is not part of history, by attempt"
    )


class LogLineView(View):
    line: int = Field(description="number of the line in the job, in order of arrival")
    at: float
    rank: int | None
    attempt: int
    agent: str
    worker: str
    stream: str
    text: str
    level: LogLevel | None = Field(default=None, description="as its text says; null: it does not")


class LogPage(View):
    lines: tuple[LogLineView, ...]
    last_line: int = Field(description="pass it as `after` to go on")
    more: bool = Field(description="there may be more beyond `last_line`, also if none came")
    first_line: int | None = Field(
        default=None, description="backwards: pass it as `before` to go on; null: nothing before"
    )


class NodeTroubleView(View):
    """An incident that a node had a part in."""

    job: str
    incident: int
    cause: str
    at: float


class NodeView(View):
    id: str = Field(description="the machine's address; on the embedded cluster, Ray's id")
    host: str
    state: Standing
    reason: str | None = Field(description="why it is set aside; null: it is not")
    since: float | None
    until: float | None = Field(description="when it is back by itself; null: when it is lifted")
    quarantines: int = Field(description="in a row; each is twice as long as the one before")
    there: bool = Field(description="the cluster has it now")
    cpus: float
    gpus: float
    first_seen: float
    last_seen: float
    jobs: tuple[str, ...] = Field(description="that have ranks there now")
    findings: tuple[NodeFindingView, ...] = Field(description="as the last job on it told")
    memory_gb_per_s: dict[str, float] = Field(
        description="device -> how fast its memory was copied when it was checked before use"
    )
    incidents: tuple[NodeTroubleView, ...] = Field(description="newest first, 50 at most")


class NodePage(View):
    nodes: tuple[NodeView, ...] = Field(description="all that were ever seen, present ones first")


class CheckpointView(View):
    """A checkpoint of the remote tier; a deleted or bad one stays on record."""

    step: int
    attempt: int
    tier: str
    uri: str
    nbytes: int
    mesh: dict[str, int]
    metrics: dict[str, float] = Field(description="of its step, as far as they were known")
    saved_at: float
    verified_at: float | None = Field(description="when every byte was last found as it was saved")
    deleted_at: float | None
    deleted_why: str | None
    bad: str | None = Field(description="what verification said, if it failed")
    best: bool = Field(description="kept as one of the best by `checkpoint.remote.keep_best`")
    pinned: bool | None = Field(description="null: the storage could not be asked")
    needed_by: tuple[str, ...] | None = Field(
        description="jobs that are to begin with it and have saved nothing yet; null: as above"
    )


class MemoryTierView(View):
    protected_step: int | None = Field(
        description="newest step whose state every rank's partner holds too; null: none, or "
        "the job has ended"
    )


class CodeView(View):
    """A package of a user's code."""

    code: str = Field(description="`sha256:` and the digest of its bytes: what a spec names")
    bytes: int
    files: int


class CheckpointsView(View):
    """What a job can go on from, by tier."""

    memory: MemoryTierView
    remote: tuple[CheckpointView, ...] = Field(description="newest step first")
    storage_problem: str | None = Field(description="why the storage could not be asked, if so")


class VerificationView(View):
    """How far a verification is. The last one of a stream has `done`."""

    step: int
    attempt: int
    read_bytes: int
    nbytes: int
    done: bool
    bad: str | None = Field(description="once done, what is wrong with it; null: nothing")
    problem: str | None = Field(description="why it ended without an answer, if it did")


class DigestPage(View):
    digests: dict[int, str] = Field(description="step -> digest of the whole state, ascending")
    last_step: int
    more: bool
