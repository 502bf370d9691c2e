"""The kinds of events, and the base of all events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from pydantic import ConfigDict


class EventKind(StrEnum):
    """The name of each kind, as stored and shown. The class of a kind describes its fields."""

    # Emitted by a supervisor.
    PHASE = "phase"
    ATTEMPT_FORMING = "attempt.forming"
    ATTEMPT_RUNNING = "attempt.running"
    ATTEMPT_ENDED = "attempt.ended"
    INCIDENT_OPENED = "incident.opened"
    INCIDENT_UPDATED = "incident.updated"
    INCIDENT_CLOSED = "incident.closed"
    CHECKPOINT_SAVED = "checkpoint.saved"
    CHECKPOINT_DELETED = "checkpoint.deleted"  # also by the API server, for a user
    CHECKPOINT_BAD = "checkpoint.bad"  # also by the API server, after a verification
    INITIALISED_FROM = "job.initialised_from"
    MEMORY_PLACED = "memory.placed"
    PROGRAM_ATTACHED = "program.attached"
    PROGRAM_RESUMED = "program.resumed"
    CHECKPOINT_INTERVAL = "checkpoint.interval"
    STALLED = "stalled"
    STRAGGLER = "straggler"
    GUARD_TRIPPED = "guard.tripped"
    WAITING = "waiting"  # also by the reconciler
    STANDBY = "standby"
    NODE_HEALTH = "node.health"
    NODE_DRAINING = "node.draining"
    JOB_STOPPING = "job.stopping"
    STOP_UNDONE = "job.stop_undone"
    ENDS_EARLY = "job.ends_early"
    JOB_AWAY = "job.away"  # also by the reconciler
    FAULT_FAILED = "fault.failed"
    ENDED = "ended"

    # Emitted by the API server and the reconciler.
    JOB_SUBMITTED = "job.submitted"
    JOB_STATE = "job.state"
    CANCEL_REQUESTED = "job.cancel_requested"
    PAUSE_REQUESTED = "job.pause_requested"
    RESTART_REQUESTED = "job.restart_requested"
    RESIZE_REQUESTED = "job.resize_requested"
    RESUME_REQUESTED = "job.resume_requested"
    JOB_RELEASED = "job.released"
    RELEASE_OVERDUE = "release.overdue"
    DATA_PREPARED = "data.prepared"
    MODEL_PREPARED = "model.prepared"
    PACKAGES_INSTALLED = "packages.installed"
    SUPERVISOR_STARTED = "supervisor.started"
    CHECKPOINT_VERIFIED = "checkpoint.verified"
    CHECKPOINT_PINNED = "checkpoint.pinned"
    CHECKPOINT_UNPINNED = "checkpoint.unpinned"
    DIGEST_MISMATCH = "digest.mismatch"
    NODE_QUARANTINED = "node.quarantined"
    FAULT_INJECTED = "fault.injected"
    EVENT_UNREADABLE = "event.unreadable"
    EVENTS_LOST = "events.lost"
    ROWS_LOST = "rows.lost"


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """The base of all events. Times are Unix seconds; a step is an optimizer step."""

    # Numbers that are not finite stay as they are; the store writes them as text.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="constants")

    kind: ClassVar[EventKind]
    merged: ClassVar[str] = ""
    """The field, if any, whose own fields lie beside those of the event in JSON."""
    omitted: ClassVar[frozenset[str]] = frozenset()
    """The fields that are left out of the JSON while they are None; others are null then."""
