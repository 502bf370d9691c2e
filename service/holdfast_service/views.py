"""What the control plane shows of a job: read-only values, made for JSON.

Times are Unix seconds. A number that was not measured is null, never zero. Everything here is
derived from the store alone, so any API server gives the same answer.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from holdfast_service.lifecycle import Desired, State


class View(BaseModel):
    model_config = ConfigDict(frozen=True)


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


class JobView(View):
    id: str
    name: str
    state: State
    desired: Desired
    spec: dict[str, Any] = Field(description="the resolved spec, defaults filled in")
    progress: ProgressView
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


class AttemptView(View):
    number: int
    state: str = Field(description="forming, running or ended")
    mesh: dict[str, int]
    world_size: int
    members: tuple[MemberView, ...]
    standbys: tuple[dict[str, Any], ...]
    restore: dict[str, Any] = Field(description="step restored, tier and source agent per rank")
    cause_incident: int | None
    joined: dict[str, Any] = Field(description="per rank: seconds of each phase of joining")
    first_step: int | None
    last_step: int | None
    forming_at: float
    running_at: float | None
    ended_at: float | None
    reason: str | None = Field(description="why it ended")


class IncidentView(View):
    """One fault, from its first signal to the first new step."""

    number: int
    cause: str
    attempt: int
    lost: tuple[Any, ...]
    evidence: tuple[Any, ...]
    decision: str | None
    reason: str | None
    restored_step: int | None
    steps_lost: int | None
    tiers: dict[str, str]
    phases_s: dict[str, float | None]
    opened_at: float
    closed_at: float | None
    resolution: str | None


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


class MetricPage(View):
    names: tuple[str, ...]
    points: tuple[MetricPoint, ...] = Field(description="ascending by step, one per step")
    last_step: int = Field(description="pass it as `after_step` to go on")
    more: bool


class LogLineView(View):
    line: int = Field(description="number of the line in the job, in order of arrival")
    at: float
    rank: int | None
    attempt: int
    agent: str
    worker: str
    stream: str
    text: str


class LogPage(View):
    lines: tuple[LogLineView, ...]
    last_line: int = Field(description="pass it as `after` to go on")
    more: bool


class CheckpointView(View):
    step: int
    attempt: int
    tier: str
    uri: str
    nbytes: int
    mesh: dict[str, int]
    saved_at: float
    deleted_at: float | None
    deleted_why: str | None
    bad: str | None = Field(description="what verification said, if it failed")


class DigestPage(View):
    digests: dict[int, str] = Field(description="step -> digest of the whole state, ascending")
    last_step: int
    more: bool
