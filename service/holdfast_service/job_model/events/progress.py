"""Events of a job's life: its states, waits, stops and end, and the delivery of its events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from holdfast_service.job_model.events.kinds import EventKind, JobEvent
from holdfast_service.job_model.lifecycle import Phase, State, StopKind, StopOrder


@dataclass(frozen=True, kw_only=True)
class JobSubmittedEvent(JobEvent):
    """The first event of every job."""

    kind = EventKind.JOB_SUBMITTED
    name: str


@dataclass(frozen=True, kw_only=True)
class JobStateEvent(JobEvent):
    """The job's state has changed. In JSON: {from, to, reason}."""

    kind = EventKind.JOB_STATE
    old: Annotated[State, Field(alias="from")]
    new: Annotated[State, Field(alias="to")]
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class CancelRequestedEvent(JobEvent):
    """A user cancels the job."""

    kind = EventKind.CANCEL_REQUESTED


@dataclass(frozen=True, kw_only=True)
class PauseRequestedEvent(JobEvent):
    """A user pauses the job."""

    kind = EventKind.PAUSE_REQUESTED


@dataclass(frozen=True, kw_only=True)
class RestartRequestedEvent(JobEvent):
    """A user lets the job leave the cluster and continue in new processes."""

    kind = EventKind.RESTART_REQUESTED


@dataclass(frozen=True, kw_only=True)
class ResizeRequestedEvent(JobEvent):
    """A user orders the size of an elastic job."""

    kind = EventKind.RESIZE_REQUESTED
    nodes: int | None
    """Most nodes that are to train; None: as many as the spec allows."""


@dataclass(frozen=True, kw_only=True)
class ResumeRequestedEvent(JobEvent):
    """A user resumes the job."""

    kind = EventKind.RESUME_REQUESTED


@dataclass(frozen=True, kw_only=True)
class JobReleasedEvent(JobEvent):
    """Nothing of the job is on the cluster any more."""

    kind = EventKind.JOB_RELEASED


@dataclass(frozen=True, kw_only=True)
class WaitEvent(JobEvent):
    """The base of the events of a wait."""

    omitted = frozenset({"reason"})
    resource: str
    reason: str | None = None
    until: float | None = None
    """When the wait fails; None: never, or not known."""


@dataclass(frozen=True, kw_only=True)
class WaitingEvent(WaitEvent):
    """The job waits for a resource."""

    kind = EventKind.WAITING


@dataclass(frozen=True, kw_only=True)
class ReleaseOverdueEvent(WaitEvent):
    """Something of the job is still on the cluster after the deadline of its release."""

    kind = EventKind.RELEASE_OVERDUE


@dataclass(frozen=True, kw_only=True)
class PackagesInstalledEvent(JobEvent):
    """A node has installed the packages of `runtime_env`; every node of the job installs these."""

    kind = EventKind.PACKAGES_INSTALLED
    host: str
    packages: tuple[str, ...]
    took_s: float


@dataclass(frozen=True, kw_only=True)
class DataPreparedEvent(JobEvent):
    """The sources of the job are token sets: they were made, or were there."""

    kind = EventKind.DATA_PREPARED
    sources: int
    tokens: int
    documents: int
    vocabulary: int
    took_s: float
    """Seconds for which the job waited for them."""
    validation_tokens: int = 0
    """Tokens that are kept for validation, beside `tokens`."""
    bad_count: int = 0
    """Records that were left out."""
    bad: tuple[str, ...] = ()
    """The first of them: file, row and why."""


@dataclass(frozen=True, kw_only=True)
class ModelPreparedEvent(JobEvent):
    """The weights of the job's published model were read: each byte of them has a digest now."""

    kind = EventKind.MODEL_PREPARED
    folder: str
    family: str
    """As its configuration names it."""
    nbytes: int
    """Of its files of weights."""
    digest: str
    """Of their manifest."""
    took_s: float
    """Seconds for which the job waited for them."""


@dataclass(frozen=True, kw_only=True)
class SupervisorStartedEvent(JobEvent):
    """The reconciler started the job's supervisor, or adopted the one that it found."""

    kind = EventKind.SUPERVISOR_STARTED
    created: bool
    times: int
    """How often it was started, this time included."""


class AwayWhy(StrEnum):
    """Why nothing of a job ran."""

    GONE = "gone"
    """Everything of it had ended, unseen by any server; it starts again."""
    STOPPED = "stopped"
    """The supervisor's machine, or all of its processes, stood still, and went on."""


@dataclass(frozen=True, kw_only=True)
class JobAwayEvent(JobEvent):
    """Nothing of the job ran until now, so it held no device in this time."""

    kind = EventKind.JOB_AWAY
    away_s: float
    """How long, up to the event's own time."""
    why: AwayWhy


@dataclass(frozen=True, kw_only=True)
class PhaseEvent(JobEvent):
    """The supervisor entered another phase."""

    kind = EventKind.PHASE
    phase: Phase


@dataclass(frozen=True, kw_only=True)
class JobStoppingEvent(JobEvent):
    """A last step is made and saved, then the job stops."""

    kind = EventKind.JOB_STOPPING
    wanted: StopKind
    reason: str
    deadline: float
    step: int | None = None
    """The newest step; None: a program has reported none."""

    @classmethod
    def of(cls, order: StopOrder, step: int | None) -> JobStoppingEvent:
        return cls(wanted=order.kind, reason=order.reason, deadline=order.deadline, step=step)

    @property
    def order(self) -> StopOrder:
        return StopOrder(self.wanted, self.reason, self.deadline)


@dataclass(frozen=True, kw_only=True)
class StopUndoneEvent(JobEvent):
    """No checkpoint was durable in time; training continues."""

    kind = EventKind.STOP_UNDONE
    wanted: str
    """The value of a `StopKind`."""
    reason: str = ""
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class EndsEarlyEvent(JobEvent):
    """The ranks have agreed that their last step is this one, by `evaluate.stop`. A later attempt
    that begins before it decides anew."""

    kind = EventKind.ENDS_EARLY
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class EndedEvent(JobEvent):
    """The last event of a supervisor."""

    kind = EventKind.ENDED
    outcome: str = State.FAILED
    """SUCCEEDED, FAILED, CANCELLED or PAUSED; any other counts as FAILED."""
    code: str = ""
    message: str = ""
    traceback: str | None = None
    step: int | None = None
    durable_step: int | None = None
    """The newest step in the remote tier when a job was stopped, if any."""


@dataclass(frozen=True, kw_only=True)
class EventUnreadableEvent(JobEvent):
    """An event of the supervisor could not be applied; it is stored as it came."""

    kind = EventKind.EVENT_UNREADABLE
    of_kind: Annotated[str, Field(alias="kind")]
    error: str


@dataclass(frozen=True, kw_only=True)
class EventsLostEvent(JobEvent):
    """Events of a supervisor were lost between these two of its numbers."""

    kind = EventKind.EVENTS_LOST
    after: int
    before: int


@dataclass(frozen=True, kw_only=True)
class RowsLostEvent(JobEvent):
    """The metric rows and digests of the steps between these two were lost; the training was not
    affected."""

    kind = EventKind.ROWS_LOST
    attempt: int
    after: int
    before: int
