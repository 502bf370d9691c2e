"""What a call on jobs may raise, beside InvalidSpec; each with a stable code."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_workers.spec import Fault


class JobError(Exception):
    """Root of what a call on jobs may raise, beside InvalidSpec."""

    code = "job_error"


class JobNotFound(JobError):
    code = "job_not_found"


class JobEnded(JobError):
    """The job has ended; what was asked can no longer be done."""

    code = "job_ended"


class IdempotencyConflict(JobError):
    """The key was used before, with another document."""

    code = "idempotency_conflict"


class InvalidKey(JobError):
    code = "invalid_idempotency_key"


class InjectionDisabled(JobError):
    """The server injects no faults into jobs."""

    code = "injection_disabled"


class InvalidFault(JobError):
    """The fault that was asked for is impossible; `faults` says everything that is wrong."""

    code = "invalid_fault"

    def __init__(self, faults: Sequence[Fault]) -> None:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__(f"the request has {count}")
        self.faults = faults


class InvalidCursor(JobError):
    code = "invalid_cursor"


class UnknownMetric(JobError):
    code = "unknown_metric"


class SpecUnreadable(JobError):
    """What is stored of the job's spec is another version's, and this one cannot read it."""

    code = "spec_unreadable"


class NodeNotFound(JobError):
    """No node of this name was ever seen, or the name's beginning fits several."""

    code = "node_not_found"


class InvalidTime(JobError):
    """A time that is over already."""

    code = "invalid_time"


class InvalidRegex(JobError):
    """A regular expression that cannot be read, or is too large."""

    code = "invalid_regex"
