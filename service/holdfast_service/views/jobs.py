"""The response models of jobs, and of what a job's own document consists of."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.job_model.program_levels import Brings
from holdfast_service.job_model.times import Time
from holdfast_service.views.nodes import UnwellNodeView
from holdfast_service.views.view import View
from holdfast_workers.protocol.messages import InitPart


class ProgressView(View):
    """How far a job has come."""

    step: int | None = Field(
        description="optimizer steps applied, as last reported; null: a program has reported none"
    )
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


class NextLevelView(View):
    """What a program would gain from working more closely with Holdfast."""

    level: int = Field(description="the level that the lines belong to")
    gives: str
    lines: str = Field(description="lines to add to the program")


class SourceReadView(View):
    """A source of a job, and how much of it the steps so far have read."""

    path: str
    weight: float | None = Field(description="as in the spec; null: all sources are one pool")
    tokens: int | None = Field(default=None, description="in all; null: not prepared")
    tokens_seen: int | None = Field(
        default=None,
        description="`epochs` × `tokens`, thus about: a shard's last sample is shorter; null: not "
        "prepared",
    )
    epochs: float | None = Field(
        default=None,
        description="how often it was read, by the position of the newest step; without weights, "
        "how often all sources were. With weights, in a job that goes on from another's "
        "checkpoint, about: which windows that one's guards skipped is not known. null: not "
        "prepared",
    )


class DataReadView(View):
    """What a job with `data.sources` reads."""

    tokenizer: str = Field(
        description="its name, size, digest and special tokens, in a line; its name alone before "
        "the sources are prepared"
    )
    sources: tuple[SourceReadView, ...]


class JobView(View):
    id: str
    name: str
    state: State
    desired: Desired
    spec: dict[str, Any] = Field(description="the resolved spec, defaults filled in")
    origin: OriginView | None = Field(description="null: the job starts from its seed")
    progress: ProgressView
    reads: DataReadView | None = Field(
        default=None, description="what it reads of `data.sources`; null: it has none"
    )
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
        default=None, description="of a program: what is worth adding next; null: nothing"
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


class CodeView(View):
    """A user's code package."""

    code: str = Field(description="`sha256:` and the digest of its bytes, as used in a spec")
    bytes: int
    files: int
