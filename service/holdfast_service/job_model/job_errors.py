"""The errors that calls of the services raise, besides InvalidSpec; each has a stable code."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_workers.spec import SpecFault


class JobError(Exception):
    """Root of the services' errors, besides InvalidSpec."""

    code = "job_error"


class JobNotFound(JobError):
    code = "job_not_found"


class JobEnded(JobError):
    """The job has ended, so that the command cannot be carried out."""

    code = "job_ended"


class IdempotencyConflict(JobError):
    """The idempotency key was used before with another document."""

    code = "idempotency_conflict"


class InvalidKey(JobError):
    code = "invalid_idempotency_key"


class InjectionDisabled(JobError):
    """Fault injection is disabled on this server."""

    code = "injection_disabled"


class InvalidFault(JobError):
    """The requested fault is invalid; `faults` lists all problems."""

    code = "invalid_fault"

    def __init__(self, faults: Sequence[SpecFault]) -> None:
        count = "1 problem" if len(faults) == 1 else f"{len(faults)} problems"
        super().__init__(f"the requested fault is invalid: {count}")
        self.faults = faults


class InvalidCursor(JobError):
    code = "invalid_cursor"


class UnknownMetric(JobError):
    code = "unknown_metric"


class SpecUnreadable(JobError):
    """The job's stored spec was written by another version, and this version cannot read it."""

    code = "spec_unreadable"


class NodeNotFound(JobError):
    """No node with this name was ever seen, or the prefix matches several nodes."""

    code = "node_not_found"


class InvalidTime(JobError):
    """The given time is in the past."""

    code = "invalid_time"


class InvalidRegex(JobError):
    """The regular expression is malformed or too large."""

    code = "invalid_regex"
